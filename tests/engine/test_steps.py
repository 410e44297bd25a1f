"""Steps: an update by hand, a state of arrays alone, and any Optax optimizer as it comes."""

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
from jaxnn.types import Batch, ConfigError, Metrics, Task, TrainState
from tests import tiny

KEY = jax.random.key(0)
# y = w x from w = 1: at x = 1, 2 and y = 3, 4 the errors are -2, -2.
LINE = tasks.regression((lambda key, inputs: {"w": jnp.ones(())}, lambda params, inputs: params["w"] * inputs))
POINTS = Batch(np.array([1, 2], np.float32), np.array([3, 4], np.float32), np.ones(2, np.float32))


def start(task: Task, optimizer: optax.GradientTransformation, batch: Batch = POINTS) -> TrainState:
    return init_train_state(task, optimizer, KEY, batch)


def test_a_step_of_gradient_descent_by_hand() -> None:
    # d/dw is the mean of 2 (-2) 1 and 2 (-2) 2: -6; w becomes 1 + 0.1 * 6.
    state, metrics = make_train_step(LINE, optax.sgd(0.1))(start(LINE, optax.sgd(0.1)), POINTS)
    assert float(state.params["w"]) == pytest.approx(1.6, rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == {"loss": 4.0, "mean_absolute_error": 2.0}


def test_a_masked_example_does_not_pull() -> None:
    # Only x = 1 counts: d/dw is 2 (-2) 1 = -4, w becomes 1.4.
    batch = POINTS._replace(mask=np.array([1, 0], np.float32))
    state, _ = make_train_step(LINE, optax.sgd(0.1))(start(LINE, optax.sgd(0.1)), batch)
    assert float(state.params["w"]) == pytest.approx(1.4, rel=1e-6)


def test_the_step_counts_and_the_key_stays() -> None:
    step = make_train_step(LINE, optax.sgd(0.1))
    states = [start(LINE, optax.sgd(0.1))]
    for _ in range(3):
        states.append(step(states[-1], POINTS)[0])
    assert [int(state.step) for state in states] == [0, 1, 2, 3]
    assert {state.step.dtype.name for state in states} == {"int32"}
    keys = [jax.random.key_data(state.key).tolist() for state in states]
    assert keys == keys[:1] * 4


def test_initialisation_and_steps_draw_from_different_keys() -> None:
    task = tasks.regression((lambda key, inputs: jax.random.key_data(key), lambda params, inputs: inputs))
    state = start(task, optax.identity())
    drawn = [state.params, jax.random.key_data(state.key), jax.random.key_data(KEY)]
    assert len({words.tobytes() for words in map(np.asarray, drawn)}) == 3


def test_a_batch_whose_parts_differ_in_length_is_refused() -> None:
    step, state = make_train_step(LINE, optax.sgd(0.1)), start(LINE, optax.sgd(0.1))
    for mask in (np.ones(3, np.float32), np.ones((2, 1), np.float32)):
        with pytest.raises(AssertionError):
            step(state, POINTS._replace(mask=mask))
        with pytest.raises(AssertionError):
            make_evaluate_step(LINE)(state, POINTS._replace(mask=mask))


class Normed(linen.Module):
    """Two layers with batch statistics between them."""

    implementation: str | None = None
    flax: bool = False

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.Dense(4, use_bias=False)(x)
        if self.flax:
            counts = nn.batch_mask()
            mask = None if counts is None else counts[:, None, None]
            x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(x, mask=mask)
        else:
            x = nn.BatchNorm(not train, momentum=0.5, implementation=self.implementation)(x)
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
    """A state, and what a step with five rows makes of it."""
    task, whole = tasks.classification(Normed()), row_batches()[0]
    state = jax.jit(lambda: start(task, optax.sgd(0.1), whole))()
    return state, jax.jit(make_train_step(task, optax.sgd(0.1)))(state, whole)


@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(Normed("custom_vjp"), "jit", id="custom_vjp"),
        pytest.param(Normed("xla"), "jit", id="xla"),
        pytest.param(Normed(flax=True), "jit", id="Flax's"),
        pytest.param(Normed("custom_vjp"), "bfloat16", id="bfloat16"),
        pytest.param(Normed(), "sharded", id="sharded"),
        pytest.param(Normed(), "pmap", id="pmap"),
        pytest.param(Normed(), "members", id="members"),
    ],
)
def test_padding_counts_in_no_batch_statistics(model: Normed, way: str) -> None:
    task = tasks.classification(model, policy=Policy(compute="bfloat16") if way == "bfloat16" else None)
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


def test_a_batch_of_padding_alone_changes_nothing() -> None:
    task, padded, (state, _) = tasks.classification(Normed()), row_batches()[1], rows_alone()
    padding = padded._replace(mask=np.zeros(8, np.float32))
    after, metrics = jax.jit(make_train_step(task, optax.sgd(0.1)))(state, padding)
    assert_near((after.params, after.model_state), (state.params, state.model_state), 0)
    assert float(metrics["loss"]) == 0


def test_rows_that_cannot_be_matched_with_the_mask_are_named() -> None:
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
    # Of a mask that is known to be all ones while tracing nothing is asked.
    jax.eval_shape(lambda state: step(state, whole), state)


@pytest.mark.parametrize("options", [{}, {"devices": 4, "strategy": "data"}, {"devices": 4, "strategy": "pmap"}])
def test_a_run_knows_that_its_batches_are_full(options: dict[str, Any]) -> None:
    seen: list[Any] = []

    def apply(params: Any, inputs: jax.Array, train: bool) -> jax.Array:
        if train:
            seen.append(nn.batch_mask())
        return tiny.apply(params, inputs)

    tiny.fit(tiny.experiment(model=(tiny.init, apply), num_steps=5), **options)
    assert seen and all(mask is None for mask in seen)


def test_tokens_are_averaged_over_the_whole_batch() -> None:
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
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.01),
    "lbfgs": lambda: optax.lbfgs(),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "partition": lambda: optax.partition({"weights": optax.adam(0.1), "biases": optax.sgd(0.1)}, labelled),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(learning_rate=0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "clipped, accumulated, averaged": lambda: optim.with_ema(
        optim.with_accumulation(optim.with_clipping(optax.adam(0.1), 1.0), 2), 0.9
    ),
}
NUM_STEPS = 6
CLASSES = tasks.classification(MLP((4, 3)))
EXAMPLES = Batch(
    np.asarray(jax.random.normal(KEY, (16, 5))), np.arange(16, dtype=np.int32) % 3, np.ones(16, np.float32)
)


def trained_by_hand(optimizer: optax.GradientTransformation) -> jax.Array:
    """The losses of a loop as Optax's own documentation writes it."""
    params, model_state = CLASSES.init(jax.random.split(KEY)[0], EXAMPLES)
    loss_fn = lambda params: CLASSES.loss(params, model_state, EXAMPLES, KEY)[0]  # noqa: E731
    optimizer = optax.with_extra_args_support(optimizer)

    def body(carry: Any, _: None) -> tuple[Any, jax.Array]:
        params, opt_state = carry
        value, grad = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grad, opt_state, params, value=value, grad=grad, value_fn=loss_fn)
        return (optax.apply_updates(params, updates), opt_state), value

    return jax.jit(lambda carry: jax.lax.scan(body, carry, length=NUM_STEPS))((params, optimizer.init(params)))[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_works_as_it_comes(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    step = make_train_step(CLASSES, optimizer)

    @jax.jit
    def train(state: TrainState) -> tuple[TrainState, Metrics]:
        return jax.lax.scan(lambda state, _: step(state, EXAMPLES), state, length=NUM_STEPS)

    before = start(CLASSES, optimizer, EXAMPLES)
    after, metrics = train(before)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((before, after)))
    # Nothing changes its type from step to step, so the state can be carried and donated.
    typeof = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)  # noqa: E731
    assert typeof(before) == typeof(after)
    np.testing.assert_allclose(metrics["loss"], trained_by_hand(optimizer), rtol=1e-5)
    assert metrics["loss"][-1] < metrics["loss"][0]


def test_a_plateau_reduces_the_rate() -> None:
    # Nothing is learnt at rate 0: from the second step on each fails to improve, and after two the scale is halved.
    optimizer = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(patience=2, factor=0.5))
    step, state = jax.jit(make_train_step(LINE, optimizer)), start(LINE, optimizer)
    scales = []
    for _ in range(5):
        state, _ = step(state, POINTS)
        scales.append(float(optax.tree.get(state.opt_state, "scale")))
    assert scales == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_lbfgs_solves_a_parabola_at_once() -> None:
    # The loss is (w - 3)² + (2 w - 4)², over 2: least at w = 11/5. Its line search needs the loss itself.
    optimizer = optax.lbfgs()
    step, state = jax.jit(make_train_step(LINE, optimizer)), start(LINE, optimizer)
    for _ in range(3):
        state, _ = step(state, POINTS)
    assert float(state.params["w"]) == pytest.approx(2.2, abs=1e-3)


# Evaluation.


def test_evaluation_uses_the_averaged_parameters() -> None:
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


@pytest.fixture(scope="module")
def dropping() -> Callable[[TrainState], float]:
    """The loss that one step sees of a network with dropout that never learns."""
    task = tasks.classification(MLP((32, 3), dropout=0.5))
    step = jax.jit(make_train_step(task, optax.sgd(0.0)))
    return lambda state: float(step(state, EXAMPLES)[1]["loss"])


def test_dropout_differs_by_step_and_agrees_for_equal_key_and_step(dropping: Callable[[TrainState], float]) -> None:
    state = start(tasks.classification(MLP((32, 3), dropout=0.5)), optax.sgd(0.0), EXAMPLES)
    at = lambda step, seed: dropping(state._replace(step=jnp.int32(step), key=jax.random.key(seed)))  # noqa: E731
    losses = {(step, seed): at(step, seed) for step in (0, 1, 2) for seed in (0, 1)}
    assert len(set(losses.values())) == 6
    assert all(at(step, seed) == loss for (step, seed), loss in losses.items())


def test_evaluation_drops_nothing() -> None:
    task, plain = tasks.classification(MLP((32, 3), dropout=0.5)), tasks.classification(MLP((32, 3)))
    state = start(task, optax.sgd(0.0), EXAMPLES)
    assert make_evaluate_step(task)(state, EXAMPLES)["loss"] == make_evaluate_step(plain)(state, EXAMPLES)["loss"]


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.adam(0.1), id="adam"),
        # Its line search asks for the value again.
        pytest.param(optax.lbfgs(), id="lbfgs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", ["pmap", "vmap", "shard_map", "shard_map unchecked"])
def test_devices_that_share_a_batch_step_as_one_does(way: str, optimizer: optax.GradientTransformation) -> None:
    task = tasks.classification(MLP((4, 3), dropout=0.5))
    rng = np.random.default_rng(0)
    # Five of eight examples count: on the devices two, two, one and none.
    mask = (np.arange(8) < 5).astype(np.float32)
    batch = Batch(rng.normal(size=(8, 5)).astype(np.float32), rng.integers(0, 3, 8), mask)
    state = init_train_state(task, optimizer, jax.random.key(0), batch)
    expected = jax.jit(make_train_step(task, optimizer))(state, batch)
    step = make_train_step(averaged_over(task, "data"), optimizer)
    parts = jax.tree.map(lambda rows: rows.reshape(4, 2, *rows.shape[1:]), batch)
    if way in ("pmap", "vmap"):
        mapped = {"pmap": jax.pmap, "vmap": jax.vmap}[way]
        got = jax.tree.map(lambda leaf: leaf[0], mapped(step, axis_name="data", in_axes=(None, 0))(state, parts))
    else:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
        got = jax.jit(jax.shard_map(step, mesh=mesh, **specs, check_vma=way == "shard_map"))(state, batch)
    for found, wanted in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        if not jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
