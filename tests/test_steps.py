"""Steps: an update by hand, a state of arrays alone, and any Optax optimizer as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxnn import optim, tasks
from jaxnn.models import MLP
from jaxnn.steps import init_train_state, make_evaluate_step, make_train_step
from jaxnn.types import Batch, Metrics, Task, TrainState

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
    "clipped, accumulated, averaged": lambda: optim.averaged(
        optim.accumulated(optim.clipped(optax.adam(0.1), 1.0), 2), 0.9
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
    optimizer = optim.averaged(optax.sgd(0.1), 0.5)
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
    batch = Batch(rng.normal(size=(8, 5)).astype(np.float32), rng.integers(0, 3, 8), np.ones(8, np.float32))
    state = init_train_state(task, optimizer, jax.random.key(0), batch)
    expected = jax.jit(make_train_step(task, optimizer))(state, batch)
    step = make_train_step(task, optimizer, axis_name="data")
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
