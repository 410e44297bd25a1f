"""Many runs of an experiment as one program: ``jn.sweep(experiment, jn.grid(learning_rate=[…], seed=range(8)))``."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxnn import run as runs
from jaxnn._clock import Clock
from jaxnn._signals import interruptible
from jaxnn._text import short_path
from jaxnn.engine import Budget, Trainer
from jaxnn.parallel import computing_on
from jaxnn.record import Record
from jaxnn.search import Points, Searcher
from jaxnn.sweeps import _sweep_record
from jaxnn.sweeps._groups import Group, reason
from jaxnn.sweeps._plan import SweepOptions, SweepPlan, checked_points, group_rows, plan_sweep, sweep_rows
from jaxnn.sweeps._search_events import Search
from jaxnn.sweeps._search_run import SearchRun
from jaxnn.sweeps._sweep import Sweep
from jaxnn.sweeps._sweep_record import SweepRecord, new_record, new_sweep_dir, origin_of
from jaxnn.sweeps._sweep_run import FAILURES, SweepRun
from jaxnn.types import ConfigError, Experiment, RecordError, TrainingError


def sweep_here(
    experiment: Experiment[Any],
    points: Points | Searcher | Search,
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
            experiment = options.resumed_experiment(experiment, before, ends_search=not isinstance(points, Points))
        elif options.run_dir is not None:
            Record.check_vacant(options.run_dir)
        options = _sweep_record.options_of_record(options, before)
        writers = around.enter_context(options.opened_writers())
        checked_points(experiment, points, options)
        display = around.enter_context(runs.Display.open(options.progress))
        with display.announcing(clock):
            display.device()
            saved = _sweep_record.saved_search(options.resume, before, points)
            plan = plan_sweep(experiment, points, options, clock, saved)
            budget = None
            if options.budget is not None and before is None and plan.search is None:
                plan, budget = _budgeted(plan)
            _sweep_record.restore_plan(plan, before)
            rows = sweep_rows(plan)
            display.rows([*rows, ("budget", budget.note)] if budget is not None else rows, aligned=True)
            origin = origin or origin_of(experiment)
            if options.plan_only:
                return _plan_only(plan, display, origin)
            # Before anything is written: errors of the options are found when a group is opened.
            is_over = before is not None and before["status"] == "finished"
            is_over = is_over and (plan.search is not None or all(map(plan.is_over, plan.groups)))
            if before is None:
                record = new_record(plan, _first_trainer(plan), origin)
                if (passed := clock.passed) > options.budget_seconds:
                    raise ConfigError(
                        f"budget is {options.budget}, and {passed:.1f} s have passed before the first step: give more."
                    )
            elif is_over:
                record = SweepRecord(None, before, before)
            else:
                record = SweepRecord.resume(before, plan.experiment, options, origin["script"])
        # From here on there is something to save, and a record to complete.
        with interruption.finishing("the current window"), contextlib.ExitStack() as opened:
            if options.record:
                path = options.resume or Record.create(options.run_dir or new_sweep_dir(record.facts["name"]))
                record.directory = opened.enter_context(Record.open(path))
            # A sweep that is over is loaded, not run: its record stays as it is.
            if not is_over:
                kind = SweepRun if plan.search is None else SearchRun
                run = kind(plan, record, interruption, display, writers)
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


def _budgeted(plan: SweepPlan) -> tuple[SweepPlan, Budget]:
    """The sweep with the number of steps that its budget has time for, and how that was found."""
    options = plan.options
    if options.shard is not None or any("num_steps" in group.static for group in plan.groups):
        reason = "this is a shard of several" if options.shard is not None else "num_steps is swept"
        raise ConfigError(f"budget chooses num_steps for all members, and {reason}: leave it out.")

    def opened(group: Group) -> Trainer:
        plan.open.clear()  # the one before, and what it holds on the devices
        return plan.trainer(group)

    openers = [functools.partial(opened, group) for group in plan.groups]
    budget = Budget.found(plan.experiment, options, openers, plan.clock)
    plan.open.clear()
    experiment = plan.experiment.replace(num_steps=budget.num_steps)
    fitted = plan_sweep(experiment, plan.points, options, plan.clock, load=plan.load)
    vmapped = zip(plan.vmapped.items(), budget.steps_per_call, strict=True)
    sizes = {number: size._replace(steps_per_call=steps) for (number, size), steps in vmapped}
    return dataclasses.replace(fitted, vmapped=sizes), budget


def _plan_only(plan: SweepPlan, display: runs.Display, origin: Mapping[str, Any]) -> Sweep:
    """Prints how the sweep would be run."""
    record: SweepRecord | None = None
    for group in plan.groups:
        display.rows(group_rows(plan, group))
        record = record or new_record(plan, plan.trainer(group), origin)
        del plan.open[group.number]
    assert record is not None
    record.facts["status"] = "planned"
    return record.results(plan)


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
