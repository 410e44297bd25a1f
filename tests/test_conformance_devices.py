"""Every model and task trains alike on one device and on several, whatever the strategy: the second table."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.loop.checks import check_alike_on_devices
from jaxnn.loop.compiling import Programs
from jaxnn.loop.evaluating import make_evaluator
from jaxnn.loop.feed import make_feed
from jaxnn.observe import Clock, Ledger
from jaxnn.parallel import SINGLE, Layout, make_layout
from jaxnn.types import TrainState
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
    check_alike_on_devices(programs)
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
    return train(next(row for row in TABLE if row.name == name), SINGLE)


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
    assert got.compiled == expected.compiled


def _numbers(trained: Trained) -> TrainState:
    return jax.device_get(trained.state._replace(key=0))  # type: ignore[arg-type]


def test_a_state_of_its_own_on_each_device_is_refused() -> None:
    row = next(row for row in TABLE if isinstance(row.model, Normed))
    with pytest.raises(jn.ConfigError, match=r"batch_stats/BatchNorm_0/mean would differ between devices under pmap"):
        train(row, make_layout("pmap", 2))
    # Where one program sees the whole batch, its statistics are those of the batch.
    expected, got = alone(row.name), train(row, make_layout("data", 4))
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
