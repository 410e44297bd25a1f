"""The status of a member as a function of its reports."""

from __future__ import annotations

import math

import pytest

import jaxnn as jn
from jaxnn.engine import MemberLog, RunOptions, Trainer, evaluations_since_best, make_plan, resolve_cadences
from jaxnn.observe import Clock
from tests import tiny

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "higher", "expected"),
    [
        ([3.0], False, 0),
        ([3.0, 2.0, 2.5, 2.6], False, 2),
        ([3.0, 2.0, 2.5, 2.6], True, 3),
        ([0.5, 0.9, 0.9, 0.9], True, 2),  # as good as before is not better
        ([NAN, 2.0, NAN, 3.0], False, 2),
        ([2.0, NAN], True, 1),
        ([NAN, NAN], False, 2),
        ([2.0, -math.inf], False, 0),
    ],
)
def test_evaluations_since_best(values: list[float], higher: bool, expected: int) -> None:
    assert evaluations_since_best(values, higher_is_better=higher) == expected


def settled(lines: list[dict[str, float]], **options: object) -> str:
    """The status of a member of 10 steps that reported ``lines``."""
    resolved = resolve_cadences(RunOptions(**options), tiny.Config(num_steps=10))  # type: ignore[arg-type]
    log, plan = MemberLog("running", lines), make_plan(resolved, 10)  # type: ignore[arg-type]
    programs: object = None  # nothing is computed
    trainer = Trainer(resolved, tiny.splits(), programs, plan, [log], Clock())  # type: ignore[arg-type]
    trainer.settle(0, log.step, diverged=False)
    return log.status


def test_patience() -> None:
    lines = [{"step": step, "test_loss": float(step)} for step in (1, 2, 3)]
    assert settled(lines, patience=2) == "stopped early"
    assert settled(lines) == settled(lines[:2], patience=2) == settled([], patience=1) == "running"
    assert settled(lines, patience=2, monitor_mode="max") == "running"


def test_only_evaluations_stop_and_the_last_step_finishes() -> None:
    lines: list[dict[str, float]] = [{"step": 1, "test_loss": 1.0}, {"step": 2, "test_loss": 2.0}]
    assert settled(lines, patience=1) == settled(lines, stop=lambda lines: lines[-1]["step"] == 2) == "stopped early"
    assert settled([*lines, {"step": 3}], patience=1, stop=lambda lines: True) == "running"
    assert settled([*lines, {"step": 10, "test_loss": 2.0}], patience=1, stop=lambda lines: True) == "finished"


def test_training_metrics_stop_at_evaluations_without_an_eval_split() -> None:
    # Windows end after steps 5 and 15 too, while the next one is under way.
    experiment = tiny.experiment(data=jn.data.arrays(tiny.points(37)))
    run = tiny.fit(experiment, stop=lambda lines: lines[-1]["train_loss"] < 100)
    assert run.summary.status == "stopped early" and run.summary.step == int(run.state.step) == 10
