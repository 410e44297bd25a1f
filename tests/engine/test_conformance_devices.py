"""Every model and task trains on several devices as on one, with every strategy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.engine import RunOptions, open_trainer
from jaxnn.engine import train as train_windows
from jaxnn.nn import is_full
from jaxnn.observe import Clock
from jaxnn.parallel import SINGLE_DEVICE, Layout, make_layout
from jaxnn.types import Batch, TrainState
from tests import tiny
from tests.engine.test_conformance import BATCH_SIZE, TABLE, Normed, Row

pytestmark = pytest.mark.usefixtures("compiled_once")

NUM_STEPS = 3
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
FAST = [("MLP", "fsdp", 4), ("MLP", "pmap", 4)]
FEWER_DEVICES = [("MLP", "pmap", 1), ("GPT", "fsdp", 2), ("CNN with batch norm", "data", 2)]


def table() -> Iterator[Any]:
    """Every row with pmap and another strategy on four devices, some on one and two."""
    for index, (name, row) in enumerate(TABLE.items()):
        # What Flax's own layers compute from a part of the batch is not what they compute from all of it.
        for strategy in () if isinstance(row.model, Normed) else ("pmap", ("fsdp", "data")[index % 2]):
            case = (name, strategy, 4)
            yield case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)
    yield from (pytest.param(*case, marks=pytest.mark.slow) for case in FEWER_DEVICES)


class Trained(NamedTuple):
    """Two calls of a training program and an evaluation."""

    state: TrainState  # at the end, on the devices
    losses: list[float]  # the mean over each call
    evaluation: dict[str, float]  # on the eval split
    compiled: list[str]  # the names of all programs


def with_full_batches(task: jn.Task) -> jn.Task:
    """``task``, which asserts that it is known while tracing that no example in training is padding."""

    def loss(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Any:
        assert is_full(batch.mask)
        return task.loss(params, model_state, batch, key)

    return task._replace(loss=loss)


def experiment(row: Row) -> jn.Experiment[Any]:
    batches = [row.batch(seed) for seed in range(4)]
    rows = [np.concatenate([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets")]
    data = jn.data.arrays(train=tuple(rows), test=tuple(array[: BATCH_SIZE + 3] for array in rows))
    return tiny.experiment(
        data=data,
        task=lambda config: with_full_batches(row.task(row.model, **row.options)),
        optimizer=lambda config: OPTIMIZER,
        batch_size=BATCH_SIZE,
        num_steps=2 * NUM_STEPS,
    )


def train(name: str, layout: Layout) -> Trained:
    example = experiment(TABLE[name])
    splits = example.data(example.config)
    every = {"steps_per_call": NUM_STEPS, "report_every": NUM_STEPS, "eval_every": 0}
    options = RunOptions(**every, eval_batch_size=BATCH_SIZE, resident=True)  # type: ignore[arg-type]
    trainer = open_trainer(example, options, splits, layout, Clock())
    losses = [window.lines[0]["train_loss"] for window in train_windows(trainer, lambda: False)]
    compiled = [entry.name for entry in trainer.programs.ledger.compilations]
    return Trained(trainer.state, losses, trainer.evaluate("test"), compiled)


@functools.cache
def alone(name: str) -> Trained:
    return train(name, SINGLE_DEVICE)


@pytest.mark.parametrize(("name", "strategy", "num_devices"), [*table()])
def test_devices_train_as_one_does(name: str, strategy: str, num_devices: int) -> None:
    expected, got = alone(name), train(name, make_layout(strategy, num_devices))
    assert all(len(leaf.sharding.device_set) == num_devices for leaf in jax.tree.leaves(got.state))
    allowed = 10 * TABLE[name].tolerance
    np.testing.assert_allclose(got.losses, expected.losses, rtol=allowed, atol=allowed)
    assert got.evaluation == pytest.approx(expected.evaluation, rel=allowed)
    # The model's statistics and the optimizer's state too.
    for found, wanted in zip(jax.tree.leaves(_numbers(got)), jax.tree.leaves(_numbers(expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=allowed, atol=allowed)
    # Under pmap the results of a task on parts of a batch are first compared with those on all of it.
    assert sorted(set(got.compiled) - {"compare devices"}) == sorted(expected.compiled)


def _numbers(trained: Trained) -> TrainState:
    return jax.device_get(trained.state._replace(key=0))  # type: ignore[arg-type]


# Tasks of a user's own, which know nothing of devices.

CLASSES = jn.tasks.classification(tiny.MODEL)


def with_loss(value: Any) -> Any:
    """A task that minimises ``value(params, batch, key)``, a number."""
    return CLASSES._replace(loss=lambda params, state, batch, key: (value(params, batch, key), (state, {})))


def denoised(params: Any, inputs: jax.Array, key: jax.Array) -> jax.Array:
    """The loss of a diffusion model."""
    noise = jax.random.normal(key, inputs.shape)
    return jnp.square(tiny.apply(params, inputs + noise) - noise).mean(1)


def matched(params: Any, inputs: jax.Array) -> jax.Array:
    """The contrastive loss of SimCLR."""
    outputs = tiny.apply(params, inputs)
    return -jnp.diagonal(jax.nn.log_softmax(outputs @ outputs.T))


def share_of_large(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
    """A mean over some examples, of which devices have different numbers."""
    large = batch.inputs[:, 0] > 0
    squares = jnp.square(tiny.apply(params, batch.inputs)).sum(1)
    return jnp.where(large, squares, 0.0).sum() / large.sum()


def drawing_evaluation() -> Any:
    def evaluate(params: Any, state: Any, batch: Batch) -> Any:
        return {"loss": denoised(params, batch.inputs, jax.random.key(0)).sum(), "count": batch.mask.sum()}

    return CLASSES._replace(evaluate=evaluate)


def in_bfloat16(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
    """Many draws with coarse rounding: their mean hardly shows that they repeat."""
    noise = jax.random.normal(key, (len(batch.mask), 4096), jnp.bfloat16)
    return jnp.abs(noise).mean() + jnp.square(params["kernel"]).sum()


class FlaxNormed(linen.Module):
    @linen.compact
    def __call__(self, inputs: jax.Array, *, train: bool) -> jax.Array:
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not train)(inputs))


REFUSED = {
    "draws": (with_loss(lambda params, batch, key: denoised(params, batch.inputs, key).mean()), "draws random numbers"),
    "draws many": (with_loss(in_bfloat16), "draws random numbers"),
    "draws when evaluated": (drawing_evaluation(), "draws random numbers"),
    "counts": (with_loss(share_of_large), "loss .* examples"),
    "normalizes": (jn.tasks.classification(FlaxNormed()), "batch_stats/BatchNorm_0/mean .* examples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pmap_refuses_tasks_that_differ_on_parts_of_a_batch(name: str) -> None:
    task, words = REFUSED[name]
    with pytest.raises(jn.ConfigError, match=f"{words}.*strategy data"):
        tiny.fit(tiny.experiment(task=lambda config: task), strategy="pmap", devices=2)


@pytest.mark.parametrize("strategy", ["data", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_own_random_numbers_and_coupled_losses_equal_those_of_one_device(strategy: str) -> None:
    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return (denoised(params, batch.inputs, key) + matched(params, batch.inputs)).mean()

    train_only = jn.data.arrays(train=tiny.points(tiny.NUM_TRAIN))
    example = tiny.experiment(data=train_only, task=lambda config: with_loss(loss))
    sharded = tiny.fit(example, strategy=strategy).final
    assert sharded == pytest.approx(tiny.fit(example).final, rel=1e-5)


@pytest.mark.slow
def test_flax_layers_see_the_global_batch_under_strategy_data() -> None:
    name = "a user's module"
    np.testing.assert_allclose(train(name, make_layout("data", 4)).losses, alone(name).losses, rtol=1e-5)
