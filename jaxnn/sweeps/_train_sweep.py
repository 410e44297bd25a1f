"""Many runs of an experiment as one program: ``jn.sweep(experiment, jn.grid(learning_rate=[…], seed=range(8)))``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxnn.engine import RUNNING, Flight, Trainer, WindowReport, closing_writers, train, with_changes
from jaxnn.observe import Clock
from jaxnn.parallel import computing_on
from jaxnn.record import check_vacant, create_run_dir, open_record, preload_orbax
from jaxnn.run import NAME_WIDTH, Display, Interruption, device_rows, interruptible, open_display, watching
from jaxnn.sweeps import _sweep_resume
from jaxnn.sweeps._member_runs import export_members, open_member
from jaxnn.sweeps._plan import SweepPlan, checked_points, plan_sweep
from jaxnn.sweeps._ray import sweep_on_ray
from jaxnn.sweeps._sweep_options import SweepOptions
from jaxnn.sweeps._sweep_record import SweepRecord, new_sweep_dir, origin_of, sweep_facts
from jaxnn.sweeps._sweep_report import Leader, SweepReport, closing_rows, group_rows, sweep_rows
from jaxnn.sweeps.results import LOST, Sweep, count_by_status
from jaxnn.sweeps.search import Group, Halving, Points, reason
from jaxnn.types import ConfigError, DataError, Experiment, RecordError, TrainingError

# What may befall one group and leaves the others as they are; a disk that is full is not among it.
FAILURES = (ConfigError, DataError, TrainingError, jax.errors.JaxRuntimeError, MemoryError)


def sweep(
    experiment: Experiment[Any],
    points: Points | Halving | None = None,
    options: SweepOptions | None = None,
    **changes: Any,
) -> Sweep:
    """Trains a member for every point: those that differ in floats and the seed as one program.

    A member computes what its solo run does, to rounding. SIGINT and SIGTERM end the sweep after the current window,
    saved and ready to resume.

    Args:
        experiment: what is run; its config holds the fields that ``points`` do not set.
        points: what `grid`, `zipped`, `random` make, a sum of these, or a `halving` of it; default: those of the sweep
            that is resumed.
        options: how to run it.
        **changes: single sweep options, such as ``vmap_size=16`` or ``resume="runs/mnist/sweep-…"``.

    Raises:
        ConfigError, DataError, RecordError: the sweep cannot start; nothing was written. A point that cannot be run is
            no such error: its member has the status ``failed`` and says why.
    """
    options = with_changes(options or SweepOptions(), changes, experiment.config)
    if points is None:
        if options.resume is None:
            raise ConfigError("a sweep needs points, such as jn.grid(seed=range(4)).")
        _, points = _sweep_resume.recorded_points(options.resume, experiment)
    if options.executor == "ray":
        train_shard = functools.partial(sweep_here, origin=origin_of(experiment))
        return sweep_on_ray(experiment, points, options, train_shard)
    if callable(options.executor):
        return options.executor(experiment, points, options)  # type: ignore[no-any-return]
    return sweep_here(experiment, points, _sweep_resume.located(options))


def sweep_here(
    experiment: Experiment[Any],
    points: Points | Halving,
    options: SweepOptions,
    origin: Mapping[str, Any] | None = None,
) -> Sweep:
    """Trains members in this process; SIGINT and SIGTERM end it after the current window, ready to resume."""
    with contextlib.ExitStack() as around:
        interruption = around.enter_context(interruptible())
        around.enter_context(computing_on(options.device))
        around.enter_context(closing_writers(options))
        before, resume = None, options.resume
        if resume is not None:
            before = _sweep_resume.read_before(resume)
            options = _sweep_resume.continued_options(options, before)
        elif options.run_dir is not None:
            check_vacant(options.run_dir)
        checked_points(experiment, points, options)
        if options.record and options.checkpoint_every != 0 and not options.plan_only:
            preload_orbax()
        display, clock = around.enter_context(open_display(options.progress)), Clock()
        with display.announcing(clock):
            display.rows(device_rows(), NAME_WIDTH)
            plan = plan_sweep(experiment, points, options, clock)
            if before is not None and resume is not None:
                _sweep_resume.check_same(plan, before, resume)
                _sweep_resume.recall(plan, before, resume)
            _sweep_resume.check_siblings(plan)
            display.rows(sweep_rows(plan), NAME_WIDTH)
            if options.plan_only:
                return _plan_only(plan, display)
            if before is not None and resume is not None and before["status"] == "finished":
                if all(map(plan.is_over, plan.groups)):
                    # A sweep that is over is loaded, not run: its record stays as it is.
                    with open_record(resume) as record:
                        results = _exported(plan, SweepRecord(record, before))
                    display.rows(closing_rows(results))
                    return results
            # Before anything is written: what is wrong with the options is found when a group is opened.
            facts = before or sweep_facts(plan, _first_trainer(plan), origin or origin_of(experiment))
        # From here on there is something to save, and its record to complete.
        with interruption.finishing("the current window"), _open_record(options, facts) as sweep:
            run = SweepRun(plan, sweep, interruption, display)
            aloud = options.progress != "none"
            with watching(clock, run.flight, options.stall_after, aloud=aloud), display.announcing(clock):
                with _completed(run):
                    for report in run.train():
                        display.report(report)
            display.close()
            results = _exported(plan, sweep)
        display.rows(closing_rows(results))
        return results


class SweepRun:
    """A sweep under way: its plan and record, what ends it after a window, and what gets lines to print."""

    def __init__(self, plan: SweepPlan, sweep: SweepRecord, interruption: Interruption, words: Display) -> None:
        self.plan, self.sweep, self.interruption, self.words = plan, sweep, interruption, words
        self.leader = Leader(sweep.facts["monitor"], higher_is_better=sweep.facts["higher_is_better"])
        self.member_steps = 0
        self.compilations: list[dict[str, Any]] = []
        self.flight = Flight()
        self._shown: set[int] = set()
        for group in plan.groups:
            self._see(group)

    def train(self) -> Iterator[SweepReport]:
        """Trains every group rung by rung; yields a report per window."""
        plan = self.plan
        for share in plan.rungs:
            for group in plan.groups:
                if not plan.is_over(group):
                    yield from self._train_group(group, share)
                if self.interruption.signum is not None:
                    return
            if share < 1.0:
                self._prune(share)

    def close(self, number: int) -> None:
        """Forgets a group and what it compiled, whose ledger is kept; waits for its checkpoints."""
        trainer = self.plan.open.pop(number)
        trainer.programs.spec.feed.close()
        for compilation in trainer.programs.ledger.compilations:
            self.compilations.append({"group": number, **dataclasses.asdict(compilation)})
        if trainer.checkpoints is not None:
            with self.plan.clock.span("checkpoint"):
                trainer.checkpoints.close()

    def _train_group(self, group: Group, share: float) -> Iterator[SweepReport]:
        plan, until = self.plan, self.plan.rung_end(group, share)
        try:
            with self.interruption.finishing("the current compilation", breaks_off=True):
                trainer = self._ready(group)
                shape = trainer.shape(trainer.block)
                if any(log.unfinished and log.step < until for log in trainer.logs):
                    trainer.programs.train(shape, trainer.plan.steps_per_call, "start")
            for window in train(trainer, lambda: self.interruption.signum is not None, until):
                yield self._report(group, trainer, window)
        except FAILURES as error:
            self._fail(group, error)
            return
        except KeyboardInterrupt:
            # The first signal breaks off what precedes a group's training: those before it are saved.
            if self.interruption.at_once:
                raise
            return
        if share == 1.0 and plan.is_over(group):
            # Only what is on the disk counts as over: whoever resumes a sweep that was killed must find the states.
            self.close(group.number)
            self.sweep.close_group(group.number)
            self.sweep.write_members(plan)

    def _ready(self, group: Group) -> Trainer:
        """The trainer of a group, reported, with what an earlier process left of it."""
        plan, number = self.plan, group.number
        trainer = plan.trainer(group)
        trainer.flight = self.flight
        if number not in self._shown:
            self._shown.add(number)
            self.sweep.open_store(number, trainer)
            self.words.rows(group_rows(number, trainer, group.static, len(plan.groups)))
            if plan.options.resume is not None and trainer.record is not None:
                for note in _sweep_resume.restore_group(number, trainer, self.sweep):
                    self.words.say(f"  {note}")
                self._see(group)
            if self.sweep.record is not None:
                self.sweep.describe_group(number, trainer)
        return trainer

    def _see(self, group: Group) -> None:
        """Shows the leader what the members of a group reported before."""
        for member in group.members:
            log = self.plan.logs[member.number]
            self.leader.see(member.point, log.lines if log.status not in LOST else ())

    def _report(self, group: Group, trainer: Trainer, window: WindowReport) -> SweepReport:
        plan = self.plan
        self.member_steps += window.num_steps * len(window.lines)
        for row, line in window.lines.items():
            self.leader.see(group.members[row].point, [line])
        if window.saved:
            self.sweep.write_members(plan)
        return SweepReport(
            step=(done := plan.num_done),
            num_steps=done + plan.num_left,
            member_step=window.step,
            group=(group.number + 1, len(plan.groups)),
            counts=count_by_status(plan.logs.values()),
            best=str(self.leader),
            member_steps_per_second=window.num_steps * len(window.lines) / window.seconds,
            evaluated=window.evaluated,
        )

    def _fail(self, group: Group, error: Exception) -> None:
        """Notes for the members of a group that were not over that they cannot be run, and why."""
        for member in group.members:
            log = self.plan.logs[member.number]
            if log.unfinished:
                log.status, log.error = "failed", reason(error)
        self.words.say(f"  group {group.number + 1} failed: {reason(error)}")
        if group.number in self.plan.open:
            self.close(group.number)
        self.sweep.write_members(self.plan)

    def _prune(self, share: float) -> None:
        """Takes out the members that are not among the best of those that came to the end of a rung."""
        plan, monitored = self.plan, self.leader.monitored
        assert plan.halving is not None
        # Ranked by what they reported there, so that a resumed sweep decides the same.
        ends = {group.number: plan.rung_end(group, share) for group in plan.groups}
        values = {
            member.number: line[monitored]
            for group in plan.groups
            for member in group.members
            for line in plan.logs[member.number].lines
            if line["step"] == ends[group.number] and monitored in line
        }
        kept = plan.halving.survivors(values, higher_is_better=self.leader.higher_is_better)
        for number in set(values).difference(kept):
            if plan.logs[number].unfinished:
                plan.logs[number].status = "pruned"
        self.sweep.write_members(plan)


def _plan_only(plan: SweepPlan, words: Display) -> Sweep:
    """Prints how the sweep would be run."""
    facts: dict[str, Any] = {}
    for group in plan.groups:
        trainer = plan.trainer(group)
        words.rows(group_rows(group.number, trainer, group.static, len(plan.groups)))
        facts = facts or {**sweep_facts(plan, trainer, origin_of(plan.experiment)), "status": "planned"}
        del plan.open[group.number]
    return SweepRecord(None, facts).results(plan, open_member)


def _exported(plan: SweepPlan, sweep: SweepRecord) -> Sweep:
    """The sweep as it is now, its members' run directories written if they are asked for."""
    results = sweep.results(plan, open_member)
    missing = [member for member in results.members if member.final and member.dir is None]
    if not (plan.options.member_runs and missing and results.dir is not None):
        return results
    with plan.clock.span("record"):
        export_members(results, missing)
    sweep.write_members(plan)
    return sweep.results(plan, open_member)


def _first_trainer(plan: SweepPlan) -> Trainer:
    """That of the first group that can be opened; those before it will fail when their turn comes, and be noted."""
    for group in plan.groups:
        try:
            return plan.trainer(group)
        except (DataError, TrainingError, jax.errors.JaxRuntimeError, MemoryError) as error:
            failure = error
    raise TrainingError(f"no group of the sweep can be trained; the last, {reason(failure)}") from failure


@contextlib.contextmanager
def _open_record(options: SweepOptions, facts: dict[str, Any]) -> Iterator[SweepRecord]:
    if not options.record:
        yield SweepRecord(None, facts)
        return
    with open_record(options.resume or create_run_dir(options.run_dir or new_sweep_dir(facts["name"]))) as record:
        yield SweepRecord(record, facts)


@contextlib.contextmanager
def _completed(run: SweepRun) -> Iterator[None]:
    """Keeps ``sweep.json`` true: running, then how it ended, whatever happens."""
    run.sweep.describe(status=RUNNING)
    run.sweep.write_members(run.plan)
    started = time.perf_counter()
    try:
        yield
    finally:
        # What ended the sweep is reported to its user, even if the disk refuses after that.
        ended = isinstance(sys.exception(), Exception)
        with contextlib.suppress(*([RecordError] if ended else [])):
            _complete(run, time.perf_counter() - started)


def _complete(run: SweepRun, seconds: float) -> None:
    """Closes what is open, and writes what became of it."""
    plan, sweep = run.plan, run.sweep
    for number in list(plan.open):
        run.close(number)
    unfinished = any(log.unfinished for log in plan.logs.values())
    for log in plan.logs.values():
        if log.status == RUNNING:
            log.status = "interrupted"
    sweep.write_members(plan)
    if sweep.record is not None:
        sweep.record.write("compiles.json", run.compilations)
    spent = plan.clock.seconds
    training = spent.get("train", 0.0)
    summary = {
        "seconds": seconds,
        "spent": {name: value for name, value in spent.items() if name != "caller"},
        "member_steps": run.member_steps,
        "member_steps_per_second": run.member_steps / training if training else None,
        "num_compilations": len(run.compilations),
        "members": Counter(log.status for log in plan.logs.values()),
        "stalls": [dataclasses.asdict(stall) for stall in run.flight.stalls],
    }
    sweep.describe(status="interrupted" if unfinished else "finished", summary=summary)
