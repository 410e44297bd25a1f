"""The Ray engine: the members of a sweep cut into tasks, each trained by a worker with a device of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.loop.progress import Display, open_display, say_rows
from jaxnn.loop.report import format_metrics
from jaxnn.loop.signals import interruptible
from jaxnn.record import check_vacant, create_run_dir, is_sweep, json_line, metrics_of, open_record, write_text
from jaxnn.sweeps.design.halving import Halving
from jaxnn.sweeps.design.points import Points
from jaxnn.sweeps.engine.local import draw, new_sweep_dir
from jaxnn.sweeps.engine.plan import check_alone
from jaxnn.sweeps.engine.resuming import continued_options, read_before
from jaxnn.sweeps.engine.shards import FOLDER, shard_folders
from jaxnn.sweeps.engine.store import Store, origin_of
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.ray.cluster import Cluster, Outcome, open_cluster
from jaxnn.sweeps.ray.worker import Planned, Sent, jax_settings, plan_there, train_there
from jaxnn.sweeps.results.outcomes import count_by_status
from jaxnn.sweeps.results.reading import ENDED, MEMBERS_FILE, open_sweep
from jaxnn.sweeps.results.sweep import Sweep
from jaxnn.sweeps.results.tables import show_point
from jaxnn.types import ConfigError, Experiment

NOT_SHARED = "its worker wrote {}, which is not there for this process: give a run_dir that all machines share."


class RayTask(NamedTuple):
    """Members that a worker trains together.

    Attributes:
        numbers: who they are.
        folder: where their part of the record lies.
    """

    numbers: tuple[int, ...]
    folder: Path


def sweep_on_ray(experiment: Experiment[Any], points: Points | Halving, options: SweepOptions) -> Sweep:
    """Trains the members of a sweep on Ray's workers; SIGINT and SIGTERM end it, saved and ready to resume.

    A task whose worker is lost goes on with another one from its last checkpoint.

    Args:
        experiment: what is run.
        points: those of all members.
        options: how to run them.

    Raises:
        ConfigError, DataError, RecordError: the sweep cannot start; nothing was written.
    """
    _check_options(options)
    check_alone(points, options)
    before = None if options.resume is None else read_before(options.resume)
    if before is not None:
        options = continued_options(options, before)
    elif options.run_dir is not None:
        check_vacant(options.run_dir)
    # Ray sets handlers of its own when it starts, so that ours come after.
    with open_cluster(options.num_workers) as cluster, interruptible() as interruption:
        sent = cluster.put(Sent(experiment, points, options, origin_of(experiment), jax_settings()))
        planned: Planned = cluster.ask(plan_there, sent, before)
        for text in planned.warnings:
            warnings.warn(text, stacklevel=3)
        with _opened(options, planned, cluster) as driver:
            tasks = plan_tasks(driver.path, planned.groups, cluster.num_workers)
            driver.introduce(tasks)
            calls = {task: (sent, task.numbers, task.folder) for task in tasks}
            for task, outcome in cluster.work(train_there, calls, interruption):
                driver.settle(task, outcome)
        return _closed(driver, experiment)


def _check_options(options: SweepOptions) -> None:
    """Raises ConfigError for an option that has no meaning for workers."""
    if not options.record:
        raise ConfigError("engine='ray' gathers the members from their records: leave record at its default.")
    if options.devices not in (None, 1):
        raise ConfigError(f"devices is {options.devices}, and a Ray worker has one: say num_workers instead.")
    if options.shard is not None or options.plan_only:
        name = "plan_only" if options.plan_only else "shard"
        raise ConfigError(f"{name} is for the members of one process, and engine is 'ray': leave one of them out.")


def plan_tasks(path: Path, groups: Sequence[Sequence[int]], num_workers: int) -> list[RayTask]:
    """What is left to do of the sweep in ``path``, longest first: the tasks that were begun, and the rest cut anew."""
    begun = {folder: tuple(read_before(folder)["numbers"]) for folder in shard_folders(path)}
    left = [RayTask(numbers, folder) for folder, numbers in begun.items() if not _is_over(folder, numbers)]
    known = {number for numbers in begun.values() for number in numbers}
    rest = [[number for number in group if number not in known] for group in groups]
    last = max((int(folder.name.rpartition("-")[2]) for folder in begun), default=0)
    for place, numbers in enumerate(cut(rest, num_workers), last + 1):
        left.append(RayTask(tuple(numbers), path / FOLDER / f"task-{place:03d}"))
    return sorted(left, key=lambda task: -len(task.numbers))


def cut(groups: Sequence[Sequence[int]], num_workers: int) -> Iterator[Sequence[int]]:
    """Parts of groups, as large as they can be with one for every worker, and none above a worker's share."""
    total = sum(map(len, groups))
    if total == 0:
        return
    size = -(-total // num_workers)
    while sum(-(-len(group) // size) for group in groups) < min(num_workers, total):
        size -= 1
    for group in groups:
        count = -(-len(group) // size)
        ends = [len(group) * part // count for part in range(count + 1)] if count else []
        for first, last in zip(ends, ends[1:], strict=False):
            yield group[first:last]


def _is_over(folder: Path, numbers: Sequence[int]) -> bool:
    part = open_sweep(folder)
    over = [member.index for member in part.members if member.status in ENDED]
    return part.status == "finished" and sorted(over) == sorted(numbers)


@contextlib.contextmanager
def _opened(options: SweepOptions, planned: Planned, cluster: Cluster) -> Iterator[Driver]:
    """The sweep's directory, held and kept true by this process."""
    path = options.resume or create_run_dir(options.run_dir or new_sweep_dir(planned.facts["name"]))
    lines = "none" if options.progress == "none" else "plain"
    with open_record(path.resolve()) as record, open_display(lines, 0) as words:
        driver = Driver(record.path, Store(record, planned.facts), planned.members, cluster, words)
        # What workers have is told by the parts of each.
        driver.store.describe(status="running", devices=str(cluster))
        driver.tell_members()
        try:
            yield driver
        finally:
            driver.finish()


def _closed(driver: Driver, experiment: Experiment[Any]) -> Sweep:
    """The sweep as it ended, drawn and told of."""
    found = open_sweep(driver.path, experiment)
    draw(found)
    for line in str(found).splitlines():
        driver.words.say(f"  {line}")
    if found.status == "interrupted":
        driver.words.say(f"  to go on: --engine ray --resume {driver.path}")
    return found


@dataclasses.dataclass
class Driver:
    """The process that hands out the tasks.

    Attributes:
        path: the sweep's directory.
        store: its record.
        members: the lines of ``members.jsonl``: what is known besides the records of the tasks.
        cluster: the workers.
        words: where words go.
        num_left: tasks that have not ended.
        summaries: those of the tasks that have.
        started: on ``time.perf_counter``'s clock.
    """

    path: Path
    store: Store
    members: list[dict[str, Any]]
    cluster: Cluster
    words: Display
    num_left: int = 0
    summaries: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def tell_members(self) -> None:
        """Replaces ``members.jsonl``."""
        write_text(self.path / MEMBERS_FILE, "".join(map(json_line, self.members)))

    def introduce(self, tasks: Sequence[RayTask]) -> None:
        """Says what is to be done by whom."""
        self.num_left = len(tasks)
        sizes = sorted(len(task.numbers) for task in tasks)
        told = f"{len(tasks)} of {sizes[0]} to {sizes[-1]} members" if tasks else "none left"
        failed = "; ".join(
            f"member {line['member']} ({show_point(line['point'])}): {line['error']}"
            for line in self.members
            if line["error"]
        )
        rows = [("ray", str(self.cluster)), ("members", f"{len(self.members)} in all"), ("tasks", told)]
        say_rows(self.words, [*rows, *([("cannot be run", failed)] if failed else []), ("record", str(self.path))])

    def settle(self, task: RayTask, outcome: Outcome) -> None:
        """Notes how a task ended, and says how far the sweep is."""
        self.num_left -= 1
        error = outcome.error
        if outcome.value is not None and not is_sweep(task.folder):
            error = NOT_SHARED.format(task.folder)
        if error is not None:
            for line in self.members:
                if line["member"] in task.numbers:
                    line |= {"status": "failed", "error": error}
            self.tell_members()
            self.words.say(f"  {task.folder.name} failed: {error}")
        elif outcome.value is not None:
            self.summaries.append(outcome.value)
        self.words.say(f"  {task.folder.name} ended: {self._progress()}")

    def finish(self) -> None:
        """Notes how the sweep ended: as its members did, once this process no longer runs it."""
        self.store.describe(status="interrupted")
        told = {"summary": self._summary()} if self.summaries else {}
        self.store.describe(status=open_sweep(self.path).status, **told)

    def _summary(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self.started
        steps = sum(summary["member_steps"] for summary in self.summaries)
        compiled = sum(summary["num_compilations"] for summary in self.summaries)
        rate = {"member_steps_per_second": steps / seconds}
        return {"seconds": seconds, "member_steps": steps, "num_compilations": compiled, **rate}

    def _progress(self) -> str:
        found = open_sweep(self.path)
        over = sum(member.status in ENDED for member in found.members)
        told = [f"{over} of {len(found.members)} members over ({count_by_status(found.members)})"]
        with contextlib.suppress(ConfigError):
            best = found.best(at="best")
            told.append(f"best {show_point(dict(best.point))}: {format_metrics(metrics_of(best.best))}")
        return ", ".join([*told, f"tasks left: {self.num_left}", str(self.cluster)])
