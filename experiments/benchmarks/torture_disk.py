"""A disk that is full: a tmpfs of a few MiB, filled to the last byte under a run at several moments."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torture_run import Broken, Victim, check_same, check_whole, claim, facts_of, remnants_of, reports_of, steps_of

# Ways into a place where a file system may be mounted that nobody else sees, as anybody and as root.
DOORS = (("unshare", "--user", "--map-root-user", "--mount"), ("unshare", "--mount"))
DISK_MIB = 8
NO_ROOM = os.strerror(errno.ENOSPC)
PATIENCE_SECONDS = 120.0


def door(folder: Path) -> tuple[str, ...]:
    """How to get to where a tmpfs can be mounted on ``folder``.

    Raises:
        Broken: nowhere.
    """
    for words in DOORS:
        try:
            if subprocess.run([*words, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode == 0:
                return words
        except FileNotFoundError:
            continue
    raise Broken("no tmpfs can be mounted here, neither as root nor with `unshare --user --map-root-user --mount`")


def fill_disks(folder: Path) -> dict[str, str]:
    """What was seen, by the moment when the disk was filled; runs this file where it may mount.

    Raises:
        Broken: it cannot, or a run did not end as it must.
    """
    (folder / "disk").mkdir()
    done = subprocess.run([*door(folder / "disk"), sys.executable, __file__, folder], capture_output=True, text=True)
    claim(done.returncode == 0, done.stderr.strip())
    rows: dict[str, str] = json.loads(done.stdout)
    return rows


def main(folder: Path) -> None:
    """Mounts the disk and prints what was seen as JSON."""
    disk = folder / "disk"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", disk], check=True)
    # Seldom enough that it trains most of the time, and a moment between two saves can be hit.
    victim = Victim(folder, num_steps=40_000, checkpoint_every=10_000)
    cases = {
        "too little room for the next checkpoint": at_a_checkpoint,
        "no room in the middle of a save": in_a_save,
        "no room for a report": at_a_report,
        "no room to begin": at_the_start,
    }
    print(json.dumps({name: case(victim, disk / name.replace(" ", "_")) for name, case in cases.items()}))


def at_a_checkpoint(victim: Victim, run_dir: Path) -> str:
    """A disk that has room for reports and none for the next checkpoint."""

    def fill() -> None:
        fill_up(run_dir.parent, leave=100 * 1024)

    def saved() -> bool:
        return len(steps_of(run_dir)) == 2

    said = _stopped(victim, run_dir, saved, fill, "the checkpoint of step")
    claim(facts_of(run_dir)["status"] == "failed", f"{run_dir} does not say that it failed")
    return _gone_on(victim, run_dir, said)


def in_a_save(victim: Victim, run_dir: Path) -> str:
    """A disk that is filled when Orbax has begun to write."""

    def saving() -> bool:
        return len(steps_of(run_dir)) >= 2 and bool(remnants_of(run_dir, "unfinished"))

    said = _stopped(victim, run_dir, saving, lambda: fill_up(run_dir.parent), "could not be written")
    return _gone_on(victim, run_dir, said)


def at_a_report(victim: Victim, run_dir: Path) -> str:
    """A disk that is filled under a run without checkpoints: metrics.jsonl is what grows."""
    flags = ("--checkpoint-every", 0, "--num-steps", 10_000_000)
    begun = lambda: len(reports_of(run_dir)) > 2  # noqa: E731
    said = _stopped(victim, run_dir, begun, lambda: fill_up(run_dir.parent), "metrics.jsonl cannot be written", *flags)
    claim((run_dir / "metrics.jsonl").read_text().endswith("\n"), "metrics.jsonl ends in half a line")
    return said


def at_the_start(victim: Victim, run_dir: Path) -> str:
    """A disk that is full before anything was written; the directory can be used once there is room."""
    fill_up(run_dir.parent)
    said = _stopped(victim, run_dir, lambda: True, lambda: None, "cannot be")
    victim.finish(run_dir)
    check_same(run_dir, victim.undisturbed)
    return said


def fill_up(disk: Path, leave: int = 0) -> None:
    """Leaves ``leave`` bytes of the disk free, or fewer."""
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
    """Runs until the moment, fills the disk, and gives the one sentence that the run must end with; then frees it."""
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
    claim(fitting and "\n" not in said, f"a run on a full disk said: {said}")
    return said


def _hold_at(process: "subprocess.Popen[str]", moment: Callable[[], bool]) -> None:
    """Stops the process for a while in a state where it is the moment."""
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
    raise Broken("the run does not get on")


def _gone_on(victim: Victim, run_dir: Path, said: str) -> str:
    """Looks at what the run left, and lets it finish, now that there is room."""
    steps, reports = steps_of(run_dir), reports_of(run_dir)
    claim(steps and reports, f"{run_dir} lost its checkpoints or its reports")
    claim(not remnants_of(run_dir, "unfinished"), f"{run_dir} holds half a checkpoint")
    for step in steps:
        check_whole(run_dir / "checkpoints" / str(step))
    victim.finish(run_dir)
    claim(facts_of(run_dir)["resumed"][0]["step"] == steps[-1], f"{run_dir} did not go on from step {steps[-1]}")
    check_same(run_dir, victim.undisturbed)
    return said


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Broken as broken:
        sys.exit(str(broken))
