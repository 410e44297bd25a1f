"""The sketches of experiments, and the scripts with training steps of their own: each trains for a few steps."""

import importlib
import math
from pathlib import Path

import jax
import numpy as np
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


@pytest.mark.slow
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
