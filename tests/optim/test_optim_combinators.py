"""Clipping and accumulation: numbers by hand, equality with one large batch, any nesting."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxnn import optim
from jaxnn.types import ConfigError

ORDERS = list(itertools.permutations(["clipped", "accumulated", "averaged"]))


def run(optimizer: optax.GradientTransformation, params: Any, gradients: list[Any]) -> Any:
    """The parameters after one update for each of the gradients."""
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def nested(order: tuple[str, ...], optimizer: optax.GradientTransformation) -> Any:
    wrap: dict[str, Callable] = {
        "clipped": lambda inner: optim.with_clipping(inner, 1.0),
        "accumulated": lambda inner: optim.with_accumulation(inner, 2),
        "averaged": lambda inner: optim.with_ema(inner, 0.5),
    }
    for name in order:
        optimizer = wrap[name](optimizer)
    return optimizer


def test_clipping_by_hand() -> None:
    # The norm over all leaves, of (3, 0) and 4, is 5: each is divided by it, then subtracted.
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
    params = jax.tree.map(jnp.zeros_like, gradient)
    got = run(optim.with_clipping(optax.sgd(1.0), 1.0), params, [gradient])
    np.testing.assert_allclose(got["a"], [-0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(got["b"], -0.8, rtol=1e-6)


def test_gradients_within_the_norm_are_untouched() -> None:
    gradient = jnp.array([0.3, -0.1234567])
    got = run(optim.with_clipping(optax.sgd(1.0), 5.0), jnp.zeros(2), [gradient])
    assert np.array_equal(got, -gradient)
    assert np.array_equal(run(optim.with_clipping(optax.sgd(1.0), jnp.inf), jnp.zeros(2), [gradient]), got)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_may_be_traced(dtype: str) -> None:
    def step(max_norm: jax.Array) -> jax.Array:
        optimizer, params = optim.with_clipping(optax.sgd(1.0), max_norm), jnp.zeros(2, dtype)
        return optimizer.update(jnp.array([3.0, 4.0], dtype), optimizer.init(params), params)[0]

    got = jax.jit(jax.vmap(step))(jnp.array([2.5, 10.0]))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), [[-1.5, -2.0], [-3.0, -4.0]])


def test_zero_gradients_stay_zero_and_a_nan_is_not_hidden() -> None:
    optimizer = optim.with_clipping(optax.sgd(1.0), 1.0)
    assert np.array_equal(run(optimizer, jnp.zeros(2), [jnp.zeros(2)]), [0.0, 0.0])
    assert np.isnan(run(optimizer, jnp.zeros(2), [jnp.array([jnp.nan, 1.0])])).all()


@pytest.mark.parametrize("make", [optax.sgd, optax.adam, optax.adamw])
def test_four_micro_batches_equal_one_batch(make: Callable) -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    inputs, targets = jax.random.normal(keys[0], (2, 32, 5)), jax.random.normal(keys[1], (2, 32))
    params = {"w": jax.random.normal(keys[2], (5,)), "b": jnp.zeros(())}

    @jax.jit
    @jax.grad
    def gradient(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2)

    def train(optimizer: Any, batch_size: int) -> Any:
        state, trained, update = optimizer.init(params), params, jax.jit(optimizer.update)
        batches = [array.reshape(-1, batch_size, *array.shape[2:]) for array in (inputs, targets)]
        for batch in zip(*batches, strict=True):
            updates, state = update(gradient(trained, *batch), state, trained)
            trained = optax.apply_updates(trained, updates)
        return trained

    got, expected = train(optim.with_accumulation(make(0.1), 4), 8), train(make(0.1), 32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)


def test_updates_between_are_zero() -> None:
    optimizer = optim.with_accumulation(optax.sgd(1.0), 3)
    state = optimizer.init(jnp.float32(0.0))
    got = []
    for gradient in (1.0, 2.0, 6.0, 5.0, 5.0, 5.0):
        update, state = optimizer.update(jnp.float32(gradient), state, jnp.float32(0.0))
        got.append(float(update))
    # The means of 1, 2, 6 and of 5, 5, 5, at the third call of each.
    np.testing.assert_allclose(got, [0, 0, -3, 0, 0, -5], rtol=1e-6)


def test_a_schedule_within_counts_updates() -> None:
    rates = optax.piecewise_constant_schedule(1.0, {1: 10.0})  # 1 at update 0, 10 at update 1
    got = run(optim.with_accumulation(optax.sgd(rates), 2), jnp.float32(0.0), [jnp.float32(-1.0)] * 4)
    assert float(got) == 11.0


def test_one_micro_batch_is_the_optimizer_itself() -> None:
    optimizer = optax.adam(0.1)
    assert optim.with_accumulation(optimizer, 1) is optimizer


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_gives_the_same_from_a_loop_jit_scan_and_vmap(order: tuple[str, ...]) -> None:
    keys = jax.random.split(jax.random.key(2), 2)
    gradients, start = jax.random.normal(keys[0], (6, 3)), jax.random.normal(keys[1], (3,))

    def scanned(rate: jax.Array) -> tuple[jax.Array, jax.Array]:
        optimizer = nested(order, optax.adam(rate))

        def step(carry: Any, gradient: jax.Array) -> tuple[Any, None]:
            params, state = carry
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry, _ = jax.lax.scan(step, (start, optimizer.init(start)), gradients)
        return carry[0], optim.evaluation_params(*carry)

    params, average = jax.jit(jax.vmap(scanned))(jnp.array([0.1, 0.3]))
    for member, rate in enumerate((0.1, 0.3)):
        expected = run(nested(order, optax.adam(rate)), start, list(gradients))
        np.testing.assert_allclose(params[member], expected, rtol=1e-5)
    # Somewhere in each of the orders there is an average, and it lags behind.
    assert not np.allclose(params, average, rtol=1e-3)


@pytest.mark.parametrize("wrap", ["clipped", "accumulated", "averaged"])
def test_extra_arguments_reach_the_optimizer(wrap: str) -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), updates), state

    listening = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    # Through a chain too, which asks whether its links take extra arguments.
    optimizer = optax.chain(nested((wrap,), listening))
    state = optimizer.init(jnp.float32(0.0))
    got = 0.0
    for _ in range(2):
        got, state = optimizer.update(jnp.float32(0.5), state, jnp.float32(0.0), value=7.0)
    assert float(got) == 7.0


@pytest.mark.parametrize("wrap", ["clipped", "accumulated", "averaged"])
def test_extra_arguments_pass_an_optimizer_that_has_none(wrap: str) -> None:
    optimizer = nested((wrap,), optax.scale(-1.0))
    state = optimizer.init(jnp.float32(0.0))
    optimizer.update(jnp.float32(0.5), state, jnp.float32(0.0), value=7.0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: optim.with_clipping(optax.sgd(1.0), 0.0), "with_clipping: max_norm must be a number > 0"),
        (lambda: optim.with_clipping(optax.sgd(1.0), float("nan")), "max_norm must be a number > 0"),
        (lambda: optim.with_accumulation(optax.sgd(1.0), 0), "num_steps must be an integer >= 1, not 0"),
        (lambda: optim.with_accumulation(optax.sgd(1.0), 2.0), "num_steps must be an integer >= 1"),
    ],
)
def test_a_bad_argument_is_named(make: Callable, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()
