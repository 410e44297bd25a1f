"""The sketches of experiments, and the scripts with tasks or steps of their own: each is traced; slow: trained."""

import importlib
import math
from pathlib import Path

import digits_gan
import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.engine import load_data, programs_of
from tests import tiny

EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"
SKETCHES = sorted(f"sketches.{path.stem}" for path in (EXPERIMENTS / "sketches").glob("*.py"))
STEPS = ["cartpole_ppo", "digits_dp_sgd", "digits_gan", "digits_sam"]
# Most of the time to train for two steps is that of compiling.
FAST = ["sketches.callbacks", "digits_sam"]
TRAINED = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SKETCHES + STEPS if name not in FAST)]
pytestmark = pytest.mark.usefixtures("compiled_once")


def experiment_of(name):
    (experiment,) = (v for v in vars(importlib.import_module(name)).values() if isinstance(v, jn.Experiment))
    return experiment


@pytest.mark.parametrize("name", SKETCHES + STEPS)
def test_initial_state_step_and_evaluation_of_a_sketch_can_be_traced(name):
    experiment = experiment_of(name)
    splits = load_data(experiment)
    programs = programs_of(experiment, splits)
    assert "loss" in programs.metrics
    if splits.eval_split is not None:
        batch = programs.source.as_batch(programs.first_examples)
        assert "count" in jax.eval_shape(jn.steps.make_evaluate_step(programs.task), programs.shapes, batch)


@pytest.mark.parametrize("name", TRAINED)
def test_a_sketch_trains(name):
    experiment = experiment_of(name)
    run = tiny.fit(experiment.replace(num_steps=2), steps_per_call=1, report_every=2, eval_every=2)
    assert run.summary.step == 2 and all(math.isfinite(value) for value in run.final.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "folders"), [("digits_diffusion", ["digits"]), ("fashion_vae", ["draws", "pairs"])])
def test_generative_scripts_record_pictures(name, folders, data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXNN_DATA", str(data_dir))
    module = importlib.import_module(name)
    experiment = module.experiment.replace(batch_size=8, num_steps=2)
    how = {"steps_per_call": 1, "report_every": 2, "eval_every": 2, "eval_batches": 1, "probes": module.options.probes}
    run = tiny.fit(experiment, tmp_path / "run", **how)
    assert all(math.isfinite(value) for value in run.final.values())
    assert sorted(path.parent.name for path in run.dir.glob("probes/*/*/2.png")) == folders


def test_frechet_distance_of_one_pixel():
    """Means 0.5 and 0.3, deviations 0.5 and 0.1; the third image is padding."""
    batch = jn.Batch(np.array([[0.0], [1.0], [9.0]]), None, np.array([1.0, 1.0, 0.0]))
    sums = digits_gan.moments(batch, np.array([[0.2], [0.4], [7.0]]))
    distance = digits_gan.frechet_distance({name: total / sums["count"] for name, total in sums.items()})
    assert distance["loss"] == pytest.approx(0.2**2 + 0.4**2)


def test_sketches_are_short_and_state_their_result():
    for path in (EXPERIMENTS / "sketches").glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 60 and f"python experiments/sketches/{path.name}" in text, path
        assert "Result    " in text and "TODO" not in text, path
