"""Budgets of time: the number of steps that fit, by a short trial of the programs that train them."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn._clock import Clock
from jaxnn._text import format_rate
from jaxnn.engine._loop import WindowReport, train
from jaxnn.engine._options import RunOptions
from jaxnn.engine._trainer import Trainer
from jaxnn.engine._windows import Plan, near_divisor, typical_window
from jaxnn.parallel import broadcast_from_primary
from jaxnn.record import Checkpoints
from jaxnn.types import ConfigError, Experiment

TRIAL_SHARE, SHORTEST, LONGEST = 0.03, 0.5, 10.0  # of a budget, for the trial; and its bounds in seconds
TRIAL_WINDOW = 0.05  # seconds: in shorter ones the host takes much of the time, at their ends
EVALUATE_EVERY = 2  # windows of the trial
FINEST = 0.01  # of a budget, that the windows between which the number of steps is chosen may take
REPORTS = (50, 10, 5, 1)  # in a run: the number of steps is a multiple of the first of these that is fine enough


class Pace(NamedTuple):
    """What it takes to train a run, or a group of members, with another number of steps; in seconds."""

    opening: float  # to compile what depends on that number
    step: float  # of all its members
    evaluation: float  # of all its members on all splits
    save: float
    steps_per_call: int
    examples: Sequence[int]  # of each split that is evaluated

    @classmethod
    def measured(cls, open_trainer: Callable[[], Trainer], options: RunOptions, clock: Clock) -> Pace:
        """The pace of a trainer, which is opened for it and trains for a part of the budget of ``options``."""
        before, seconds = clock.seconds, min(max(SHORTEST, TRIAL_SHARE * options.budget_seconds), LONGEST)
        trainer = open_trainer()
        spent = {name: passed - before.get(name, 0.0) for name, passed in clock.seconds.items()}
        # All else is compiled by now, the data are loaded, and sizes are chosen.
        trains = [one for one in trainer.programs.ledger if one.name.startswith("train")]
        opening = max((one.seconds + one.saved_seconds for one in trains), default=0.0)
        kept = sum(passed for name, passed in spent.items() if name not in ("load", "measure", "compile"))
        opening += max(0.0, kept - sum(one.trace_seconds + one.lower_seconds for one in trainer.programs.ledger))
        trainer.options = dataclasses.replace(trainer.options, patience=None, stop=None, probes=())
        steps, blocks = trainer.plan.steps_per_call, -(-len(trainer.logs) // trainer.block)
        windows = _trained(trainer, steps, 0.0)
        calls = max(1, round(TRIAL_WINDOW / windows[-1].seconds))
        evaluated = clock.seconds.get("evaluation", 0.0)
        windows = _trained(trainer, calls * steps, seconds)
        evaluations = sum(window.evaluated for window in windows)
        step = sum(window.seconds for window in windows) / sum(window.num_steps for window in windows)
        evaluation = (clock.seconds.get("evaluation", 0.0) - evaluated) / max(1, evaluations)
        save = _save_seconds(trainer, clock)
        splits = trainer.splits
        examples = [splits.named()[name].num_examples for name in splits.evaluated]
        trainer.programs.spec.feed.close()
        return cls(opening, blocks * step, blocks * evaluation, save, steps, examples)


class Budget(NamedTuple):
    """A run, or a sweep, that fits a budget of time."""

    num_steps: int
    steps_per_call: Sequence[int]  # of each group
    note: str  # how it was found

    @classmethod
    def found(
        cls,
        experiment: Experiment[Any],
        options: RunOptions,
        open_trainers: Sequence[Callable[[], Trainer]],
        clock: Clock,
    ) -> Budget:
        """The most steps that the budget of ``options`` has time for, by trials of trainers, one for each group.

        Their data are loaded and ``clock`` has what passed so far. ConfigError if there is no time for any step.
        """
        paces = [Pace.measured(open_trainer, options, clock) for open_trainer in open_trainers]
        return cls.solved(experiment, options, paces, clock)

    @classmethod
    def solved(cls, experiment: Experiment[Any], options: RunOptions, paces: Sequence[Pace], clock: Clock) -> Budget:
        """The most steps that the budget of ``options`` has time for, after what ``clock`` counted so far.

        ``paces`` has one for each group of a sweep. ConfigError if there is no time for any.
        """
        budget = options.budget_seconds
        spent = clock.passed
        opening, step = sum(pace.opening for pace in paces), sum(pace.step for pace in paces)
        evaluation = sum(pace.evaluation for pace in paces)
        # Calls of as many steps as were measured, or of a half, a quarter, … of them, fill the windows.
        most, calls = max(1, int(FINEST * budget / step)), max(pace.steps_per_call for pace in paces)
        halves = [calls >> power for power in range(calls.bit_length())]
        unit = next((part * half for part in REPORTS for half in halves if part * half <= most), 1)

        def plan_of(num_steps: int) -> Plan:
            config = experiment.replace(num_steps=num_steps).config
            return options.with_cadences(config, paces[0].examples).plan(num_steps)

        def seconds(num_steps: int) -> float:
            plan = plan_of(num_steps)
            evaluations = -(-num_steps // plan.eval_every) if plan.eval_every else 1
            training = num_steps * step + evaluations * evaluation
            saves = (
                num_steps // plan.checkpoint_every
                if plan.checkpoint_every
                else training // Trainer.SECONDS_BETWEEN_SAVES
            )
            return spent + opening + training + (1 + saves) * sum(pace.save for pace in paces)

        def find() -> tuple[int, list[int]]:
            low, high = 0, 1
            while seconds(high * unit) <= budget:
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if seconds(middle * unit) <= budget else (low, middle)
            window = typical_window(plan_of(max(1, low * unit)))
            if low and budget - seconds(low * unit) > seconds(high * unit) - budget:
                low = high
            return low * unit, [near_divisor(window, pace.steps_per_call) for pace in paces]

        # Clocks differ between processes.
        num_steps, steps_per_call = broadcast_from_primary(find)
        if num_steps == 0:
            raise ConfigError(
                f"budget is {options.budget}, {spent:.1f} s have passed, and to compile for the steps that are left, "
                f"train {unit} of them, evaluate and save takes {seconds(unit) - spent:.1f} s: give "
                f"{math.ceil(seconds(unit))} s or more, or set num_steps."
            )
        note = f"{options.budget}: {num_steps:,} steps, by {format_rate(1 / step)} steps/s in a trial"
        return cls(num_steps, steps_per_call, note)


def _trained(trainer: Trainer, every: int, seconds: float) -> list[WindowReport]:
    """Trains a block of members for some ``seconds`` more, at least to an evaluation, in windows of ``every`` steps."""
    done = max(trainer.steps())
    trainer.plan = trainer.plan._replace(
        num_steps=done + 2**30, report_every=every, eval_every=EVALUATE_EVERY * every, checkpoint_every=0, tails=()
    )
    windows = list[WindowReport]()
    started = trainer.clock.now()

    def is_enough() -> bool:
        return any(window.evaluated for window in windows) and trainer.clock.now() - started > seconds

    for window in train(trainer, is_enough):
        windows.append(window)
    return windows


def _save_seconds(trainer: Trainer, clock: Clock) -> float:
    """The seconds that a checkpoint takes."""
    if not trainer.options.record or trainer.options.checkpoint_every == 0:
        return 0.0
    before = clock.now()
    with tempfile.TemporaryDirectory() as folder, clock.span("measure"):
        checkpoints = Checkpoints(Path(folder) / "checkpoints")
        checkpoints.save(1, trainer.state, {})
        checkpoints.close()
    return clock.now() - before
