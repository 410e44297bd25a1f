"""A full disk: a tmpfs of a few MiB, filled under a run at several moments."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torture_run import Broken, Victim, check_all_whole, check_same, claim, facts_of, remnants_of, reports_of, steps_of

# Commands that enter a private mount namespace, as a normal user and as root.
NAMESPACES = (("unshare", "--user", "--map-root-user", "--mount"), ("unshare", "--mount"))
DISK_MIB = 8
NO_ROOM = os.strerror(errno.ENOSPC)
PATIENCE_SECONDS = 120.0


def mount_namespace(folder: Path) -> tuple[str, ...]:
    """Returns a command that enters a namespace where a tmpfs can be mounted on ``folder``.

    Raises:
        Broken: there is none.
    """
    for words in NAMESPACES:
        try:
            if subprocess.run([*words, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode == 0:
                return words
        except FileNotFoundError:
            continue
    raise Broken("no tmpfs can be mounted, neither as root nor with `unshare --user --map-root-user --mount`")


def fill_disks(folder: Path, num_steps: int) -> dict[str, str]:
    """Runs this file in a mount namespace; returns the error of the run for each moment when the disk was filled.

    Raises:
        Broken: nothing can be mounted, or a run violated a claim.
    """
    (folder / "disk").mkdir()
    command = [*mount_namespace(folder / "disk"), sys.executable, __file__, str(folder), str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    claim(done.returncode == 0, done.stderr.strip())
    rows: dict[str, str] = json.loads(done.stdout)
    return rows


def main(folder: Path, num_steps: int) -> None:
    """Mounts the disk and prints the errors as JSON."""
    disk = folder / "disk"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", disk], check=True)
    # Saves are rare, so that a moment between two saves can be hit.
    victim = Victim(folder, num_steps, checkpoint_every=num_steps // 4)
    cases = {
        "too little space for the next checkpoint": at_a_checkpoint,
        "no space in the middle of a save": in_a_save,
        "no space for a report": at_a_report,
        "no space to start": at_the_start,
    }
    print(json.dumps({name: case(victim, disk / name.replace(" ", "_")) for name, case in cases.items()}))


def at_a_checkpoint(victim: Victim, run_dir: Path) -> str:
    """The disk has space for reports and none for the next checkpoint."""

    def fill() -> None:
        fill_up(run_dir.parent, leave=100 * 1024)

    def saved() -> bool:
        return len(steps_of(run_dir)) == 2

    said = _stopped(victim, run_dir, saved, fill, "the checkpoint of step")
    claim(facts_of(run_dir)["status"] == "failed", f"{run_dir} does not have the status failed")
    return _resume(victim, run_dir, said)


def in_a_save(victim: Victim, run_dir: Path) -> str:
    """The disk is filled when Orbax has started to write."""

    def saving() -> bool:
        return len(steps_of(run_dir)) >= 2 and bool(remnants_of(run_dir, "unfinished"))

    said = _stopped(victim, run_dir, saving, lambda: fill_up(run_dir.parent), "could not be written")
    return _resume(victim, run_dir, said)


def at_a_report(victim: Victim, run_dir: Path) -> str:
    """The disk is filled under a run without checkpoints: only metrics.jsonl grows."""
    flags = ("--checkpoint-every", 0, "--num-steps", 10_000_000)
    started = lambda: len(reports_of(run_dir)) > 2  # noqa: E731
    said = _stopped(
        victim, run_dir, started, lambda: fill_up(run_dir.parent), "metrics.jsonl cannot be written", *flags
    )
    claim((run_dir / "metrics.jsonl").read_text().endswith("\n"), "metrics.jsonl ends in an incomplete line")
    return said


def at_the_start(victim: Victim, run_dir: Path) -> str:
    """The disk is full before anything is written; the directory can be used once there is space."""
    fill_up(run_dir.parent)
    said = _stopped(victim, run_dir, lambda: True, lambda: None, "cannot be")
    victim.finish(run_dir)
    check_same(run_dir, victim.undisturbed)
    return said


def fill_up(disk: Path, leave: int = 0) -> None:
    """Fills the disk except for at most ``leave`` bytes."""
    found = os.statvfs(disk)
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            file.write(bytes(max(0, found.f_bavail * found.f_frsize - leave)))
            while leave == 0 and file.write(bytes(4096)):
                pass
        except OSError as error:
            claim(error.errno == errno.ENOSPC, f"the disk cannot be filled: {error}")


def _stopped(
    victim: Victim,
    run_dir: Path,
    moment: Callable[[], bool],
    fill: Callable[[], None],
    words: str,
    *flags: object,
) -> str:
    """Runs until the moment, fills the disk, checks and returns the one-line error of the run, and frees the disk."""
    process = victim.start(run_dir, *flags)
    try:
        _hold_at(process, moment)
        fill()
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
        (run_dir.parent / "filler").unlink(missing_ok=True)
    said = said.strip()
    claim(process.returncode == 2, f"a run on a full disk ended with status {process.returncode}: {said}")
    fitting = said.startswith("error: ") and words in said and NO_ROOM in said
    claim(fitting and "\n" not in said, f"a run on a full disk printed: {said}")
    return said


def _hold_at(process: "subprocess.Popen[str]", moment: Callable[[], bool]) -> None:
    """Pauses the process at the moment."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        claim(process.poll() is None, "the run ended before its disk was filled")
        if moment():
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.002)
            if moment():
                return
            process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    raise Broken("the run makes no progress")


def _resume(victim: Victim, run_dir: Path, said: str) -> str:
    """Checks the files of the run, frees the disk and lets the run finish."""
    steps, reports = steps_of(run_dir), reports_of(run_dir)
    claim(steps and reports, f"{run_dir} lost its checkpoints or its reports")
    claim(not remnants_of(run_dir, "unfinished"), f"{run_dir} has an incomplete checkpoint")
    check_all_whole(run_dir)
    victim.finish(run_dir)
    claim(facts_of(run_dir)["resumed"][0]["step"] == steps[-1], f"{run_dir} did not resume from step {steps[-1]}")
    check_same(run_dir, victim.undisturbed)
    return said


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except Broken as broken:
        sys.exit(str(broken))
