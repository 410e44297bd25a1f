"""Dropout: the right share, the mean kept, and a traced rate the same as a plain one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.nn import Dropout
from jaxnn.types import ConfigError

KEY = jax.random.key(0)
ONES = jnp.ones((100, 200))


def drop(rate: float | jax.Array, x: jax.Array = ONES, key: jax.Array = KEY) -> jax.Array:
    return Dropout(rate).apply({}, x, train=True, rngs={"dropout": key})


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_the_share_dropped_is_the_rate(rate: float) -> None:
    dropped = int(jnp.sum(drop(rate) == 0.0))
    # Binomial over 20,000 elements: five standard deviations on either side.
    assert abs(dropped - ONES.size * rate) < 5 * (ONES.size * rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(rate: float) -> None:
    x = jax.random.uniform(jax.random.key(1), ONES.shape)
    y = drop(rate, x)
    np.testing.assert_allclose(y[y != 0], x[y != 0] / (1 - rate), rtol=1e-6)
    # An element's variance is at most rate / (1 - rate): five deviations of the mean of 20,000.
    assert abs(float(y.mean() - x.mean())) < 5 * (rate / (1 - rate) / x.size) ** 0.5


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_a_traced_rate_equals_a_plain_one(rate: float) -> None:
    assert np.array_equal(jax.jit(drop)(rate), drop(rate))


def test_rates_may_be_vmapped() -> None:
    rates = jnp.array([0.0, 0.2, 0.7, 1.0])
    expected = [drop(float(rate)) for rate in rates]
    np.testing.assert_allclose(jax.vmap(drop)(rates), jnp.stack(expected), rtol=1e-6)


def test_higher_rates_drop_what_lower_rates_drop_and_more() -> None:
    few, many = drop(0.2) == 0, drop(0.6) == 0
    assert bool(jnp.all(few <= many))


def test_no_key_where_there_is_nothing_to_draw() -> None:
    assert Dropout(0.0).apply({}, ONES, train=True) is ONES
    assert Dropout(0.5).apply({}, ONES, train=False) is ONES
    traced = jax.jit(lambda rate: Dropout(rate).apply({}, ONES, train=False))
    assert np.array_equal(traced(0.5), ONES)


@pytest.mark.parametrize("traced", [False, True])
def test_rate_one_gives_zeros_and_no_nan(traced: bool) -> None:
    def loss(x: jax.Array, rate: float | jax.Array) -> jax.Array:
        return drop(rate, x).sum()

    call = jax.jit(jax.value_and_grad(loss)) if traced else jax.value_and_grad(loss)
    value, gradient = call(jnp.array([0.0, 1.0, -jnp.inf]), 1.0)
    assert float(value) == 0.0
    assert np.array_equal(gradient, [0.0, 0.0, 0.0])


def test_the_gradient_is_zero_where_dropped_and_the_scale_elsewhere() -> None:
    gradient = jax.grad(lambda x: drop(0.25, x).sum())(ONES)
    expected = jnp.where(drop(0.25) == 0.0, 0.0, 1 / 0.75)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_and_shape_are_kept(dtype: str) -> None:
    x = ONES.astype(dtype)
    for rate in (0.4, jnp.float32(0.4)):
        y = drop(rate, x)
        assert (y.dtype, y.shape) == (x.dtype, x.shape)


def test_keys_give_masks_and_the_same_key_the_same_mask() -> None:
    assert np.array_equal(drop(0.5), drop(0.5))
    assert not np.array_equal(drop(0.5), drop(0.5, key=jax.random.key(1)))


def test_the_collection_of_the_key_may_be_named() -> None:
    layer = Dropout(0.5, rng_collection="noise")
    assert not np.array_equal(layer.apply({}, ONES, train=True, rngs={"noise": KEY}), ONES)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_probability_is_named(rate: float) -> None:
    with pytest.raises(ConfigError, match="a dropout rate is a probability, 0…1, not"):
        Dropout(rate)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="pass rngs={'dropout': key}"):
        Dropout(0.5).apply({}, ONES, train=True)
