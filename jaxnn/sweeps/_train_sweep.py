"""Many runs of an experiment as one program: ``jn.sweep(experiment, jn.grid(learning_rate=[…], seed=range(8)))``."""

import contextlib
import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxnn import run as runs
from jaxnn._clock import Clock
from jaxnn._signals import Interruption, interruptible
from jaxnn._text import format_rate, short_path
from jaxnn.engine import RUNNING, Flight, Trainer, WindowReport, closing_writers, continued_facts, train
from jaxnn.parallel import computing_on
from jaxnn.record import Checkpoints, Record, WriterFacts, Writers
from jaxnn.search import Halving, Points
from jaxnn.sweeps import _sweep_record
from jaxnn.sweeps._groups import Group, reason
from jaxnn.sweeps._members import LOST, count_by_status, show_point
from jaxnn.sweeps._plan import SweepOptions, SweepPlan, checked_points, group_rows, plan_sweep, sweep_rows
from jaxnn.sweeps._sweep import Sweep
from jaxnn.sweeps._sweep_record import SweepRecord, new_sweep_dir, origin_of, sweep_facts
from jaxnn.types import ConfigError, DataError, Experiment, RecordError, TrainingError

# Errors that a group may fail with, even the only one; any other keeps its traceback if it leaves no group to train.
FAILURES = (ConfigError, DataError, TrainingError, jax.errors.JaxRuntimeError, MemoryError)


def sweep_here(
    experiment: Experiment[Any],
    points: Points | Halving,
    options: SweepOptions,
    origin: Mapping[str, Any] | None = None,
) -> Sweep:
    """Trains the members in this process."""
    clock = Clock()
    with contextlib.ExitStack() as around:
        interruption = around.enter_context(interruptible())
        around.enter_context(computing_on(options.device))
        before = None
        if options.resume is not None:
            before = _sweep_record.read_before(options.resume)
        elif options.run_dir is not None:
            Record.check_vacant(options.run_dir)
        options = _sweep_record.options_of_record(options, before)
        writers = around.enter_context(closing_writers(options))
        checked_points(experiment, points, options)
        if options.record and options.checkpoint_every != 0 and not options.plan_only:
            Checkpoints.preload()
        display = around.enter_context(runs.Display.open(options.progress))
        with display.announcing(clock):
            display.device()
            plan = plan_sweep(experiment, points, options, clock)
            _sweep_record.restore_plan(plan, before)
            display.rows(sweep_rows(plan), aligned=True)
            origin = origin or origin_of(experiment)
            if options.plan_only:
                return _plan_only(plan, display, origin)
            # Before anything is written: errors of the options are found when a group is opened.
            is_over = before is not None and before["status"] == "finished" and all(map(plan.is_over, plan.groups))
            if before is None:
                facts = sweep_facts(plan, _first_trainer(plan), origin)
            else:
                facts = before if is_over else continued_facts(before, plan.experiment, options, origin["script"])
        # From here on there is something to save, and a record to complete.
        with interruption.finishing("the current window"), contextlib.ExitStack() as opened:
            record = SweepRecord(None, facts, before)
            if options.record:
                path = options.resume or Record.create(options.run_dir or new_sweep_dir(facts["name"]))
                record.directory = opened.enter_context(Record.open(path))
            # A sweep that is over is loaded, not run: its record stays as it is.
            if not is_over:
                run = SweepRun(plan, record, interruption, display, writers)
                aloud = options.progress != "none"
                watch = runs.watching(clock, run.flight, options.stall_after, aloud=aloud)
                with watch, display.announcing(clock):
                    run.train()
            with interruption.stopping_if_unread(ended=True):
                display.close()
            results = record.results(plan)
        hint = (
            [("to resume", f"--resume {short_path(results.dir)}")]
            if results.status == "interrupted" and results.dir
            else []
        )
        with interruption.stopping_if_unread(ended=True):
            display.rows([*results.rows(), *hint])
        return results


class SweepReport(NamedTuple):
    """One window of one block of members for the display; steps are those of all members together."""

    step: int
    num_steps: int
    title: str
    numbers: str
    rates: str
    is_milestone: bool

    def __str__(self) -> str:
        return f"{self.title}  {self.numbers}  {self.rates}"


class SweepRun:
    """A running sweep: its plan and record, what ends it after a window, and where it prints."""

    def __init__(
        self,
        plan: SweepPlan,
        record: SweepRecord,
        interruption: Interruption,
        display: runs.Display,
        writers: Writers,
    ) -> None:
        self.plan, self.record, self.interruption, self.display = plan, record, interruption, display
        self.writers = writers
        self.monitored, self.higher_is_better = record.facts["monitored"], record.facts["higher_is_better"]
        self.member_steps = 0
        self.compilations: list[tuple[int, Any]] = []
        self.flight = Flight()
        self._shown: set[int] = set()

    def train(self) -> None:
        """Trains every group rung by rung; ``record.json`` has the status, after errors too."""
        self.record.write(status=RUNNING)
        self.record.write_members(self.plan)
        facts = self.record.facts
        path = None if self.record.directory is None else self.record.directory.path
        points = {member.number: dict(member.point) for member in self.plan.members}
        resumed = None if self.plan.options.resume is None else 0
        self.writers.open(WriterFacts(facts["name"], path, facts["config"], points, resumed))
        try:
            self._train_rungs()
        except BaseException as error:
            # The error that ended the sweep is raised, even if the disk refuses after that.
            with contextlib.suppress(*([RecordError] if isinstance(error, Exception) else [])):
                self._complete()
            raise
        self._complete()

    def _train_rungs(self) -> None:
        for share in self.plan.rungs:
            for group in self.plan.groups:
                if not self.plan.is_over(group):
                    self._train_group(group, share)
                if self.interruption.signum is not None:
                    return
            if share < 1.0:
                self._prune(share)

    def _train_group(self, group: Group, share: float) -> None:
        plan, until = self.plan, self.plan.rung_end(group, share)
        try:
            with self.interruption.finishing("the current compilation"):
                trainer = plan.trainer(group)
                trainer.flight, trainer.writers = self.flight, self.writers
                if group.number not in self._shown:
                    self._shown.add(group.number)
                    self.display.rows(group_rows(plan, group))
                    for note in self.record.open(group.number, trainer):
                        self.display.say(f"  {note}")
                shape = trainer.shape(trainer.block)
                if any(log.unfinished and log.step < until for log in trainer.logs):
                    trainer.programs.train(shape, trainer.plan.steps_per_call, "start")
            for window in train(trainer, lambda: self.interruption.signum is not None, until):
                self._report(group, window)
        except Exception as error:
            # The record and the output are not a group's own.
            shared = isinstance(error, RecordError | BrokenPipeError)
            if shared or (len(plan.groups) == 1 and not isinstance(error, FAILURES)):
                raise
            for member in group.members:
                if member.unfinished:
                    member.fail(error)
            self.display.say(f"  group {group.number + 1} failed: {reason(error)}")
            if group.number in plan.open:
                self._close(group.number)
            self.record.write_members(plan)
            return
        if share == 1.0 and plan.is_over(group):
            # Only what is on the disk counts as over: a killed sweep is resumed from there.
            self._close(group.number)
            self.record.set_group(group.number, closed=True)
            self.record.write()
            self.record.write_members(plan)

    def _close(self, number: int) -> None:
        """Drops a group and its programs, keeps their ledger, and waits for its checkpoints."""
        trainer = self.plan.open.pop(number)
        trainer.programs.spec.feed.close()
        self.compilations += [(number, compilation) for compilation in trainer.programs.ledger]
        if trainer.checkpoints is not None:
            with self.plan.clock.span("checkpoint"):
                trainer.checkpoints.close()

    def _report(self, group: Group, window: WindowReport) -> None:
        plan, num_updates = self.plan, window.num_steps * len(window.lines)
        self.member_steps += num_updates
        if window.saved:
            self.record.write_members(plan)
        done, left = sum(member.step for member in plan.members), plan.num_left
        place = f"group {group.number + 1}/{len(plan.groups)}  " if len(plan.groups) > 1 else ""
        numbers = count_by_status(plan.members)
        kept = [member for member in plan.members if member.status not in LOST]
        latest = [(member.values(self.monitored)[-1:], member.point) for member in kept]
        if finite := [(values[0], point) for values, point in latest if values and math.isfinite(values[0])]:
            value, point = (max if self.higher_is_better else min)(finite, key=operator.itemgetter(0))
            extreme = f"{'highest' if self.higher_is_better else 'lowest'} {self.monitored.replace('_', ' ')}"
            numbers += f"; {extreme} now {value:.4g} ({show_point(point)})"
        title, rates = f"{place}step {window.step}", f"{format_rate(num_updates / window.seconds)} member-steps/s"
        report = SweepReport(done, done + left, title, numbers, rates, window.evaluated or left == 0)
        with self.interruption.stopping_if_unread():
            self.display.report(report)

    def _prune(self, share: float) -> None:
        """Prunes the members that are not among the best at the end of a rung."""
        plan = self.plan
        assert plan.halving is not None
        # Ranked by what they reported there, so that a resumed sweep decides the same.
        ends = {member.number: plan.rung_end(group, share) for group in plan.groups for member in group.members}
        reports = ((member, line) for member in plan.members for line in member.lines if self.monitored in line)
        values = {m.number: line[self.monitored] for m, line in reports if line["step"] == ends.get(m.number)}
        # Of all that were to reach the rung: a member that diverged leaves its place to the next best.
        total, reduced = sum(len(group.members) for group in plan.groups), plan.halving.eta ** plan.rungs.index(share)
        number = -(-total // reduced)
        kept = plan.halving.survivors(values, higher_is_better=self.higher_is_better, num_started=number)
        for member in plan.members:
            if member.number in values and member.number not in kept and member.unfinished:
                member.status = "pruned"
        self.record.write_members(plan)

    def _complete(self) -> None:
        """Closes the open groups, and writes the outcome."""
        plan, logs = self.plan, self.plan.members
        for number in list(plan.open):
            self._close(number)
        unfinished = any(log.unfinished for log in logs)
        for log in logs:
            if log.status == RUNNING:
                log.status = "interrupted"
        self.record.write_members(plan)
        self.record.write_compilations(self.compilations)
        spent = plan.clock.seconds
        training = spent.get("train", 0.0)
        summary = {
            "seconds": dict(spent),
            "member_steps": self.member_steps,
            "member_steps_per_second": self.member_steps / training if training else None,
            "num_compilations": len(self.compilations),
            "members": Counter(log.status for log in logs),
            "stalls": [dataclasses.asdict(stall) for stall in self.flight.stalls],
        }
        self.record.write(status="interrupted" if unfinished else "finished", summary=summary)
        if not unfinished and self.writers.take_media and (results := self.record.results(plan)).lines:
            self.writers.media("sweep", results.plot(), max(log.step for log in logs))


def _plan_only(plan: SweepPlan, display: runs.Display, origin: Mapping[str, Any]) -> Sweep:
    """Prints how the sweep would be run."""
    facts: dict[str, Any] = {}
    for group in plan.groups:
        display.rows(group_rows(plan, group))
        facts = facts or {**sweep_facts(plan, plan.trainer(group), origin), "status": "planned"}
        del plan.open[group.number]
    return SweepRecord(None, facts).results(plan)


def _first_trainer(plan: SweepPlan) -> Trainer:
    """The trainer of the first group that can be opened; earlier groups fail and are recorded when they are trained."""
    for group in plan.groups:
        try:
            return plan.trainer(group)
        except (ConfigError, RecordError):
            raise
        except Exception as error:
            failure = error
    if not isinstance(failure, FAILURES):
        raise failure
    raise TrainingError(f"no group of the sweep can be trained; the last, {reason(failure)}") from failure
