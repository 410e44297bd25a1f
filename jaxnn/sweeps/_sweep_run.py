"""A sweep in training: its groups one after another, what is printed, and how it ends."""

import contextlib
import dataclasses
import math
import operator
from collections import Counter
from typing import Any, NamedTuple

import jax

from jaxnn import run as runs
from jaxnn._signals import Interruption
from jaxnn._text import format_rate
from jaxnn.engine import RUNNING, Flight, Trainer, WindowReport, train
from jaxnn.record import WriterFacts, Writers
from jaxnn.sweeps._groups import Group, reason
from jaxnn.sweeps._members import LOST, count_by_status, show_point
from jaxnn.sweeps._plan import SweepPlan, group_rows
from jaxnn.sweeps._sweep_record import SweepRecord
from jaxnn.types import ConfigError, DataError, RecordError, TrainingError

# Errors that a group may fail with, even the only one; any other keeps its traceback if it leaves no group to train.
FAILURES = (ConfigError, DataError, TrainingError, jax.errors.JaxRuntimeError, MemoryError)


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
        self.points = {member.number: dict(member.point) for member in plan.members}  # of each, for metric writers

    def train(self) -> None:
        """Trains every member; ``record.json`` has the status, after errors too."""
        self.record.write(status=RUNNING)
        facts = self.record.facts
        path = None if self.record.directory is None else self.record.directory.path
        resumed = None if self.plan.options.resume is None else 0
        self.writers.open(WriterFacts(facts["name"], path, facts["config"], self.points, resumed))
        try:
            self._train_all()
        except BaseException as error:
            # The error that ended the sweep is raised, even if the disk refuses after that.
            with contextlib.suppress(*([RecordError] if isinstance(error, Exception) else [])):
                self._complete()
            raise
        self._complete()

    @property
    def unfinished(self) -> bool:
        """Whether any member is still to be trained."""
        return any(log.unfinished for log in self.plan.members)

    def open_group(self, group: Group) -> Trainer:
        """The trainer of a group; shows and records how it is computed when it is opened first."""
        trainer = self.plan.trainer(group)
        trainer.flight, trainer.writers = self.flight, self.writers
        if group.number not in self._shown:
            self._shown.add(group.number)
            self.display.rows(group_rows(self.plan, group))
            for note in self.record_group(group.number, trainer):
                self.display.say(f"  {note}")
        return trainer

    def fail_group(self, group: Group, error: Exception) -> None:
        """Ends the members of a group that cannot be trained, or not any further; says why."""
        for member in group.members:
            if member.unfinished:
                member.fail(error)
        self.display.say(f"  group {group.number + 1} failed: {reason(error)}")
        if group.number in self.plan.open:
            self._close(group.number)

    def record_group(self, number: int, trainer: Trainer) -> list[str]:
        """Adds what is known of a group to the record, and restores its states; returns notes on both."""
        return self.record.open(number, trainer)

    def more_summary(self) -> dict[str, Any]:
        """What else the summary of the record has."""
        return {}

    def _train_all(self) -> None:
        self.record.write_members(self.plan)
        for group in self.plan.groups:
            if not self.plan.is_over(group):
                self._train_group(group)
            if self.interruption.signum is not None:
                return

    def _train_group(self, group: Group) -> None:
        plan = self.plan
        try:
            with self.interruption.finishing("the current compilation"):
                trainer = self.open_group(group)
                if any(log.unfinished for log in trainer.logs):
                    trainer.programs.train(trainer.shape(trainer.block), trainer.plan.steps_per_call, "start")
            for window in train(trainer, lambda: self.interruption.signum is not None):
                self._report(group, window)
        except Exception as error:
            # The record and the output are not a group's own.
            shared = isinstance(error, RecordError | BrokenPipeError)
            if shared or (len(plan.groups) == 1 and not isinstance(error, FAILURES)):
                raise
            self.fail_group(group, error)
            self.record.write_members(plan)
            return
        if plan.is_over(group):
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
        plan = self.plan
        self.member_steps += window.num_steps * len(window.lines)
        if window.saved:
            self.record.write_members(plan)
        place = f"group {group.number + 1}/{len(plan.groups)}  " if len(plan.groups) > 1 else ""
        left = plan.num_left
        self._show(f"{place}step {window.step}", window, left, is_milestone=window.evaluated or left == 0)

    def _show(self, title: str, window: WindowReport, left: int, *, is_milestone: bool) -> None:
        """Shows a window: its ``title``, the members by status, the best one, the speed, and how much is ``left``."""
        plan = self.plan
        numbers = count_by_status(plan.members)
        kept = [member for member in plan.members if member.status not in LOST]
        latest = [(member.latest(self.monitored), member.point) for member in kept]
        if finite := [(value, point) for value, point in latest if value is not None and math.isfinite(value)]:
            value, point = (max if self.higher_is_better else min)(finite, key=operator.itemgetter(0))
            extreme = f"{'highest' if self.higher_is_better else 'lowest'} {self.monitored.replace('_', ' ')}"
            numbers += f"; {extreme} now {value:.4g} ({show_point(point)})"
        rate = window.num_steps * len(window.lines) / window.seconds
        done = sum(member.step for member in plan.members)
        rates = f"{format_rate(rate)} member-steps/s"
        report = SweepReport(done, done + left, title, numbers, rates, is_milestone)
        with self.interruption.stopping_if_unread():
            self.display.report(report)

    def _complete(self) -> None:
        """Closes the open groups, and writes the outcome."""
        plan, logs = self.plan, self.plan.members
        for number in list(plan.open):
            self._close(number)
        unfinished = self.unfinished
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
        summary |= self.more_summary()
        self.record.write(status="interrupted" if unfinished else "finished", summary=summary)
        if not unfinished and self.writers.take_media and (results := self.record.results(plan)).lines:
            self.writers.media("sweep", results.plot(), max(log.step for log in logs))
