"""Every model and task trains alike on one device and on several, whatever the strategy: the second table."""

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
from jaxnn.loop.checks import check_alike_on_devices
from jaxnn.loop.compiling import Programs
from jaxnn.loop.evaluating import make_evaluator
from jaxnn.loop.feed import make_feed

import jaxnn as jn
from jaxnn.observe import Clock, Ledger
from jaxnn.parallel import SINGLE_DEVICE, Layout, make_layout
from jaxnn.types import Batch, TrainState
from tests import tiny
from tests.test_conformance import BATCH_SIZE, TABLE, Normed, Row

pytestmark = pytest.mark.usefixtures("compiled_once")

NUM_STEPS = 3
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
STRATEGIES = ("data", "fsdp", "pmap")
# Those with dropout, batch statistics, several terms an example and a loop over time.
CORE = ("MLP classifies", "CNN with batch norm classifies", "GPT", "RecurrentClassifier")


def table() -> Iterator[Any]:
    """Every row on four devices, some on one and two: they take as long to compile, and show less."""
    for row in TABLE:
        # What Flax's own layers compute with a part of the batch is not what they compute with the whole.
        for num_devices in () if isinstance(row.model, Normed) else (1, 2, 4) if row.name in CORE else (4,):
            fast = row.name in CORE and num_devices == 4
            marks = () if fast else (pytest.mark.slow,)
            yield pytest.param(row, num_devices, marks=marks, id=f"{row.name} on {num_devices}")


class Trained(NamedTuple):
    """What two calls of a training program and an evaluation gave.

    Attributes:
        state: at the end, on the devices.
        losses: the sums of each call.
        evaluation: of held-out data.
        compiled: the names of all programs.
    """

    state: TrainState
    losses: list[float]
    evaluation: dict[str, float]
    compiled: list[str]


def experiment(row: Row) -> jn.Experiment[Any]:
    batches = [row.batch(jax.random.key(index)) for index in range(4)]
    rows = [np.concatenate([np.asarray(getattr(batch, name)) for batch in batches]) for name in ("inputs", "targets")]
    data = jn.data.arrays(train=tuple(rows), test=tuple(array[: BATCH_SIZE + 3] for array in rows))
    return tiny.experiment(
        data=data,
        task=lambda config: row.task(row.model, **row.options),
        optimizer=lambda config: OPTIMIZER,
        batch_size=BATCH_SIZE,
    )


def train(row: Row, layout: Layout) -> Trained:
    example = experiment(row)
    splits = example.data(example.config)
    feed = make_feed(splits, 0, BATCH_SIZE, resident=True, layout=layout)
    programs = Programs(example, splits.train, feed, Ledger(), Clock(), layout)
    check_alike_on_devices(programs, splits)
    state, losses = programs.init(), []
    for step in (0, NUM_STEPS):
        call = programs.compile_train(NUM_STEPS, "start")
        state, totals = call(state, programs.zeros, feed.prepare(step, NUM_STEPS))
        losses.append(float(totals.sums["loss"]))
    evaluate = make_evaluator(
        example,
        splits.test,
        programs.shapes,
        batch_size=BATCH_SIZE,
        resident=True,
        layout=programs.layout,
        state_shardings=programs.shardings,
        ledger=programs.ledger,
        name="test",
    )
    return Trained(state, losses, evaluate(state), [entry.name for entry in programs.ledger.compilations])


@functools.cache
def alone(name: str) -> Trained:
    return train(next(row for row in TABLE if row.name == name), SINGLE_DEVICE)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("row", "num_devices"), [*table()])
def test_devices_train_as_one_does(row: Row, strategy: str, num_devices: int) -> None:
    expected = alone(row.name)
    got = train(row, make_layout(strategy, num_devices))
    assert all(len(leaf.sharding.device_set) == num_devices for leaf in jax.tree.leaves(got.state))
    tolerance = {"rtol": 10 * row.tolerance, "atol": 10 * row.tolerance}
    np.testing.assert_allclose(got.losses, expected.losses, **tolerance)
    assert got.evaluation == pytest.approx(expected.evaluation, rel=10 * row.tolerance)
    # Statistics of the model itself, and all that the optimizer holds.
    for found, wanted in zip(jax.tree.leaves(_numbers(got)), jax.tree.leaves(_numbers(expected)), strict=True):
        np.testing.assert_allclose(found, wanted, **tolerance)
    # Under pmap what a task gives is compared first with what it gives of the whole batch.
    assert [name for name in got.compiled if name != "compare devices"] == expected.compiled


def _numbers(trained: Trained) -> TrainState:
    return jax.device_get(trained.state._replace(key=0))  # type: ignore[arg-type]


# Tasks as users write them: nothing in them knows of devices.

CLASSES = jn.tasks.classification(tiny.MODEL)


def with_loss(value: Any) -> Any:
    """A task that minimises ``value(params, batch, key)``, a number."""
    return CLASSES._replace(loss=lambda params, state, batch, key: (value(params, batch, key), (state, {})))


def denoised(params: Any, inputs: jax.Array, key: jax.Array) -> jax.Array:
    """As diffusion draws its noise."""
    noise = jax.random.normal(key, inputs.shape)
    return jnp.square(tiny.apply(params, inputs + noise) - noise).mean(1)


def matched(params: Any, inputs: jax.Array) -> jax.Array:
    """As SimCLR tells each example from all others."""
    outputs = tiny.apply(params, inputs)
    return -jnp.diagonal(jax.nn.log_softmax(outputs @ outputs.T))


def share_of_large(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
    """A mean over some examples, of which each device has another number."""
    large = batch.inputs[:, 0] > 0
    squares = jnp.square(tiny.apply(params, batch.inputs)).sum(1)
    return jnp.where(large, squares, 0.0).sum() / large.sum()


def drawing_evaluation() -> Any:
    def evaluate(params: Any, state: Any, batch: Batch) -> Any:
        return {"loss": denoised(params, batch.inputs, jax.random.key(0)).sum(), "count": batch.mask.sum()}

    return CLASSES._replace(evaluate=evaluate)


def in_bfloat16(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
    """So many draws, and so coarse numbers, that the mean hardly shows that they repeat."""
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
    "couples": (with_loss(lambda params, batch, key: matched(params, batch.inputs).mean()), "loss .* examples"),
    "counts": (with_loss(share_of_large), "loss .* examples"),
    "normalizes": (jn.tasks.classification(FlaxNormed()), "batch_stats/BatchNorm_0/mean .* examples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pmap_refuses_what_is_not_the_same_by_parts(name: str) -> None:
    task, words = REFUSED[name]
    with pytest.raises(jn.ConfigError, match=f"{words}.*strategy data"):
        tiny.fit(tiny.experiment(task=lambda config: task), strategy="pmap", devices=2)


def test_own_draws_and_coupled_losses_are_those_of_one_device() -> None:
    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return (denoised(params, batch.inputs, key) + matched(params, batch.inputs)).mean()

    train_only = jn.data.arrays(train=tiny.points(tiny.NUM_TRAIN))
    example = tiny.experiment(data=train_only, task=lambda config: with_loss(loss))
    alone, *split = (tiny.fit(example, **options).final for options in ({}, {"strategy": "data"}, {"strategy": "fsdp"}))
    assert split == [pytest.approx(alone, rel=1e-5)] * 2


def test_targets_that_do_not_count_may_be_unequally_shared_between_devices() -> None:
    tokens = np.random.default_rng(0).integers(0, 7, (32, 9)).astype(np.int32)
    targets = np.where(np.arange(8) <= np.arange(32)[:, None] % 8, tokens[:, 1:], -1)
    init = lambda key, inputs: {"logits": jax.random.normal(key, (7, 7))}  # noqa: E731
    model = init, lambda params, inputs: params["logits"][inputs]
    example = tiny.experiment(
        data=jn.data.arrays(train=(tokens[:, :-1], targets)), task=lambda config: jn.tasks.next_token(model)
    )
    got = tiny.fit(example, strategy="pmap", devices=4)
    assert got.final == pytest.approx(tiny.fit(example).final, rel=1e-5)


def test_flaxs_own_layers_see_the_whole_batch_where_one_program_does() -> None:
    row = next(row for row in TABLE if isinstance(row.model, Normed))
    expected, got = alone(row.name), train(row, make_layout("data", 4))
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
