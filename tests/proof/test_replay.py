"""The state, the batch and the key of any step again; digests in the record confirm them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from tests import tiny

QUIET: Any = {"progress": "none", "report_every": 6, "eval_every": 12, "steps_per_call": 3}


def shifted(key: jax.Array, batch: jn.Batch) -> jn.Batch:
    return batch._replace(inputs=batch.inputs + 0.1 * jax.random.normal(key, batch.inputs.shape))


def noisy(**fields: Any) -> jn.Experiment[tiny.Config]:
    """An experiment whose steps depend on the order of the data, an augmentation and the key of the step."""

    def loss(params: Any, state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        inputs = batch.inputs * jax.random.bernoulli(key, 0.8, batch.inputs.shape)
        each = tiny.nats(params, batch._replace(inputs=inputs))
        return jnp.mean(each), (state, {})

    return tiny.experiment(
        data=jn.data.with_augmentation(tiny.splits(), shifted),
        task=lambda config: tiny.TASK._replace(loss=loss),
        optimizer=lambda config: optax.adam(config.learning_rate),
        **{"num_steps": 24, **fields},
    )


def by_hand(experiment: jn.Experiment[tiny.Config], step: int) -> tuple[Any, list[jn.Batch]]:
    """The state after ``step`` updates, one program of one step each, and their batches."""
    config, source = experiment.config, experiment.data(experiment.config).train
    task, optimizer = experiment.task(config), experiment.optimizer(config)
    first = source.as_batch(source.read(np.arange(config.batch_size)))
    state = jn.steps.init_train_state(task, optimizer, jax.random.key(config.seed), first)
    update, batches = jax.jit(jn.steps.make_train_step(task, optimizer)), []
    for number in range(step):
        (rows,) = np.asarray(source.order(config.seed, np.array([number], np.int32), config.batch_size))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), number)
        batches.append(source.transform(source.as_batch(source.read(rows)), key))
        state, _ = update(state, batches[-1])
    return state, batches


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    return jn.fit(noisy(), run_dir=tmp_path_factory.mktemp("run") / "run", **QUIET)


def test_any_step_is_replayed_with_its_batch_and_key(run: jn.Run):
    replay = jn.replay(run, step=14)  # in the middle of a call
    state, batches = by_hand(noisy(), 14)
    assert replay.exact and int(replay.state.step) == 13
    np.testing.assert_allclose(replay.batch.inputs, batches[13].inputs, rtol=1e-6)
    np.testing.assert_array_equal(replay.batch.targets, batches[13].targets)
    for number in (1, 4, 7, 13, 24):  # also at the start of a call inside a window
        assert replay.at(number).exact, number
    after, metrics = replay.update()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), after.params, state.params)
    assert int(after.step) == 14 and metrics.keys() == {"loss"}
    rows = replay.table(2).rows
    assert [int(row[0]) for row in rows] == replay.examples[:2].tolist()
    assert [float(row[-1]) for row in rows] == batches[13].targets[:2].tolist()
    with pytest.raises(jn.ConfigError, match="no pictures"):
        replay.plot()
    assert replay.key == jax.random.fold_in(state.key, 13)
    assert ["digest" in line for line in replay.reports] == [False, True, False, True]  # where it is evaluated
    assert "digest" not in run.metrics and "digest" not in run.final


def test_a_changed_program_is_equal_to_rounding_only(run: jn.Run):
    other = dataclasses.replace(noisy(), optimizer=lambda config: optax.adam(0.1001))
    found = jn.replay(run, other, step=9)
    assert not found.exact and "step 12" in found.why and "program of a step" in found.why
    with pytest.raises(jn.ConfigError, match="24 steps"):
        found.at(25)


def test_members_are_replayed_also_at_different_steps(tmp_path: Path):
    points = jn.grid(seed=[0, 1, 2], learning_rate=[0.1, 0.01])
    swept = jn.sweep(noisy(), points, run_dir=tmp_path / "swept", **QUIET)
    replay = jn.replay(tmp_path / "swept", noisy(), step=11, member=3)
    assert replay.exact and replay.member == 3 and replay.experiment.config.seed == 1
    assert replay.at(20).exact and replay.at(2).exact
    noted = [line["digest"] for line in swept.lines if "digest" in line]
    assert len({*noted}) == len(noted) == 12
    space: Any = {"learning_rate": jn.search.log_uniform(0.01, 0.3)}
    jn.sweep(noisy(), jn.search.asha(space, num=6), lanes=2, run_dir=tmp_path / "search", progress="none")
    longest = max(range(6), key=lambda number: len(jn.open_run(tmp_path / "search", member=number).metrics["step"]))
    assert jn.replay(tmp_path / "search", noisy(), step=5, member=longest).exact


@pytest.mark.parametrize("strategy", ["fsdp", "pmap"])
def test_steps_on_several_devices_are_replayed_there(strategy: str, tmp_path: Path):
    plain = tiny.experiment(num_steps=12)
    run = jn.fit(plain, run_dir=tmp_path / "run", strategy=strategy, devices=2, **QUIET)
    replay = jn.replay(run, step=8)
    assert replay.exact, replay.why
    # The digest is one of bits, not of devices: the checkpoint's state is on one.
    assert replay.at(12).exact
