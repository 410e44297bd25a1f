"""The process that hands out the tasks of a sweep: it keeps the sweep's record, and tells how far the workers are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxnn.loop import Display, Throttle, format_rate, say_rows
from jaxnn.record import is_sweep, json_line, write_text
from jaxnn.sweeps.engine.leader import Leader
from jaxnn.sweeps.engine.resuming import read_before
from jaxnn.sweeps.engine.store import Store
from jaxnn.sweeps.ray.cluster import Cluster, Outcome
from jaxnn.sweeps.ray.pace import Pace
from jaxnn.sweeps.ray.tasks import RayTask
from jaxnn.sweeps.results import ENDED, LOST, MEMBERS_FILE, Member, Sweep, count_by_status, open_sweep, show_point
from jaxnn.sweeps.search import reason
from jaxnn.types import RecordError

SECONDS_BETWEEN_LINES = 10.0
NOT_SHARED = "its worker wrote {}, which is not there for this process: give a run_dir that all machines share."


@dataclasses.dataclass
class Driver:
    """The process that hands out the tasks.

    Attributes:
        path: the sweep's directory.
        store: its record.
        members: the lines of ``members.jsonl``: what is known besides the records of the tasks, and at the end all.
        cluster: the workers.
        words: where words go.
        num_left: tasks that have not ended.
        summaries: those of the tasks that have.
        started: on ``time.perf_counter``'s clock.
        pace: how fast the workers are.
        throttle: lets lines on the progress through.
    """

    path: Path
    store: Store
    members: list[dict[str, Any]]
    cluster: Cluster
    words: Display
    num_left: int = 0
    summaries: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    pace: Pace = dataclasses.field(default_factory=Pace)
    throttle: Throttle = dataclasses.field(default_factory=lambda: Throttle(SECONDS_BETWEEN_LINES))

    def tell_members(self) -> None:
        """Replaces ``members.jsonl``."""
        write_text(self.path / MEMBERS_FILE, "".join(map(json_line, self.members)))

    def introduce(self, tasks: Sequence[RayTask]) -> None:
        """Says what is to be done by whom."""
        self.num_left = len(tasks)
        self.pace.start(_steps_done(open_sweep(self.path)))
        self.throttle.passes(important=True)
        sizes = sorted(len(task.numbers) for task in tasks)
        told = f"{len(tasks)} of {sizes[0]} to {sizes[-1]} members" if tasks else "none left"
        failed = "; ".join(
            f"member {line['member']} ({show_point(line['point'])}): {line['error']}"
            for line in self.members
            if line["error"]
        )
        rows = [("ray", str(self.cluster)), ("members", f"{len(self.members)} in all"), ("tasks", told)]
        say_rows(self.words, [*rows, *([("cannot be run", failed)] if failed else []), ("record", str(self.path))])

    def look(self) -> None:
        """Says how far the sweep is, now and then; to be called while tasks are waited for."""
        if self.throttle.passes(important=False):
            self._tell_progress()

    def settle(self, task: RayTask, outcome: Outcome) -> None:
        """Notes how a task ended, and says how far the sweep is."""
        self.num_left -= 1
        error = outcome.error
        if outcome.value is not None and not is_sweep(task.folder):
            error = NOT_SHARED.format(task.folder)
        if error is not None:
            self._fail(task, error)
        elif outcome.value is not None:
            self.summaries.append(outcome.value)
            for note in _width_notes(task):
                self.words.say(f"  {task.folder.name}: {note}")
        self.throttle.passes(important=True)
        rate = (outcome.value or {}).get("member_steps_per_second")
        told = f" ({format_rate(rate)} member-steps/s)" if rate else ""
        self._tell_progress(f"{task.folder.name} ended{told}: ")

    def finish(self) -> None:
        """Notes how the sweep and its members ended, once this process no longer runs it."""
        self.store.describe(status="interrupted")
        found = open_sweep(self.path)
        known = {member.index: member for member in found.members}
        self.members = [line | _become(known[line["member"]], self.path) for line in self.members]
        self.tell_members()
        seconds = time.perf_counter() - self.started
        told = {"summary": summarize(self.summaries, self.cluster.num_workers, seconds)} if self.summaries else {}
        self.store.describe(status=found.status, **told)

    def _fail(self, task: RayTask, error: str) -> None:
        for line in self.members:
            if line["member"] in task.numbers:
                line |= {"status": "failed", "error": error}
        self.tell_members()
        self.words.say(f"  {task.folder.name} failed: {error}")

    def _tell_progress(self, what: str = "") -> None:
        try:
            told = self._progress(open_sweep(self.path))
        except (OSError, RecordError) as error:
            # File systems between machines may lack, for a moment, what is being replaced.
            told = f"how far the sweep is cannot be read now: {reason(error)}"
        self.words.say(f"  {what}{told}")

    def _progress(self, found: Sweep) -> str:
        self.pace.see(_steps_done(found))
        over = sum(member.status in ENDED for member in found.members)
        told = [f"{over} of {len(found.members)} members over ({count_by_status(found.members)})"]
        if best := str(_leader(found)):
            told.append(f"best {best}")
        if self.pace.rate is not None:
            told.append(f"{format_rate(self.pace.rate)} member-steps/s")
        return ", ".join([*told, f"tasks left: {self.num_left}", str(self.cluster)])


def summarize(summaries: Sequence[dict[str, Any]], num_workers: int, seconds: float) -> dict[str, Any]:
    """The summary of a sweep from those of its tasks.

    ``member_steps_per_second`` is what the local engine's is: updates of all members together a second of training,
    without data, compilation and whatever else; here of all workers that train at once.

    Args:
        summaries: those of the tasks.
        num_workers: how many are trained at a time.
        seconds: wall time of the whole sweep.
    """
    steps = sum(summary["member_steps"] for summary in summaries)
    compiled = sum(summary["num_compilations"] for summary in summaries)
    training = sum(summary["spent"].get("train", 0.0) for summary in summaries)
    rate = steps / training * min(num_workers, len(summaries)) if training else None
    return {"seconds": seconds, "member_steps": steps, "num_compilations": compiled, "member_steps_per_second": rate}


def _become(member: Member, path: Path) -> dict[str, Any]:
    """What a line of ``members.jsonl`` says of what became of a member of the sweep in ``path``."""
    return {
        "status": member.status,
        "step": member.step,
        "final": member.final,
        "best": member.best,
        "error": member.error,
        "dir": None if member.dir is None else str(member.dir.relative_to(path)),
    }


def _steps_done(found: Sweep) -> int:
    """Updates of all members, as far as they were reported."""
    steps: dict[int, int] = {}
    for line in found.lines:
        steps[line["member"]] = max(line["step"], steps.get(line["member"], 0))
    return sum(steps.values())


def _leader(found: Sweep) -> Leader:
    """Who is best so far; reports tell of it long before a member's line does."""
    leader = Leader(found.monitor, higher_is_better=found.higher_is_better)
    points = {member.index: member.point for member in found.members if member.status not in LOST}
    for line in found.lines:
        if line["member"] in points:
            leader.see(points[line["member"]], line)
    return leader


def _width_notes(task: RayTask) -> Iterator[str]:
    """Why the members of a task were not all side by side, where memory forbade it."""
    for group in read_before(task.folder)["groups"]:
        if note := (group.get("width") or {}).get("note"):
            yield note
