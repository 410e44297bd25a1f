"""The sketches of experiments, and the scripts with tasks or steps of their own: each trains for a few steps."""

import importlib
import math
from pathlib import Path

import digits_gan
import numpy as np
import pytest

import jaxnn as jn
from tests import tiny

EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"
SKETCHES = sorted(f"sketches.{path.stem}" for path in (EXPERIMENTS / "sketches").glob("*.py"))
SCRIPTS = ["cartpole_ppo", "digits_dp_sgd", "digits_gan", "digits_sam"]
pytestmark = pytest.mark.usefixtures("compiled_once")


def experiments_of(module):
    return [value for value in vars(module).values() if isinstance(value, jn.Experiment)]


@pytest.mark.parametrize("name", [*SKETCHES, *SCRIPTS])
def test_a_sketch_trains(name):
    (experiment,) = experiments_of(importlib.import_module(name))
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
