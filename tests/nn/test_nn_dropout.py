"""Dropout: the right share, the mean kept, and a traced rate the same as a plain one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxnn.nn import LSTM, Dropout, Stacked, batch_split_over
from jaxnn.nn._dense import _random_bits, _threefry
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
    # The rate is a multiple of 2^-16, and the scale is of the rate that is drawn: 0.1 is 6554 / 65536.
    drawn = round(rate * 2**16) / 2**16
    np.testing.assert_allclose(y[y != 0], x[y != 0] / (1 - drawn), rtol=1e-6)
    assert abs(drawn - rate) <= 2**-17
    # An element's variance is at most rate / (1 - rate): five deviations of the mean of 20,000.
    assert abs(float(y.mean() - x.mean())) < 5 * (rate / (1 - rate) / x.size) ** 0.5


def test_the_generator_is_that_of_jax_random() -> None:
    # JAX splits its counter in halves, one to a word of the blocks: here they are 0, 1, 2 and zeros.
    seed = jnp.array([0x13198A2E, 0x03707344], jnp.uint32)
    words = jnp.stack(_threefry(seed, jnp.arange(3, dtype=jnp.uint32)))
    expected = threefry_2x32(seed, jnp.array([0, 1, 2, 0, 0, 0], jnp.uint32))
    assert np.array_equal(words.ravel(), expected)


def test_bits_are_uniform_and_independent() -> None:
    bits = np.asarray(_random_bits(KEY, (64, 4096))).ravel()
    size = bits.size
    # Each of the 16 bits is a fair coin: five deviations of the mean of 262,144.
    coins = (bits[:, None] >> np.arange(16)) & 1
    assert np.abs(coins.mean(axis=0) - 0.5).max() < 5 * 0.5 / size**0.5
    # And so are any two of them, of one element or of neighbours in a block (1,024 apart), in a row or between rows.
    signs = 2.0 * coins - 1.0
    for other in (signs, *(np.roll(signs, distance, axis=0) for distance in (1, 1024, 2048, 4096))):
        products = signs.T @ other / size
        if other is signs:
            products -= np.eye(16)
        assert np.abs(products).max() < 5 / size**0.5
    # 256 equal bins: chi-squared of 255 degrees has deviation sqrt(510) = 22.6.
    counts = np.bincount(bits >> 8, minlength=256)
    assert abs(((counts - size / 256) ** 2).sum() / (size / 256) - 255) < 5 * 22.6


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 2), (2, 3, 7), (0, 4)])
def test_any_shape_is_dropped(shape: tuple[int, ...]) -> None:
    keys = jax.random.split(KEY, 200)
    masks = jax.vmap(lambda key: drop(0.5, jnp.ones(shape), key))(keys)
    assert masks.shape == (200, *shape)
    # Every element is dropped and kept for some keys; each has a share of one half: five deviations are 0.18.
    assert np.abs(np.asarray((masks == 0).mean(axis=0)) - 0.5).max(initial=0.0) < 0.18


def test_masks_are_the_same_in_vmap_and_scan() -> None:
    keys = jax.random.split(KEY, 3)
    x = ONES[:5, :7]
    alone = jnp.stack([drop(0.3, x, key) for key in keys])
    assert np.array_equal(jax.vmap(lambda key: drop(0.3, x, key))(keys), alone)
    assert np.array_equal(jax.lax.scan(lambda _, key: (None, drop(0.3, x, key)), None, keys)[1], alone)


def test_any_kind_of_key_will_do() -> None:
    dropped = drop(0.5, key=jax.random.key(0, impl="rbg")) == 0.0
    assert abs(float(dropped.mean()) - 0.5) < 0.02


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


def test_float64_is_scaled_in_float64() -> None:
    with jax.enable_x64(True):
        y = np.asarray(drop(0.1, jnp.ones((4, 8), jnp.float64)))
    assert y.dtype == np.float64
    np.testing.assert_allclose(y[y != 0], 1 / (1 - 6554 / 65536), rtol=1e-15)


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


def test_integers_are_refused() -> None:
    with pytest.raises(ConfigError, match="dropout needs floats, for what it keeps is scaled, not int32"):
        Dropout(0.5).apply({}, jnp.ones(3, jnp.int32), train=True, rngs={"dropout": jax.random.key(0)})


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_devices_that_share_a_batch_drop_what_one_that_holds_it_drops(batch_axis: int) -> None:
    layer, key = Dropout(0.5, batch_axis=batch_axis), {"dropout": jax.random.key(3)}
    x = jnp.ones((6, 4, 8))
    whole = layer.apply({}, x, train=True, rngs=key)

    def of_its_rows(rows: jax.Array) -> jax.Array:
        with batch_split_over("data"):
            return layer.apply({}, rows, train=True, rngs=key)

    parts = jnp.stack(jnp.split(x, 2, batch_axis))
    dropped = jax.vmap(of_its_rows, axis_name="data")(parts)
    np.testing.assert_array_equal(jnp.concatenate(list(dropped), batch_axis), whole)


def test_stacked_layers_drop_for_rows_of_a_batch_as_for_the_whole() -> None:
    stack = Stacked([LSTM(3), LSTM(3)], dropout=0.5)
    x, keys = jax.random.normal(jax.random.key(0), (4, 5, 2)), {"dropout": jax.random.key(3)}
    variables = stack.init(keys | {"params": jax.random.key(1)}, x)
    whole = stack.apply(variables, x, train=True, rngs=keys)

    def of_its_rows(rows: jax.Array) -> jax.Array:
        with batch_split_over("data"):
            return stack.apply(variables, rows, train=True, rngs=keys)

    parts = jax.vmap(of_its_rows, axis_name="data")(x.reshape(2, 2, 5, 2))
    np.testing.assert_allclose(parts.reshape(whole.shape), whole, rtol=1e-6)
