"""SIGKILL at random moments of a run's life, as often as possible in the middle of a save."""

import dataclasses
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torture_run import Broken, Victim, check_same, check_whole, claim, facts_of, remnants_of, reports_of, steps_of

# How long a save takes here, about: a kill aimed at one comes within so many seconds of its beginning.
SAVE_SECONDS = 0.15
# How long a process goes on after its first report, at most.
LIFE_SECONDS = 1.5
# How long it takes to start, about.
START_SECONDS = 5.0
PATIENCE_SECONDS = 120.0


@dataclasses.dataclass
class Kills:
    """What came of the kills."""

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
        """Steps that the median kill made to be done again."""
        return statistics.median(self.lost)

    @property
    def lost_most(self) -> int:
        """Steps that the worst kill made to be done again."""
        return max(self.lost)


class Before(NamedTuple):
    """What there was before a process was started.

    Attributes:
        begun: whether there was a run at all.
        num_resumes: how often it had been resumed.
        remnants: of checkpoints, by name and inode.
    """

    begun: bool
    num_resumes: int
    remnants: set[tuple[str, int]]


def kill_runs(victim: Victim, num_kills: int, seed: int) -> Kills:
    """Kills runs ``num_kills`` times in all, resumes each time, and lets the last one finish.

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
    facts = facts_of(run_dir)
    before = Before(bool(facts), len(facts.get("resumed", [])), _remnants(run_dir))
    process = victim.start(run_dir)
    if draw is not None:
        _wait_for_moment(process, run_dir, draw)
        process.kill()
    _, said = process.communicate()
    went_on = _check_resumed(run_dir, before.num_resumes, newest, found)
    if process.returncode == 0:
        return False
    claim(process.returncode == -signal.SIGKILL, f"a run that was to be killed ended by itself: {said}")
    _look(run_dir, before, went_on, found)
    return True


def _wait_for_moment(process: "subprocess.Popen[str]", run_dir: Path, draw: random.Random) -> None:
    """Returns at the moment of the kill, or when the process is over."""
    aim = draw.choices(("save", "removal", "time", "start"), (6, 1, 2, 1))[0]
    if aim == "start":
        _wait(process, lambda: False, draw.uniform(0.0, START_SECONDS))
        return
    # A resumed run drops the reports after its checkpoint: others than before, not more, tell that it goes on.
    before = _stamp(run_dir)
    _wait(process, lambda: _stamp(run_dir) != before and len(reports_of(run_dir)) > 0, PATIENCE_SECONDS, strict=True)
    _wait(process, lambda: False, draw.uniform(0.0, LIFE_SECONDS))
    if aim == "save":
        _wait(process, lambda: not remnants_of(run_dir, "unfinished"), 1.0)
        _wait(process, lambda: bool(remnants_of(run_dir, "unfinished")), 1.0)
        _wait(process, lambda: False, draw.uniform(0.0, SAVE_SECONDS))
    if aim == "removal":
        _wait(process, lambda: bool(remnants_of(run_dir, "removed")), 1.0)


def _stamp(run_dir: Path) -> int:
    """When metrics.jsonl was last written, in nanoseconds."""
    file = run_dir / "metrics.jsonl"
    return file.stat().st_mtime_ns if file.exists() else 0


def _wait(
    process: "subprocess.Popen[str]", reached: Callable[[], bool], seconds: float, *, strict: bool = False
) -> None:
    """Returns when it is reached, the process is over, or the time is."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and not reached():
        if time.monotonic() >= deadline:
            if strict:
                raise Broken("the run does not get on")
            return
        time.sleep(0.0005)


def _check_resumed(run_dir: Path, resumes_before: int, newest: int, found: Kills) -> bool:
    """Whether a process got as far as to say where it goes on; it must be the newest checkpoint."""
    resumed = facts_of(run_dir).get("resumed", [])
    claim(len(resumed) <= resumes_before + 1, f"{run_dir} tells of resumes that nobody asked for")
    if len(resumed) > resumes_before:
        took = resumed[-1]["step"]
        claim(took == newest, f"{run_dir} was resumed from step {took}, and the newest checkpoint was that of {newest}")
        claim(not resumed[-1]["damaged"], f"{run_dir} has checkpoints that a kill damaged: {resumed[-1]['damaged']}")
        claim(not resumed[-1]["changed"], f"{run_dir} was resumed with something changed: {resumed[-1]['changed']}")
        found.resumes += 1
    return len(resumed) > resumes_before


def _look(run_dir: Path, before: Before, went_on: bool, found: Kills) -> None:
    """What the kill left: whole checkpoints, remnants that are not taken for one, and reports that can be read."""
    found.kills += 1
    # A process that is killed before its first save leaves what it found.
    new = [name for name, _ in _remnants(run_dir) - before.remnants]
    found.during_saves += any("unfinished" in name for name in new)
    found.during_removals += any("removed" in name for name in new)
    steps, reports = steps_of(run_dir), reports_of(run_dir)
    found.before_any += not steps
    for step in steps:
        check_whole(run_dir / "checkpoints" / str(step))
        found.verified += 1
    if reports and (went_on or not before.begun):
        found.lost.append(reports[-1]["step"] - max(steps, default=0))
    else:
        found.while_starting += 1


def _remnants(run_dir: Path) -> set[tuple[str, int]]:
    """What is left of checkpoints that were being written or taken away, by name and inode."""
    paths = [*remnants_of(run_dir, "unfinished"), *remnants_of(run_dir, "removed")]
    return {(path.name, path.stat().st_ino) for path in paths}
