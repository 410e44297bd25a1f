"""Every model and task trains on several devices as on one, and every strategy trains models of each kind."""

import functools
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
from tests.engine.test_conformance import BATCH_SIZE, TABLE

# One of each strategy; test_conformance.py has a step of every row on several devices.
RUNS = [("MLP", "fsdp"), ("CNN with batch norm", "data"), ("GPT", "pmap"), ("a Flax NNX module", "data")]


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


@pytest.mark.parametrize(
    ("name", "strategy"), [RUNS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in RUNS[1:])]
)
def test_devices_train_as_one_does(name, strategy):
    expected, got = trained(name), trained(name, strategy=strategy, devices=4)
    assert all(len(leaf.sharding.device_set) == 4 for leaf in jax.tree.leaves(got.state))
    allowed = 10 * TABLE[name].tolerance
    assert got.final == pytest.approx(expected.final, rel=allowed)
    # The parameters, the model's statistics and the optimizer's state.
    for found, wanted in zip(jax.tree.leaves(got.state[:4]), jax.tree.leaves(expected.state[:4]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=allowed, atol=allowed)
    assert got.summary.compilations["num_compilations"] == expected.summary.compilations["num_compilations"]


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
    each = denoised(params, batch.inputs, jax.random.key(0))
    return {"loss": (each * batch.mask).sum(), "count": batch.mask.sum()}


class FlaxNormed(linen.Module):
    @linen.compact
    def __call__(self, inputs: jax.Array, *, train: bool) -> jax.Array:
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not train)(inputs))


DRAWING = {
    "draws": with_loss(lambda params, batch, key: denoised(params, batch.inputs, key).mean()),
    "draws when evaluated": CLASSES._replace(evaluate=drawing),
}
COUPLED = {
    "counts": with_loss(share_of_large),
    "contrasts": with_loss(lambda params, batch, key: matched(params, batch.inputs).mean()),
    "normalizes": jn.tasks.classification(FlaxNormed()),
}


@pytest.mark.parametrize("name", DRAWING)
def test_pmap_refuses_tasks_that_draw_random_numbers_themselves(name):
    with pytest.raises(jn.ConfigError, match="draws random numbers.*strategy data"):
        tiny.fit(tiny.experiment(task=lambda config: DRAWING[name]), strategy="pmap", devices=2)


@pytest.mark.parametrize("name", COUPLED)
def test_tasks_that_couple_examples_are_found_by_the_check_that_pmap_names(name):
    batch = Batch(*tiny.points(8), np.ones(8, np.float32))
    with pytest.raises(jn.testing.ConformanceError, match="pmap: .* on 2 devices"):
        jn.testing.check_task(COUPLED[name], batch, checks=("pmap",))


def test_pmap_names_the_check_of_coupled_examples(capsys):
    for strategy, is_named in (("pmap", True), ("data", False)):
        tiny.fit(tiny.experiment(num_steps=5), strategy=strategy, devices=2, progress="plain")
        assert ("jaxnn.testing.check_task" in capsys.readouterr().out) == is_named


def test_own_random_numbers_and_coupled_losses_equal_those_of_one_device():
    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return (denoised(params, batch.inputs, key) + matched(params, batch.inputs)).mean()

    train_only = jn.data.arrays(train=tiny.points(tiny.NUM_TRAIN))
    example = tiny.experiment(data=train_only, task=lambda config: with_loss(loss))
    assert tiny.fit(example, strategy="data").final == pytest.approx(tiny.fit(example).final, rel=1e-5)
