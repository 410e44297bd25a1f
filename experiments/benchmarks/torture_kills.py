"""SIGKILL at random moments of a run, preferably in the middle of a save."""

import dataclasses
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torture_run import (
    Broken,
    Victim,
    check_all_whole,
    check_kept,
    check_same,
    claim,
    facts_of,
    logs_of,
    remnants_of,
    steps_of,
    updates_of,
)

# About the duration of a save: a kill aimed at a save comes within this many seconds of its start.
SAVE_SECONDS = 0.15
# Maximum time a process runs after its first report.
LIFE_SECONDS = 1.5
# About the time a process takes to start.
START_SECONDS = 5.0
PATIENCE_SECONDS = 120.0


@dataclasses.dataclass
class Kills:
    """Counts of kills and of the states that they left."""

    kills: int = 0
    during_saves: int = 0
    during_removals: int = 0
    before_any: int = 0
    while_starting: int = 0
    verified: int = 0
    resumes: int = 0
    runs: int = 0
    lost: list[int] = dataclasses.field(default_factory=list)

    @property
    def lost_median(self) -> float:
        """Median number of steps repeated after a kill."""
        return statistics.median(self.lost or [0])

    @property
    def lost_most(self) -> int:
        """Maximum number of steps repeated after a kill."""
        return max(self.lost, default=0)


class Before(NamedTuple):
    """The state before a process was started.

    Attributes:
        stamp: when metrics.jsonl was last written.
        saved: updates that checkpoints held.
        logs: the reports up to newest checkpoints.
        num_resumes: how often it had been resumed.
        remnants: of checkpoints, by name and inode.
    """

    stamp: int
    saved: int
    logs: dict[str, dict[str, Any]]
    num_resumes: int
    remnants: set[tuple[str, int]]


def kill_runs(victim: Victim, num_kills: int, seed: int) -> Kills:
    """Kills runs ``num_kills`` times in total, resumes each time, and lets the last one finish.

    Raises:
        Broken: something was lost.
    """
    draw, found = random.Random(seed), Kills()
    while found.kills < num_kills:
        run_dir = victim.folder / f"run{found.runs}"
        while found.kills < num_kills and _one_life(victim, run_dir, draw, found):
            print(f"kill {found.kills} of {num_kills}: checkpoints {steps_of(run_dir)}", flush=True)
        if found.kills == num_kills:
            _one_life(victim, run_dir, None, found)
        check_same(run_dir, victim.undisturbed)
        found.runs += 1
    return found


def _one_life(victim: Victim, run_dir: Path, draw: random.Random | None, found: Kills) -> bool:
    """Starts or resumes a run, and kills it at a moment drawn; whether it was killed before it was over."""
    newest = max(steps_of(run_dir), default=0)
    num_resumes = len(facts_of(run_dir).get("resumed", []))
    before = Before(_stamp(run_dir), updates_of(run_dir)[1], logs_of(run_dir), num_resumes, _remnants(run_dir))
    process = victim.start(run_dir)
    if draw is not None:
        _wait_for_moment(process, run_dir, before, draw)
        process.kill()
    _, said = process.communicate()
    check_kept(run_dir, before.logs)
    _check_resumed(run_dir, before, newest, found)
    if process.returncode == 0:
        return False
    claim(process.returncode == -signal.SIGKILL, f"a run ended before it was killed: {said}")
    _check_files(run_dir, before, found)
    return True


def _wait_for_moment(process: "subprocess.Popen[str]", run_dir: Path, before: Before, draw: random.Random) -> None:
    """Returns at the moment of the kill, or when the process has ended."""
    aim = draw.choices(("save", "removal", "time", "start"), (6, 1, 2, 1))[0]
    if aim == "start":
        _wait(process, lambda: False, draw.uniform(0.0, START_SECONDS))
        return
    _wait(process, lambda: _has_reported(run_dir, before), PATIENCE_SECONDS, strict=True)
    _wait(process, lambda: False, draw.uniform(0.0, LIFE_SECONDS))
    if aim == "save":
        _wait(process, lambda: not remnants_of(run_dir, "unfinished"), 1.0)
        _wait(process, lambda: bool(remnants_of(run_dir, "unfinished")), 1.0)
        _wait(process, lambda: False, draw.uniform(0.0, SAVE_SECONDS))
    if aim == "removal":
        _wait(process, lambda: bool(remnants_of(run_dir, "removed")), 1.0)


def _has_reported(run_dir: Path, before: Before) -> bool:
    """Returns whether the process has trained: a resumed one first drops the reports after its checkpoint."""
    return _stamp(run_dir) != before.stamp and updates_of(run_dir)[0] > before.saved


def _stamp(run_dir: Path) -> int:
    """Returns when metrics.jsonl was last written, in nanoseconds."""
    file = run_dir / "metrics.jsonl"
    return file.stat().st_mtime_ns if file.exists() else 0


def _wait(
    process: "subprocess.Popen[str]", reached: Callable[[], bool], seconds: float, *, strict: bool = False
) -> None:
    """Returns when ``reached`` holds, the process has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and not reached():
        if time.monotonic() >= deadline:
            if strict:
                raise Broken("the run makes no progress")
            return
        time.sleep(0.0005)


def _check_resumed(run_dir: Path, before: Before, newest: int, found: Kills) -> None:
    """Checks that a process, if it resumed, used the newest checkpoint."""
    facts = facts_of(run_dir)
    resumed = facts.get("resumed", [])
    claim(len(resumed) <= before.num_resumes + 1, f"{run_dir} records resumes that were not requested")
    if len(resumed) > before.num_resumes:
        last = resumed[-1]
        took = f"{run_dir} resumed from step {last['step']}, not from the newest checkpoint, {newest}"
        claim(facts["points"] or last["step"] == newest, took)
        # Before its first checkpoint a run starts again, and says so.
        whole = before.saved == 0 or not last["damaged"]
        claim(whole, f"{run_dir} has checkpoints that a kill damaged: {last['damaged']}")
        claim(not last["changed"], f"{run_dir} resumed with changes: {last['changed']}")
        found.resumes += 1


def _check_files(run_dir: Path, before: Before, found: Kills) -> None:
    """Checks the files after a kill: complete checkpoints, ignored remnants, and readable reports."""
    found.kills += 1
    # A process killed before its first save changes no remnants.
    new = [name for name, _ in _remnants(run_dir) - before.remnants]
    found.during_saves += any("unfinished" in name for name in new)
    found.during_removals += any("removed" in name for name in new)
    verified, (reported, saved) = check_all_whole(run_dir), updates_of(run_dir)
    found.before_any += not verified
    found.verified += verified
    if _has_reported(run_dir, before):
        found.lost.append(reported - saved)
    else:
        found.while_starting += 1


def _remnants(run_dir: Path) -> set[tuple[str, int]]:
    """Returns remnants of interrupted saves and removals, by name and inode."""
    paths = [*remnants_of(run_dir, "unfinished"), *remnants_of(run_dir, "removed")]
    return {(path.name, path.stat().st_ino) for path in paths}
