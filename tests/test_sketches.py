"""The sketches of experiments, and the scripts with training steps of their own: each trains for a few steps."""

import importlib
import math
from pathlib import Path

import pytest

import jaxnn as jn
from tests import tiny

EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"
SKETCHES = sorted(f"sketches.{path.stem}" for path in (EXPERIMENTS / "sketches").glob("*.py"))
STEPS = ["cartpole_ppo", "digits_dp_sgd", "digits_gan", "digits_sam"]
pytestmark = pytest.mark.usefixtures("compiled_once")


def experiments_of(module):
    return [value for value in vars(module).values() if isinstance(value, jn.Experiment)]


@pytest.mark.parametrize("name", [*SKETCHES, *STEPS])
def test_a_sketch_trains(name):
    (experiment,) = experiments_of(importlib.import_module(name))
    run = tiny.fit(experiment.replace(num_steps=2), steps_per_call=1, report_every=2, eval_every=2)
    assert run.summary.step == 2 and all(math.isfinite(value) for value in run.final.values())


def test_sketches_are_short_and_state_their_result():
    for path in (EXPERIMENTS / "sketches").glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 60 and f"python experiments/sketches/{path.name}" in text, path
        assert "Result    " in text and "TODO" not in text, path
