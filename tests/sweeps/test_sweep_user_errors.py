"""What a user of sweeps meets: times, a bad point, changed code, other points, and names of what is compared."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

import jax
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.cli import command
from tests import shell, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

HOW: dict[str, Any] = {**tiny.HOW, "vmap_size": 2, "devices": 1}
SPLITS = jn.data.arrays(train=tiny.points(37), validation=tiny.points(23, 1), name="points")
# Without units there are parameters without elements; the last learning rate diverges.
POINTS = jn.grid(units=[0, 4], learning_rate=[0.1, 0.2, 1e30], seed=[0, 1])


@dataclasses.dataclass(frozen=True)
class Config(tiny.Config):
    units: int = 4


def network(activation: Any = jax.nn.relu) -> jn.Experiment[Config]:
    """A network whose evaluation depends on a field that is traced."""

    def task(config: Config) -> jn.Task:
        plain = jn.tasks.classification(linen.Sequential([linen.Dense(config.units), activation, linen.Dense(3)]))
        rate = config.learning_rate

        def evaluate(params: Any, model_state: Any, batch: jn.Batch, key: Any) -> Any:
            return {"scaled": rate * batch.mask.sum(), **plain.evaluate(params, model_state, batch, key)}

        return plain._replace(evaluate=evaluate)

    return jn.Experiment(Config(), lambda config: SPLITS, task, lambda config: optax.sgd(config.learning_rate))


@pytest.fixture(scope="module")
def swept(compiled_once: None, tmp_path_factory: pytest.TempPathFactory) -> jn.Sweep:
    return jn.sweep(network(), POINTS, run_dir=tmp_path_factory.mktemp("user") / "sweep", **HOW)


def test_seconds_are_the_elapsed_time_and_parts_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.perf_counter()
    points = jn.grid(learning_rate=[0.1, 0.2], seed=[0, 1])
    summary = jn.sweep(network(), points, record=False, **HOW | {"progress": "plain"}).summary
    assert 0.8 * (time.perf_counter() - started) < summary["seconds"] <= time.perf_counter() - started
    assert sum(summary["spent"].values()) == pytest.approx(summary["seconds"])
    assert "; lowest validation loss now " in capsys.readouterr().out
    started = time.perf_counter()
    run = tiny.fit(tiny.experiment())
    total, *parts = run.summary.first_step_seconds.values()
    assert sum(parts) == pytest.approx(total) and total < sum(run.summary.seconds.values())
    assert sum(run.summary.seconds.values()) <= time.perf_counter() - started


def test_empty_parameters_fail_before_training(swept: jn.Sweep) -> None:
    statuses = [member.status for member in swept.members]
    assert statuses == ["failed"] * 6 + ["finished"] * 4 + ["diverged"] * 2
    with pytest.raises(jn.ConfigError, match=r"parameter layers_0/bias is empty, \[0\]"):
        jn.fit(network().replace(units=0), record=False, **tiny.HOW)


def test_groups_average_settings_for_each_seed(swept: jn.Sweep) -> None:
    narrow = swept.select(units=4)
    row = narrow.group("units", "validation_loss").rows[0]
    losses = narrow.values("validation_loss")[:4].reshape(2, 2)  # [learning rates, seeds]
    assert (row.n, row.num_settings) == (2, 2) and "averaged over 2 settings" in repr(row)
    assert row.spread.deviation == pytest.approx(losses.mean(axis=0).std(ddof=1))
    assert "averaged over up to 2 settings" in repr(narrow.group("units"))


@pytest.mark.parametrize("changed", [False, True])
def test_changed_code_is_reported_when_used(swept: jn.Sweep, changed: bool) -> None:
    now = jn.open_sweep(str(swept.dir), network(jax.numpy.tanh if changed else jax.nn.relu))
    run = now.run(9)  # not the first of its group
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.evaluate("validation")
        run.predict(tiny.points(4)[0])
    assert len(caught) == changed
    assert all("evaluates another function" in str(one.message) and one.filename == __file__ for one in caught)


def test_resume_names_the_points_that_differ(swept: jn.Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    reverse = jn.search.zip(**{name: [point[name] for point in POINTS][::-1] for name in POINTS.scales})
    with pytest.raises(jn.ConfigError, match=r"another order\): --resume .* without points continues"):
        jn.sweep(network(), reverse, resume=swept.dir, **HOW)
    with pytest.raises(jn.ConfigError, match="member 0 is units 0, learning_rate 0.1, seed 0 there, units 4, lea"):
        jn.sweep(network(), jn.grid(units=[4], learning_rate=[0.1], seed=[0]), resume=swept.dir, **HOW)
    words = ["--resume", str(swept.dir), "--num-steps", "20", "--progress", "none"]
    resumed = jn.main(network(), words, points=jn.grid(seed=[5, 6]))
    assert isinstance(resumed, jn.Sweep) and len(resumed.members) == len(POINTS)
    error = shell.fails(capsys, lambda given: jn.main(network(), given), "sweep", "--seed", "--learning-rate", 1, 2)
    assert "--seed has no value" in error


def test_selections_and_metrics_are_named(swept: jn.Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (swept.select(learning_rate=rate, units=4) for rate in (0.1, 0.2))
    assert jn.compare(a, b).sides[0] == f"{swept.dir}  learning_rate 0.1, units 4"
    with pytest.raises(jn.ConfigError, match="A has seed 0, and B seed 1: train both"):
        jn.compare(a.select(seed=0), b.select(seed=1))
    with pytest.raises(jn.ConfigError, match="the sweep was evaluated on validation: 'validation_accuracy'"):
        a.best("test_accuracy")
    command(["show", str(swept.dir)])
    shown = capsys.readouterr().out
    assert "batch_size 8" in shown and "diverged       member 10 (units 4, learning_rate 1e+30, seed 0)" in shown


def test_warnings_point_at_the_caller() -> None:
    unread = dataclasses.replace(tiny.experiment(), config=Config())
    with pytest.warns(UserWarning, match="nothing reads the swept field 'units'") as caught:
        jn.sweep(unread, jn.grid(units=[4, 5]), record=False, plan_only=True, **HOW)
    assert caught[0].filename == __file__
