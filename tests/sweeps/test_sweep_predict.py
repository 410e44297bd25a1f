"""The members of a recorded sweep predict and are evaluated together, as each does alone; predictions need no data."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from tests import tiny


@dataclasses.dataclass(frozen=True)
class Config(tiny.Config):
    scale: float = 1.0
    num_steps: int = 4


def experiment(**parts: Any) -> jn.Experiment[Config]:
    """Points whose logits are scaled by a field that a sweep traces."""

    def task(config: Config) -> jn.Task:
        return jn.tasks.classification((tiny.init, lambda params, inputs: config.scale * tiny.apply(params, inputs)))

    return dataclasses.replace(tiny.experiment(task=task), config=Config(), **parts)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> jn.Sweep:
    """Two groups by batch size of three members each, of which one diverges."""
    points = jn.grid(batch_size=[4, 8], scale=[0.5, 2.0, 1e38])
    how = {"run_dir": tmp_path_factory.mktemp("predict") / "sweep", "progress": "none", "steps_per_call": 2}
    return jn.sweep(experiment(), points, eval_every=4, vmap_size=2, **how)


def load(config: Config) -> Any:
    raise FileNotFoundError("the data")


def test_members_predict_together_without_the_data(sweep, monkeypatch):
    assert [member.status for member in sweep.members] == ["finished", "finished", "diverged"] * 2
    opened, inputs = jn.open_sweep(sweep.dir, experiment(data=load)), tiny.points(7)[0]
    outputs = opened.predict(inputs, batch_size=3)
    assert outputs.shape == (6, 7, 3) and outputs.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(outputs).all((1, 2)), [False, False, True] * 2)
    np.testing.assert_array_equal(np.isnan(outputs).any((1, 2)), [False, False, True] * 2)
    for member in (0, 4):
        alone = opened.run(member)
        np.testing.assert_allclose(outputs[member], alone.predict(inputs), rtol=1e-5)
        with pytest.raises(FileNotFoundError):
            alone.evaluate()
    np.testing.assert_array_equal(opened.select(batch_size=8, scale=2.0).predict(inputs, batch_size=3), outputs[4:5])
    # On as many devices as there are members of a group, and on one, in two lanes.
    np.testing.assert_allclose(opened.predict(inputs, batch_size=3, devices=1), outputs, rtol=1e-5)
    with pytest.raises(jn.ConfigError, match="requested 5 devices, but only 4"):
        opened.predict(inputs, devices=5)


def test_members_are_evaluated_as_in_training(sweep):
    found = jn.open_sweep(sweep.dir, experiment()).evaluate(devices=2)
    for name, values in found.items():
        np.testing.assert_allclose(values, sweep.scores(f"test_{name}"), rtol=1e-6)
    assert set(found) == {"loss", "accuracy"}


def test_what_members_cannot_be_restored_from_is_named(sweep):
    inputs = tiny.points(2)[0]
    others = jn.open_sweep(sweep.dir, experiment(data=lambda config: jn.data.arrays(tiny.points(9), tiny.points(9))))
    wrong: list[tuple[jn.Sweep, str]] = [
        (jn.open_sweep(sweep.dir), r"it has no experiment: open_sweep\(path, experiment\)"),
        (dataclasses.replace(sweep, dir=None), "it has no record: sweep with one"),
        (sweep.select(scale=1e38), r"it has no complete member \(2 diverged\)"),
    ]
    for one, words in wrong:
        with pytest.raises(jn.JaxnnError, match=words):
            one.predict(inputs)
    with pytest.raises(jn.ConfigError, match="no split 'validation' to evaluate: the data have train, test"):
        sweep.evaluate("validation")
    with pytest.raises(jn.RecordError, match="the data are not those that the sweep in .* was trained on"):
        others.evaluate()
