"""A planned sweep from its first group to its last: trained, ranked, saved, and told of."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxnn.loop import SECONDS_BETWEEN_SAVES, Display, Flight, Interruption, say_rows
from jaxnn.sweeps.engine.group_run import GroupRun, make_ready, open_group
from jaxnn.sweeps.engine.introduction import group_rows
from jaxnn.sweeps.engine.leader import Leader
from jaxnn.sweeps.engine.member_runs import write_member_runs
from jaxnn.sweeps.engine.plan import SweepPlan
from jaxnn.sweeps.engine.report import SweepReport, count_statuses
from jaxnn.sweeps.engine.resuming import changes_of, restore_group
from jaxnn.sweeps.engine.store import Store
from jaxnn.sweeps.engine.training import GroupReport, train_group
from jaxnn.sweeps.results import LOST
from jaxnn.sweeps.search import Group, reason, survivors
from jaxnn.types import ConfigError, DataError, TrainingError

# What may befall one group and leaves the others as they are; a disk that is full is not among it.
FAILURES = (ConfigError, DataError, TrainingError, jax.errors.JaxRuntimeError, MemoryError)


@dataclasses.dataclass
class Running:
    """A sweep under way.

    Attributes:
        plan: what is to be run, and what became of it.
        store: where it is recorded.
        interruption: asked at the end of each window whether to stop.
        words: where its words go.
        leader: the best evaluation so far.
        member_steps: updates of all members done by this process.
        compilations: the ledgers of the groups that are closed.
        told: the groups that were told of, by number.
        flight: the calls under way, and the stalls that a watchdog saw.
    """

    plan: SweepPlan
    store: Store
    interruption: Interruption
    words: Display
    leader: Leader
    member_steps: int = 0
    compilations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    told: set[int] = dataclasses.field(default_factory=set)
    flight: Flight = dataclasses.field(default_factory=Flight)

    def see(self, group: Group) -> None:
        """Shows the leader what the members of a group reported to an earlier process."""
        for member in group.members:
            log = self.plan.logs[member.number]
            for line in log.lines if log.status not in LOST else ():
                self.leader.see(member.point, line)

    @property
    def interrupted(self) -> bool:
        """Whether the sweep was asked to stop."""
        return self.interruption.signum is not None


def train_sweep(running: Running) -> Iterator[SweepReport]:
    """Trains every group rung by rung; yields a report a window.

    Raises:
        RecordError: the disk refused; what was saved is intact.
    """
    plan = running.plan
    for share in plan.rungs:
        for group in plan.groups:
            if not is_over(plan, group) and (share == 1.0 or _goes_on(plan, group)):
                yield from _train_group(running, group, share)
            if running.interrupted:
                return
        if share < 1.0:
            _prune(running, share)


def _train_group(running: Running, group: Group, share: float) -> Iterator[SweepReport]:
    plan, store = running.plan, running.store
    until = plan.rung_end(group, share)
    try:
        with contextlib.ExitStack() as stack:
            with running.interruption.finishing("the current compilation", breaks_off=True):
                run = _ready_group(running, group)
                if any(run.logs[row].step < until for row in run.running()):
                    make_ready(run, stack)
            saves = functools.partial(_saves, run, store)
            with plan.clock.span("train"):
                for report in train_group(run, until, running.interruption, running.flight, saves):
                    yield _process(running, report)
    except FAILURES as error:
        _fail(running, group, error)
        return
    except KeyboardInterrupt:
        # The first signal breaks off what precedes a group's training: those before it are saved.
        if running.interruption.at_once:
            raise
        return
    if share == 1.0 and not run.running():
        close_group(running, run)


def _ready_group(running: Running, group: Group) -> GroupRun:
    """The group, told of and with what an earlier process left of it."""
    plan, store = running.plan, running.store
    run = opened_group(plan, group)
    if group.number not in running.told:
        running.told.add(group.number)
        say_rows(running.words, group_rows(run, len(plan.groups)))
        if plan.options.resume is not None:
            for told in [*changes_of(run, store), *restore_group(run, store)]:
                running.words.say(f"  {told}")
            running.see(group)
        store.tell_group(run)
    return run


def opened_group(plan: SweepPlan, group: Group) -> GroupRun:
    """The group with its data loaded and its width planned, opened if it was not yet."""
    if group.number not in plan.open:
        with plan.clock.span("load", "loading the data"):
            splits, _ = plan.load(group.members[0])
        logs = [plan.logs[member.number] for member in group.members]
        width = plan.widths.get(group.number)
        run = open_group(group, splits, plan.options, logs, width, plan.clock, plan.shared_seed)
        plan.widths[group.number] = run.width
        plan.open[group.number] = run
    return plan.open[group.number]


def close_group(running: Running, run: GroupRun) -> None:
    """Leaves each member of a group its own run directory, and lets go of the group."""
    plan, store = running.plan, running.store
    runs = plan.options.member_runs and store.record is not None
    if runs and run.host is not None:
        with plan.clock.span("record"):
            assert store.record is not None
            write_member_runs(run, store.record.path, store.facts)
    # Before the checkpoints go: whoever reads the record after a crash must find one or the other.
    store.tell_reported(run)
    store.tell_members(plan)
    with plan.clock.span("checkpoint"):
        store.close(run, forget=runs)
    let_go(running, run)


def let_go(running: Running, run: GroupRun) -> None:
    """Forgets a group and what it compiled, whose ledger is kept; waits for its checkpoints."""
    with running.plan.clock.span("checkpoint"):
        running.store.close(run, forget=False)
    del running.plan.open[run.group.number]
    for compilation in run.programs.solo.ledger.compilations:
        running.compilations.append({"group": run.group.number, **dataclasses.asdict(compilation)})


def _process(running: Running, report: GroupReport) -> SweepReport:
    """Everything that is done with a window, in the order that loses nothing."""
    plan, run = running.plan, report.run
    running.member_steps += report.member_steps
    with plan.clock.span("record"):
        running.store.report(plan, run, report.lines)
    for row, line in report.lines.items():
        running.leader.see(run.group.members[row].point, line)
    if report.saveable:
        with plan.clock.span("checkpoint"):
            running.store.save(run)
            running.store.tell_members(plan)
    return SweepReport(
        step=(done := plan.num_done),
        num_steps=done + plan.num_left,
        member_step=report.step,
        group=(run.group.number + 1, len(plan.groups)),
        counts=count_statuses(plan.logs.values()),
        best=str(running.leader),
        member_steps_per_second=report.member_steps / report.seconds,
        evaluated=any(run.monitored in line for line in report.lines.values()),
    )


def _fail(running: Running, group: Group, error: Exception) -> None:
    """Notes for the members of a group that were not over that they cannot be run, and why."""
    for member in group.members:
        log = running.plan.logs[member.number]
        if log.goes_on:
            log.status, log.error = "failed", reason(error)
    running.words.say(f"  group {group.number + 1} failed: {reason(error)}")
    run = running.plan.open.get(group.number)
    if run is not None:
        let_go(running, run)
    running.store.tell_members(running.plan)


def _prune(running: Running, share: float) -> None:
    """Takes out those members that are not among the best at the end of a rung.

    All who came so far are ranked, by what they reported there: a resumed sweep decides alike.
    """
    plan = running.plan
    assert plan.halving is not None
    values: dict[int, float] = {}
    for group in plan.groups:
        step = plan.rung_end(group, share)
        for member in group.members:
            line = next((line for line in plan.logs[member.number].lines if line["step"] == step), {})
            if (value := line.get(running.leader.monitored)) is not None:
                values[member.number] = value
    higher = running.leader.higher_is_better
    kept = set(survivors(values, plan.halving.eta, higher_is_better=higher))
    for number in set(values) - kept:
        if plan.logs[number].goes_on:
            plan.logs[number].status = "pruned"
    running.store.tell_members(plan)


def _saves(run: GroupRun, store: Store, step: int) -> bool:
    """Whether the states after ``step`` are to be saved: by its number, or by the clock at evaluations."""
    if store.record is None:
        return False
    if run.options.checkpoint_every is not None:
        return run.plan.saves(step)
    return time.perf_counter() - store.saved_at > SECONDS_BETWEEN_SAVES


def is_over(plan: SweepPlan, group: Group) -> bool:
    """Whether nothing more is to be done for a group, its members' directories among it."""
    wants_runs = plan.options.member_runs and plan.options.record
    logs = [plan.logs[member.number] for member in group.members]
    return not any(log.goes_on or (wants_runs and log.lines and log.dir is None) for log in logs if not log.failed)


def _goes_on(plan: SweepPlan, group: Group) -> bool:
    return any(plan.logs[member.number].goes_on for member in group.members)
