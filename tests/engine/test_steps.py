"""Steps: any Optax optimizer, padding, evaluation, dropout, and batches shared by devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, PartitionSpec

from jaxnn import nn, optim, tasks
from jaxnn.models import MLP
from jaxnn.nn import Policy
from jaxnn.steps import Totals, init_train_state, make_evaluate_step, make_train_step, scan_steps
from jaxnn.tasks import averaged_over
from jaxnn.types import Batch, ConfigError, Task, TrainState
from tests import tiny

KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
# y = w x from w = 1: at x = 1, 2 and y = 3, 4 the errors are -2, -2.
LINE = tasks.regression((lambda key, inputs: {"w": jnp.ones(())}, lambda params, inputs: params["w"] * inputs))
POINTS = Batch(np.array([1, 2], np.float32), np.array([3, 4], np.float32), np.ones(2, np.float32))


def start(task: Task, optimizer: optax.GradientTransformation, batch: Batch = POINTS) -> TrainState:
    return init_train_state(task, optimizer, KEY, batch)


def test_one_step_is_a_program_without_a_loop():
    step, state = make_train_step(LINE, SGD), start(LINE, SGD)
    zeros = dict.fromkeys(("loss", "mean_absolute_error"), np.float32(0))
    totals = Totals(zeros, zeros, np.int32(-1))

    def program(num_steps: int) -> str:
        rows = np.zeros((num_steps, 2), np.int32)
        return str(jax.make_jaxpr(lambda: scan_steps(step, state, totals, rows, lambda *_: POINTS))())

    assert "scan[" not in program(1) and "scan[" in program(2)


def test_long_sums_of_metrics_do_not_drift_and_stay_infinite():
    def step(state: Any, batch: Any) -> Any:
        return state._replace(step=state.step + 1), {"loss": jnp.float32(0.1), "rare": jnp.float32(np.inf)}

    zeros = dict.fromkeys(("loss", "rare"), np.float32(0))
    totals, rows = Totals(zeros, zeros, np.int32(-1)), np.zeros((10**6, 1), np.int8)
    run = jax.jit(lambda state: scan_steps(step, state, totals, rows, lambda *_: POINTS))
    (_, found) = run(start(LINE, SGD))
    assert float(found.sums["loss"]) == pytest.approx(1e5, rel=1e-7) and np.isinf(found.sums["rare"])


def test_step_is_counted_and_keys_stay_apart():
    noise = tasks.regression(
        (lambda key, inputs: {"w": jax.random.uniform(key)}, lambda params, inputs: params["w"] * inputs)
    )

    @jax.jit
    def compute() -> tuple[TrainState, TrainState]:
        state = start(noise, SGD)
        return state, make_train_step(noise, SGD)(state, POINTS)[0]

    state, after = compute()
    assert (int(state.step), int(after.step), after.step.dtype) == (0, 1, np.int32)
    np.testing.assert_array_equal(jax.random.key_data(after.key), jax.random.key_data(state.key))
    # Initialisation and steps draw from different keys, neither of them the given one.
    drawn = {float(jax.random.uniform(key)) for key in (KEY, state.key)} | {float(state.params["w"])}
    assert len(drawn) == 3


def test_batch_with_parts_of_different_lengths_is_refused():
    state = jax.eval_shape(lambda: start(LINE, SGD))
    for mask in (np.ones(3, np.float32), np.ones((2, 1), np.float32)):
        for step in (make_train_step(LINE, SGD), make_evaluate_step(LINE)):
            with pytest.raises(ConfigError, match=r"one length.* mask \[[23]"):
                jax.eval_shape(step, state, POINTS._replace(mask=mask))


class Normed(linen.Module):
    """Two layers with batch statistics and dropout between them."""

    flax: bool = False
    rate: float = 0.0

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.Dense(4, use_bias=False)(x)
        if self.flax:
            counts = nn.batch_mask()
            mask = None if counts is None else counts[:, None, None]
            x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(x, mask=mask)
        else:
            x = nn.BatchNorm(not train, momentum=0.5)(x)
        return linen.Dense(3)(nn.Dropout(self.rate)(linen.relu(x).mean(1), train=train))


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


@pytest.mark.slow
def test_padding_counts_in_no_batch_statistics():
    task, by_flax = tasks.classification(Normed()), tasks.classification(Normed(flax=True))
    narrow = tasks.classification(Normed(), policy=Policy(compute="bfloat16"))
    step = make_train_step(task, SGD)

    @jax.jit
    def compute(alone: Batch, padded: Batch) -> Any:
        state = start(task, SGD, alone)
        two = jax.tree.map(lambda rows: jnp.stack([rows, rows]), padded)
        found = {
            "padded": step(state, padded),
            "by Flax": make_train_step(by_flax, SGD)(state, padded),
            "narrow": make_train_step(narrow, SGD)(state, padded),
            "member": jax.tree.map(lambda leaf: leaf[1], jax.vmap(step, (None, 0))(state, two)),
        }
        return state, step(state, alone), found, step(state, padded._replace(mask=jnp.zeros(8)))

    state, expected, found, (after, metrics) = compute(*row_batches())
    for name, result in found.items():
        assert_near(result, expected, 2e-2 if name == "narrow" else 1e-5)
    # A batch of padding alone changes nothing.
    assert_near((after.params, after.model_state), (state.params, state.model_state), 0)
    assert float(metrics["loss"]) == 0


def test_normalized_rows_that_do_not_match_the_mask_are_named():
    class Merged(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
            normed = nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 3))
            return linen.Dense(3)(normed.reshape(x.shape).mean(1))

    task, (alone, padded) = tasks.classification(Merged()), row_batches()
    state, step = jax.eval_shape(lambda: start(task, SGD, alone)), make_train_step(task, SGD)
    with pytest.raises(ConfigError, match=r"16 rows.*batch of 8.*mask"):
        jax.eval_shape(step, state, padded)
    # With a mask known to be all ones while tracing, any rows will do.
    jax.eval_shape(lambda state: step(state, alone), state)


ADAM = optax.adam(0.1)


# As strategies compute it, and as it is checked by default; the line search of L-BFGS evaluates the loss again.
@pytest.mark.slow
@pytest.mark.parametrize(("is_checked", "optimizer"), [(True, ADAM), (False, ADAM), (True, optax.lbfgs())])
def test_devices_that_share_a_batch_step_as_one_does(is_checked, optimizer):
    task, batch = tasks.classification(Normed(rate=0.5)), row_batches()[1]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    step, shared = (make_train_step(one, optimizer) for one in (task, averaged_over(task, "data")))

    @jax.jit
    def compute() -> Any:
        state = start(task, optimizer, batch)
        return jax.shard_map(shared, mesh=mesh, **specs, check_vma=is_checked)(state, batch), step(state, batch)

    assert_near(*compute(), 1e-5)


SCHEDULED = optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.01)
PARTS = optax.partition({"weights": SCHEDULED, "biases": SGD}, {"kernel": "weights", "bias": "biases"})
OPTIMIZERS = {
    # Each step that does not halve the loss halves the rate.
    "reduce_on_plateau": optax.chain(PARTS, optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)),
    # It asks for values, gradients and the function itself.
    "line search": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)),
    "all combinators": optim.with_ema(optim.with_accumulation(optim.with_clipping(optax.adam(0.1), 1.0), 2), 0.9),
}
EXAMPLES = Batch(*tiny.points(16), np.ones(16, np.float32))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_trains_as_in_a_plain_loop(name):
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name])
    step = make_train_step(tiny.TASK, OPTIMIZERS[name])

    def loss_fn(params: Any) -> jax.Array:
        return tiny.TASK.loss(params, {}, EXAMPLES, KEY)[0]

    def body(carry: Any, _: None) -> Any:
        state, params, opt_state = carry
        state, metrics = step(state, EXAMPLES)
        # As Optax's own documentation writes it.
        value, grad = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grad, opt_state, params, value=value, grad=grad, value_fn=loss_fn)
        return (state, optax.apply_updates(params, updates), opt_state), (metrics["loss"], value)

    @jax.jit
    def train() -> Any:
        state = start(tiny.TASK, OPTIMIZERS[name], EXAMPLES)
        return jax.lax.scan(body, (state, state.params, optimizer.init(state.params)), length=6)

    (state, *_), (losses, expected) = train()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]


def test_dropout_depends_on_key_and_step_and_is_off_in_evaluation():
    task, plain = tasks.classification(MLP((8, 3), dropout=0.5)), tasks.classification(MLP((8, 3)))
    step = make_train_step(task, optax.sgd(0.0))
    places = np.array([(number, seed) for number in (0, 1, 2) for seed in (0, 1)] * 2, np.int32)

    @jax.jit
    def compute() -> Any:
        state = start(task, optax.sgd(0.0), EXAMPLES)

        def loss_at(place: jax.Array) -> jax.Array:
            moved = state._replace(step=place[0], key=jax.random.key(place[1]))
            return step(moved, EXAMPLES)[1]["loss"]

        evaluated = [make_evaluate_step(one)(state, EXAMPLES)["loss"] for one in (task, plain)]
        return jax.lax.map(loss_at, places), evaluated

    losses, (evaluated, expected) = jax.device_get(compute())
    assert len(set(losses.tolist())) == 6 and losses[:6].tolist() == losses[6:].tolist()
    assert evaluated == expected
