"""Every model and task trains on several devices as on one, and every strategy trains models of each kind."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.nn import is_full
from jaxnn.types import Batch
from tests import tiny
from tests.engine.test_conformance import BATCH_SIZE, ELSEWHERE, TABLE, Normed

pytestmark = pytest.mark.usefixtures("compiled_once")

FAST = [("MLP", "fsdp")]


# One of each kind of layer, of random number and of dtype: compiling for pmap takes the time of three other strategies.
PMAPPED = {"MLP", "CNN with batch norm", "FastText", "RecurrentClassifier", "GPT", "CNN in bfloat16", "ResNet", "VAE"}


def table() -> Iterator[Any]:
    """Every row with a strategy, some with pmap too."""
    for index, (name, row) in enumerate(TABLE.items()):
        # What other libraries' layers compute from a part of the batch is not what they compute from all of it.
        alone = "data" if isinstance(row.model, Normed) or name in ELSEWHERE else ("fsdp", "data")[index % 2]
        for strategy in ("pmap", alone) if name in PMAPPED else (alone,):
            case = (name, strategy)
            yield case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)


@functools.cache
def trained(name: str, **options: Any) -> jn.Run:
    """A run of ten steps, in calls of five."""
    row = TABLE[name]
    batches = [row.batch(seed) for seed in range(4)]
    train = jax.tree.map(lambda *parts: np.concatenate(parts), *(batch[:2] for batch in batches))
    data = jn.data.arrays(train, test=jax.tree.map(lambda rows: rows[: BATCH_SIZE + 3], train))

    def make_task(config: tiny.Config) -> jn.Task:
        task = row.task(row.model, **row.options)

        def loss(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Any:
            # While tracing it is known that nothing is padding.
            assert is_full(batch.mask)
            return task.loss(params, model_state, batch, key)

        return task._replace(loss=loss)

    return tiny.fit(tiny.experiment(data=data, task=make_task, num_steps=10), eval_batch_size=BATCH_SIZE, **options)


@pytest.mark.parametrize(("name", "strategy"), [*table()])
def test_devices_train_as_one_does(name: str, strategy: str) -> None:
    expected, got = trained(name), trained(name, strategy=strategy, devices=4)
    assert all(len(leaf.sharding.device_set) == 4 for leaf in jax.tree.leaves(got.state))
    allowed = 10 * TABLE[name].tolerance
    assert got.final == pytest.approx(expected.final, rel=allowed)
    # The parameters, the model's statistics and the optimizer's state.
    for found, wanted in zip(jax.tree.leaves(got.state[:4]), jax.tree.leaves(expected.state[:4]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=allowed, atol=allowed)
    # Under pmap the results of a task on parts of a batch are first compared with those on all of it.
    compiled = [run.summary.compilations["num_compilations"] for run in (got, expected)]
    assert compiled[0] - compiled[1] == (strategy == "pmap")


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


def drawing(params: Any, state: Any, batch: Batch, key: Any) -> Any:
    """An evaluation that draws."""
    return {"loss": denoised(params, batch.inputs, jax.random.key(0)).sum(), "count": batch.mask.sum()}


class FlaxNormed(linen.Module):
    @linen.compact
    def __call__(self, inputs: jax.Array, *, train: bool) -> jax.Array:
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not train)(inputs))


REFUSED = {
    "draws": (with_loss(lambda params, batch, key: denoised(params, batch.inputs, key).mean()), "draws random numbers"),
    "draws when evaluated": (CLASSES._replace(evaluate=drawing), "draws random numbers"),
    "counts": (with_loss(share_of_large), "loss .* examples"),
    "normalizes": (jn.tasks.classification(FlaxNormed()), "batch_stats/BatchNorm_0/mean .* examples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pmap_refuses_tasks_that_differ_on_parts_of_a_batch(name: str) -> None:
    task, words = REFUSED[name]
    with pytest.raises(jn.ConfigError, match=f"{words}.*strategy data"):
        tiny.fit(tiny.experiment(task=lambda config: task), strategy="pmap", devices=2)


def test_own_random_numbers_and_coupled_losses_equal_those_of_one_device() -> None:
    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return (denoised(params, batch.inputs, key) + matched(params, batch.inputs)).mean()

    train_only = jn.data.arrays(train=tiny.points(tiny.NUM_TRAIN))
    example = tiny.experiment(data=train_only, task=lambda config: with_loss(loss))
    assert tiny.fit(example, strategy="data").final == pytest.approx(tiny.fit(example).final, rel=1e-5)
