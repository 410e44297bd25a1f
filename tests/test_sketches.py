"""The sketches of experiments, and the scripts with tasks or steps of their own: each is traced and trained."""

import importlib
import math
from pathlib import Path

import digits_gan
import jax
import numpy as np
import pytest

import jaxnn as jn
from tests import tiny

pytestmark = pytest.mark.slow
EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"
SKETCHES = sorted(f"sketches.{path.stem}" for path in (EXPERIMENTS / "sketches").glob("*.py"))
STEPS = ["cartpole_ppo", "digits_dp_sgd", "digits_gan", "digits_sam"]


@pytest.mark.parametrize("name", SKETCHES + STEPS)
def test_a_sketch_trains(name):
    (experiment,) = (v for v in vars(importlib.import_module(name)).values() if isinstance(v, jn.Experiment))
    run = tiny.fit(experiment.replace(num_steps=2), steps_per_call=1, report_every=2, eval_every=2)
    assert run.summary.step == 2 and all(math.isfinite(value) for value in run.final.values())


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


def test_fine_tuning_starts_from_one_run(tmp_path, monkeypatch):
    def images(num_classes):
        pair = np.zeros((16, 8, 8, 3), np.uint8), np.arange(16) % num_classes
        return jn.data.arrays(pair, validation=pair, num_classes=num_classes)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jn.data, "cifar10", lambda: images(10))
    script = importlib.import_module("cats_vs_dogs_finetune")
    monkeypatch.setattr(script, "photographs", lambda: images(2))
    monkeypatch.setattr(script, "pretraining", script.pretraining.replace(num_steps=2, batch_size=8))
    few = script.experiment.replace(num_train=8, batch_size=4, num_steps=2)
    swept = jn.sweep(few, jn.grid(start=tuple(script.RATES)), progress="none", steps_per_call=1, eval_every=2)
    assert swept.group().rows and [member.status for member in swept.members] == ["finished"] * 3
    script.pretrained.cache_clear()  # as in the next process: the run is loaded, not trained
    trained, frozen = script.pretrained().params, swept.run(1).state
    for name, layer in frozen.model_state["frozen"].items():
        jax.tree.map(np.testing.assert_array_equal, layer, trained[name])
    assert [*frozen.params] == ["Dense_0"] and frozen.params["Dense_0"]["kernel"].shape == (64, 2)
    assert len(list(tmp_path.glob("runs/cats_vs_dogs_finetune/*"))) == 2


def test_sketches_are_short_and_state_their_result():
    for path in (EXPERIMENTS / "sketches").glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 60 and f"python experiments/sketches/{path.name}" in text, path
        assert "Result    " in text and "TODO" not in text, path
