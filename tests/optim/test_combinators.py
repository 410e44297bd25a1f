"""Clipping, accumulation and averages: numbers by hand, any nesting, and averages found in any state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxnn import optim

SGD = optax.sgd(1.0)
WRAPPERS: dict[str, Callable] = {
    "clipping": lambda inner: optim.with_clipping(inner, 1.0),
    "accumulation": lambda inner: optim.with_accumulation(inner, 2),
    "ema": lambda inner: optim.with_ema(inner, 0.5),
    "norms": optim.with_norms,
}


def train(optimizer: optax.GradientTransformation, params: Any, gradients: Any) -> tuple[Any, Any]:
    """The parameters and the state after an update for each of the stacked gradients."""

    def step(carry: Any, gradient: Any) -> tuple[Any, None]:
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[0]


def test_clipping_by_hand():
    def clipped(max_norm: Any, gradient: Any) -> Any:
        optimizer = optim.with_clipping(SGD, max_norm)
        return optimizer.update(gradient, optimizer.init(gradient), gradient)[0]

    # In float16 the squares overflow, but the norm, 500, is computed in float32.
    large = [np.array([300.0, 400.0], dtype) for dtype in ("float32", jnp.bfloat16, "float16")]
    small, norms = [np.float32([0.3, -0.1234567]), np.zeros(2, np.float32)], (1.0, 5.0, np.inf)
    tree, within, nan, traced = jax.jit(
        lambda: (
            clipped(1.0, {"a": jnp.array([3.0, 0.0]), "b": jnp.float32(4.0)}),
            [[clipped(max_norm, gradient) for gradient in small] for max_norm in norms],
            [clipped(max_norm, jnp.array([np.nan, 1.0])) for max_norm in norms],
            [jax.vmap(clipped, (0, None))(jnp.array([250.0, 1000.0]), gradient) for gradient in large],
        )
    )()
    # The norm over all leaves, of (3, 0) and 4, is 5: each is divided by it, then subtracted.
    np.testing.assert_allclose(tree["a"], [-0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(tree["b"], -0.8, rtol=1e-6)
    # Gradients within the norm are unchanged, and a NaN is not hidden.
    assert all(np.array_equal(each, [-gradient for gradient in small]) for each in within)
    assert np.isnan([each[0] for each in nan]).all()
    for each, gradient in zip(traced, large, strict=True):
        assert each.dtype == gradient.dtype
        np.testing.assert_array_equal(np.asarray(each, np.float32), [[-150.0, -200.0], [-300.0, -400.0]])


def test_accumulation_updates_once_in_num_steps_calls():
    rates = optax.piecewise_constant_schedule(1.0, {1: 10.0})  # 1 at update 0, 10 at update 1: updates count, not calls
    optimizer, got = optim.with_accumulation(optax.sgd(rates), 3), []
    update, state = jax.jit(optimizer.update), optimizer.init(jnp.float32(0.0))
    for gradient in (1.0, 2.0, 6.0, 5.0, 5.0, 5.0):
        step, state = update(jnp.float32(gradient), state, jnp.float32(0.0))
        got.append(float(step))
    # The means of 1, 2, 6 and of 5, 5, 5, at the third call of each.
    np.testing.assert_allclose(got, [0, 0, -3, 0, 0, -50], rtol=1e-6)
    assert optim.with_accumulation(SGD, 1) is SGD


# Averages. SGD at rate 1 with these gradients leads from 10 to 8, 4 and 5.

GRADIENTS = np.float32([2.0, 4.0, -1.0])


def average(optimizer: optax.GradientTransformation, gradients: np.ndarray = GRADIENTS, start: float = 10.0) -> Any:
    return optim.evaluation_params(*train(optimizer, {"w": jnp.float32(start)}, {"w": gradients}))["w"]


def test_averages_by_hand():
    expected = {
        # 8, 4, 5 weigh 1/4, 1/2, 1, over 7/4: (2 + 2 + 5) / 1.75; from 10: (10 + 8)/2 = 9, (9 + 4)/2 = 6.5, 11.5/2.
        (0.5, True): 9 / 1.75,
        (0.5, False): 5.75,
        # 0 keeps the last; 1 is the plain mean (8 + 4 + 5)/3, or without debiasing the start.
        (0.0, True): 5.0,
        (1.0, True): 17 / 3,
        (1.0, False): 10.0,
    }
    got, traced = jax.jit(
        lambda decays: (
            [average(optim.with_ema(SGD, decay, debias=debias)) for decay, debias in expected],
            jax.vmap(lambda decay: average(optim.with_ema(SGD, decay)))(decays),
        )
    )(np.float32([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(got, [*expected.values()], rtol=1e-6)
    np.testing.assert_allclose(traced, [5.0, 9 / 1.75, 17 / 3], rtol=1e-6)


def test_state_of_an_average():
    params = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}
    optimizer = optim.with_ema(optax.adam(0.1), 0.999)
    before = optimizer.init(params)
    typeof = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)  # noqa: E731
    types = typeof(before)
    # Before the first update the average is the start; without an average the parameters are.
    assert np.array_equal(optim.evaluation_params(params, before)["w"], [1.0, 1.0])
    assert optim.evaluation_params(params, before.inner) is params
    # The average is a copy: parameters and state may be donated together.
    step = jax.jit(lambda params, state: optimizer.update(params, state, params), donate_argnums=(0, 1))
    updates, after = step(params, before)
    # Averaged in float32, with types that do not change: nothing recompiles.
    assert after.average["w"].dtype == jnp.float32 and types == typeof(after)
    assert optim.evaluation_params(updates, after)["w"].dtype == jnp.bfloat16


# Each of these keeps the average of 8, 4, 5 with weights 1/4, 1/2, 1.
PLACES: dict[str, Callable] = {
    "MultiSteps": lambda averaged: optax.MultiSteps(averaged, 1).gradient_transformation(),
    "injected": lambda averaged: optax.inject_hyperparams(lambda unused: averaged)(unused=0.0),
    "apply_if_finite": lambda averaged: optax.apply_if_finite(averaged, 3),
    "a chain in a chain": lambda averaged: optax.chain(optax.clip(1e9), optax.chain(averaged, optax.identity())),
    "another average": lambda averaged: optim.with_ema(optim.with_ema(SGD, 0.0), 0.5),
    "masked": lambda averaged: optax.masked(averaged, {"w": True}),
}


def test_average_is_found_in_any_state():
    got = jax.jit(lambda: {place: average(put(optim.with_ema(SGD, 0.5))) for place, put in PLACES.items()})()
    assert {place: float(value) for place, value in got.items()} == pytest.approx(dict.fromkeys(PLACES, 9 / 1.75))


def test_averages_of_accumulated_updates_and_of_parts():
    # SGD on the mean of each two gradients: from 0 to -1 (of 1, 1), to -4 (of 2, 4).
    gradients = np.float32([1.0, 1.0, 2.0, 4.0])
    parts = {"a": optim.with_ema(SGD, 0.5), "b": optim.with_ema(optax.sgd(0.5), 0.0), "c": SGD}
    partition = optax.partition(parts, {name: name for name in parts})
    within, around, split = jax.jit(
        lambda: (
            average(optim.with_accumulation(optim.with_ema(SGD, 0.5), 2), gradients, 0.0),
            average(optim.with_ema(optim.with_accumulation(SGD, 2), 0.5), gradients, 0.0),
            optim.evaluation_params(
                *train(partition, dict.fromkeys("abc", jnp.float32(10.0)), dict.fromkeys("abc", GRADIENTS))
            ),
        )
    )()
    # Within: (-1/2 - 4)/1.5. Around, of 0, -1, -1, -4 at 1/8, 1/4, 1/2, 1: (-1/4 - 1/2 - 4)/1.875.
    np.testing.assert_allclose([within, around], [-4.5 / 1.5, -4.75 / 1.875], rtol=1e-6)
    # a: as above; b: at half the rate, 10 - 5/2 last; c: the parameter itself.
    np.testing.assert_allclose([split[name] for name in "abc"], [9 / 1.75, 7.5, 5.0], rtol=1e-6)


# All of them.


# Each pair in both orders.
@pytest.mark.parametrize("order", [(*WRAPPERS,), (*reversed(WRAPPERS),)])
def test_any_order_gives_the_same_from_a_loop_and_a_vmapped_scan(order):
    draws = np.random.default_rng(2)
    gradients, start = (draws.normal(size=shape).astype(np.float32) for shape in ((6, 3), (3,)))

    def nested(rate: Any) -> optax.GradientTransformation:
        optimizer = optax.adam(rate)
        for name in order:
            optimizer = WRAPPERS[name](optimizer)
        return optimizer

    def scanned(rate: jax.Array) -> Any:
        carry = train(nested(rate), start, gradients)
        return carry[0], optim.evaluation_params(*carry)

    params, averages = jax.jit(jax.vmap(scanned))(np.float32([0.1, 0.3]))
    optimizer = nested(0.1)
    expected, state, update = start, optimizer.init(start), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, expected)
        expected = np.asarray(expected) + np.asarray(updates)
    np.testing.assert_allclose(params[0], expected, rtol=1e-5)
    # The average lags behind.
    assert not np.allclose(params, averages, rtol=1e-3)


def test_extra_arguments_reach_an_optimizer_that_takes_them():
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), updates), state

    def second_update(wrap: str, inner: optax.GradientTransformation) -> Any:
        # Through a chain too, which asks whether its links take extra arguments.
        optimizer, got = optax.chain(WRAPPERS[wrap](inner)), jnp.float32(0.0)
        state = optimizer.init(got)
        for _ in range(2):
            got, state = optimizer.update(jnp.float32(0.5), state, jnp.float32(0.0), value=7.0)
        return got

    takes_value = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    got = jax.jit(
        lambda: [[second_update(wrap, each) for each in (takes_value, optax.scale(-1.0))] for wrap in WRAPPERS]
    )()
    assert np.array_equal(got, [[7.0, -0.5]] * len(WRAPPERS))
