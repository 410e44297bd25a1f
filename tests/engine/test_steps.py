"""Steps: an update by hand, padding, any Optax optimizer, evaluation, dropout, and batches shared by devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxnn import nn, optim, tasks
from jaxnn.models import MLP
from jaxnn.nn import Policy
from jaxnn.steps import init_train_state, make_evaluate_step, make_train_step
from jaxnn.tasks import averaged_over
from jaxnn.types import Batch, ConfigError, Task, TrainState
from tests import tiny

KEY = jax.random.key(0)
# y = w x from w = 1: at x = 1, 2 and y = 3, 4 the errors are -2, -2.
LINE = tasks.regression((lambda key, inputs: {"w": jnp.ones(())}, lambda params, inputs: params["w"] * inputs))
POINTS = Batch(np.array([1, 2], np.float32), np.array([3, 4], np.float32), np.ones(2, np.float32))


def start(task: Task, optimizer: optax.GradientTransformation, batch: Batch = POINTS) -> TrainState:
    return init_train_state(task, optimizer, KEY, batch)


def sgd_step(batch: Batch) -> tuple[float, dict[str, float]]:
    state, metrics = make_train_step(LINE, optax.sgd(0.1))(start(LINE, optax.sgd(0.1)), batch)
    return float(state.params["w"]), {name: float(value) for name, value in metrics.items()}


def test_gradient_descent_by_hand() -> None:
    # d/dw is the mean of 2 (-2) 1 and 2 (-2) 2: -6; w becomes 1 + 0.1 * 6.
    w, metrics = sgd_step(POINTS)
    assert w == pytest.approx(1.6, rel=1e-6)
    assert metrics == {"loss": 4.0, "mean_absolute_error": 2.0}
    # If only x = 1 counts, d/dw is 2 (-2) 1 = -4.
    assert sgd_step(POINTS._replace(mask=np.array([1, 0], np.float32)))[0] == pytest.approx(1.4, rel=1e-6)


def test_step_is_counted_and_keys_stay_apart() -> None:
    noise = tasks.regression(
        (lambda key, inputs: {"w": jax.random.uniform(key)}, lambda params, inputs: params["w"] * inputs)
    )
    step, states = make_train_step(noise, optax.sgd(0.1)), [start(noise, optax.sgd(0.1))]
    for _ in range(3):
        states.append(step(states[-1], POINTS)[0])
    assert [int(state.step) for state in states] == [0, 1, 2, 3]
    assert {state.step.dtype.name for state in states} == {"int32"}
    keys = [jax.random.key_data(state.key).tolist() for state in states]
    assert keys == keys[:1] * 4
    # Initialisation and steps draw from different keys, neither of them the given one.
    drawn = {float(jax.random.uniform(key)) for key in (KEY, states[0].key)} | {float(states[0].params["w"])}
    assert len(drawn) == 3


def test_batch_with_parts_of_different_lengths_is_refused() -> None:
    state = start(LINE, optax.sgd(0.1))
    for mask in (np.ones(3, np.float32), np.ones((2, 1), np.float32)):
        for step in (make_train_step(LINE, optax.sgd(0.1)), make_evaluate_step(LINE)):
            with pytest.raises(ConfigError, match=r"one length.* mask \[[23]"):
                step(state, POINTS._replace(mask=mask))


class Normed(linen.Module):
    """Two layers with batch statistics between them."""

    flax: bool = False

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.Dense(4, use_bias=False)(x)
        if self.flax:
            counts = nn.batch_mask()
            mask = None if counts is None else counts[:, None, None]
            x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(x, mask=mask)
        else:
            x = nn.BatchNorm(not train, momentum=0.5)(x)
        return linen.Dense(3)(linen.relu(x).mean(1))


# Of eight rows five count: none, one or both of the two that each of four devices has.
COUNTS = np.array([1, 0, 1, 1, 0, 0, 1, 1], np.float32)


def row_batches() -> tuple[Batch, Batch]:
    """Five rows alone, and among padding that holds garbage."""
    rng, rows = np.random.default_rng(0), COUNTS > 0
    inputs, targets = rng.normal(3.0, 2.0, (5, 2, 3)).astype(np.float32), np.array([0, 1, 2, 1, 1])
    padded = np.full((8, 2, 3), np.nan, np.float32), np.full(8, 99)
    padded[0][rows], padded[1][rows] = inputs, targets
    return Batch(inputs, targets, np.ones(5, np.float32)), Batch(*padded, COUNTS)


def assert_near(found: Any, expected: Any, tolerance: float) -> None:
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@functools.cache
def rows_alone() -> tuple[TrainState, Any]:
    """A state, and the result of a step with five rows."""
    task, whole = tasks.classification(Normed()), row_batches()[0]
    state = jax.jit(lambda: start(task, optax.sgd(0.1), whole))()
    return state, jax.jit(make_train_step(task, optax.sgd(0.1)))(state, whole)


@pytest.mark.parametrize("way", ["jit", "flax", "bfloat16", "sharded", "pmap", "members"])
def test_padding_counts_in_no_batch_statistics(way: str) -> None:
    policy = Policy(compute="bfloat16") if way == "bfloat16" else None
    task = tasks.classification(Normed(flax=way == "flax"), policy=policy)
    step = make_train_step(averaged_over(task, "data" if way == "pmap" else None), optax.sgd(0.1))
    (state, expected), padded = rows_alone(), row_batches()[1]
    if way == "pmap":
        parts = jax.tree.map(lambda rows: rows.reshape(4, 2, *rows.shape[1:]), padded)
        got = jax.pmap(step, axis_name="data", in_axes=(None, 0))(state, parts)
    elif way == "members":
        got = jax.jit(jax.vmap(step, (None, 0)))(state, jax.tree.map(lambda rows: np.stack([rows] * 2), padded))
    else:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        split = jax.device_put(padded, NamedSharding(mesh, PartitionSpec("data")))
        got = jax.jit(step)(state, split if way == "sharded" else padded)
    got = jax.tree.map(lambda leaf: leaf[0], got) if way in ("pmap", "members") else got
    assert_near(got, expected, 2e-2 if way == "bfloat16" else 1e-5)


def test_batch_of_padding_alone_changes_nothing() -> None:
    task, padded, (state, _) = tasks.classification(Normed()), row_batches()[1], rows_alone()
    padding = padded._replace(mask=np.zeros(8, np.float32))
    after, metrics = jax.jit(make_train_step(task, optax.sgd(0.1)))(state, padding)
    assert_near((after.params, after.model_state), (state.params, state.model_state), 0)
    assert float(metrics["loss"]) == 0


def test_normalized_rows_that_do_not_match_the_mask_are_named() -> None:
    class Merged(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
            normed = nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 3))
            return linen.Dense(3)(normed.reshape(x.shape).mean(1))

    task = tasks.classification(Merged())
    whole, padded = row_batches()
    state = jax.eval_shape(lambda: start(task, optax.sgd(0.1), whole))
    step = make_train_step(task, optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"16 rows.*batch of 8.*mask"):
        jax.eval_shape(step, state, padded)
    # With a mask known to be all ones while tracing, any rows will do.
    jax.eval_shape(lambda state: step(state, whole), state)


@pytest.mark.parametrize("options", [{}, pytest.param({"devices": 4, "strategy": "pmap"}, marks=pytest.mark.slow)])
def test_full_batches_of_a_run_are_known_while_tracing(options: dict[str, Any]) -> None:
    seen: list[Any] = []

    def apply(params: Any, inputs: jax.Array, train: bool) -> jax.Array:
        if train:
            seen.append(nn.batch_mask())
        return tiny.apply(params, inputs)

    tiny.fit(tiny.experiment(model=(tiny.init, apply), num_steps=5), **options)
    assert seen and all(mask is None for mask in seen)


def test_tokens_are_averaged_over_the_batch_of_all_devices() -> None:
    # Of four devices' sequences one, two, no and three tokens count.
    task = tasks.next_token((lambda key, x: jnp.ones((3, 5)), lambda params, x: params[x]))
    tokens = np.random.default_rng(0).integers(0, 3, (4, 3))
    targets = np.where(np.arange(3) < np.array([[1], [2], [0], [3]]), tokens + 1, -1)
    batch, optimizer = Batch(tokens, targets, np.ones(4, np.float32)), optax.sgd(0.1)
    state = jax.jit(lambda: start(task, optimizer, batch))()
    expected = jax.jit(make_train_step(task, optimizer))(state, batch)
    step = make_train_step(averaged_over(task, "data"), optimizer)
    parts = jax.tree.map(lambda rows: rows[:, None], batch)
    got = jax.jit(jax.vmap(step, axis_name="data", in_axes=(None, 0)))(state, parts)
    assert_near(jax.tree.map(lambda leaf: leaf[0], got), expected, 1e-6)


# Optimizers.


def labelled(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "weights" if path[-1].key == "kernel" else "biases", params)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.01),
    "line search": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "partition": lambda: optax.partition({"weights": optax.adam(0.1), "biases": optax.sgd(0.1)}, labelled),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(learning_rate=0.1),
    "all combinators": lambda: optim.with_ema(
        optim.with_accumulation(optim.with_clipping(optax.adam(0.1), 1.0), 2), 0.9
    ),
}
NUM_STEPS = 6
CLASSES = tasks.classification(MLP((4, 3)))
EXAMPLES = Batch(
    np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32), np.arange(16) % 3, np.ones(16, np.float32)
)


def losses_by_optax(optimizer: optax.GradientTransformation, params: Any) -> jax.Array:
    """The losses of a loop as Optax's own documentation writes it."""
    loss_fn = lambda params: CLASSES.loss(params, {}, EXAMPLES, KEY)[0]  # noqa: E731
    optimizer = optax.with_extra_args_support(optimizer)

    def body(carry: Any, _: None) -> tuple[Any, jax.Array]:
        params, opt_state = carry
        value, grad = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grad, opt_state, params, value=value, grad=grad, value_fn=loss_fn)
        return (optax.apply_updates(params, updates), opt_state), value

    return jax.lax.scan(body, (params, optimizer.init(params)), length=NUM_STEPS)[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_trains_as_in_a_plain_loop(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    step = make_train_step(CLASSES, optimizer)

    @jax.jit
    def train() -> Any:
        state = start(CLASSES, optimizer, EXAMPLES)
        after, metrics = jax.lax.scan(lambda state, _: step(state, EXAMPLES), state, length=NUM_STEPS)
        return state, after, metrics, losses_by_optax(optimizer, state.params)

    before, after, metrics, expected = train()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((before, after)))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert metrics["loss"][-1] < metrics["loss"][0]


def test_plateau_gets_the_loss_and_reduces_the_rate() -> None:
    # At rate 0 every step from the second on fails to improve, and after two the scale is halved.
    optimizer = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(patience=2, factor=0.5))
    step, state = jax.jit(make_train_step(LINE, optimizer)), start(LINE, optimizer)
    scales = []
    for _ in range(5):
        state, _ = step(state, POINTS)
        scales.append(float(optax.tree.get(state.opt_state, "scale")))
    assert scales == [1.0, 1.0, 0.5, 0.5, 0.25]


# Evaluation.


def test_evaluation_uses_averaged_parameters() -> None:
    # One step leads from 1 to 1.6 as above; from there errors -1.4, -0.8 have the slope -1.4 - 1.6 = -3, to 1.9.
    # Weighted 1/2 and 1: (0.8 + 1.9) / 1.5 = 1.8, where the errors are -1.2 and -0.4: squares 1.44 + 0.16.
    optimizer = optim.with_ema(optax.sgd(0.1), 0.5)
    step, state = make_train_step(LINE, optimizer), start(LINE, optimizer)
    for _ in range(2):
        state, _ = step(state, POINTS)
    sums = make_evaluate_step(LINE)(state, POINTS)
    assert float(state.params["w"]) == pytest.approx(1.9, rel=1e-6)
    expected = {"loss": 1.6, "mean_absolute_error": 1.6, "count": 2.0}
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(expected, rel=1e-5)


# Dropout.


def test_dropout_depends_on_key_and_step_and_is_off_in_evaluation() -> None:
    task, plain = tasks.classification(MLP((32, 3), dropout=0.5)), tasks.classification(MLP((32, 3)))
    state = start(task, optax.sgd(0.0), EXAMPLES)
    step = jax.jit(make_train_step(task, optax.sgd(0.0)))

    def loss_at(number: int, seed: int) -> float:
        return float(step(state._replace(step=np.int32(number), key=jax.random.key(seed)), EXAMPLES)[1]["loss"])

    losses = {(number, seed): loss_at(number, seed) for number in (0, 1, 2) for seed in (0, 1)}
    assert len(set(losses.values())) == 6
    assert all(loss_at(*place) == loss for place, loss in losses.items())
    assert make_evaluate_step(task)(state, EXAMPLES)["loss"] == make_evaluate_step(plain)(state, EXAMPLES)["loss"]


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        ("vmap", optax.adam(0.1)),
        ("shard_map", optax.adam(0.1)),
        pytest.param("pmap", optax.adam(0.1), marks=pytest.mark.slow),
        pytest.param("shard_map unchecked", optax.adam(0.1), marks=pytest.mark.slow),
        # Its line search evaluates the loss again.
        pytest.param("shard_map", optax.lbfgs(), marks=pytest.mark.slow),
    ],
)
def test_devices_that_share_a_batch_step_as_one_does(way: str, optimizer: optax.GradientTransformation) -> None:
    task = tasks.classification(MLP((4, 3), dropout=0.5))
    rng = np.random.default_rng(0)
    # Five of eight examples count: on the devices two, two, one and none.
    mask = (np.arange(8) < 5).astype(np.float32)
    batch = Batch(rng.normal(size=(8, 5)).astype(np.float32), rng.integers(0, 3, 8), mask)
    state = jax.jit(lambda: start(task, optimizer, batch))()
    expected = jax.jit(make_train_step(task, optimizer))(state, batch)
    step = make_train_step(averaged_over(task, "data"), optimizer)
    parts = jax.tree.map(lambda rows: rows.reshape(4, 2, *rows.shape[1:]), batch)
    if way in ("pmap", "vmap"):
        mapped = {"pmap": jax.pmap, "vmap": jax.vmap}[way](step, axis_name="data", in_axes=(None, 0))
        got = jax.tree.map(lambda leaf: leaf[0], (jax.jit(mapped) if way == "vmap" else mapped)(state, parts))
    else:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
        got = jax.jit(jax.shard_map(step, mesh=mesh, **specs, check_vma=way == "shard_map"))(state, batch)
    assert_near(got, expected, 1e-5)
