"""Dropout: the rate, the mean, the random bits, traced rates and keys, and the rows of a sharded batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxnn.nn import LSTM, Dropout, Stacked, use_batch_axis
from jaxnn.nn._dense import _random_bits, _threefry
from jaxnn.types import ConfigError
from tests import draws

KEY = jax.random.key(0)
ONES = jnp.ones((100, 200))
RATES = (0.0, 0.01, 0.1, 0.5, 0.75, 0.9, 0.999, 1.0)


def drop(rate: Any, x: jax.Array = ONES, key: jax.Array = KEY) -> jax.Array:
    return Dropout(rate).apply({}, x, train=True, rngs={"dropout": key})


def test_rates_are_exact_keep_the_mean_and_may_be_traced() -> None:
    x = draws.uniform(1, *ONES.shape)
    outputs, constant = jax.jit(
        lambda rates: (jax.vmap(lambda rate: drop(rate, x))(rates), {rate: drop(rate, x) for rate in (0.0, 0.1, 1.0)})
    )(jnp.array(RATES))
    by_rate = dict(zip(RATES, np.asarray(outputs), strict=True))
    for rate, expected in constant.items():
        np.testing.assert_allclose(by_rate[rate], expected, rtol=1e-6)
    x = np.asarray(x)
    for rate in RATES[1:-1]:
        y = by_rate[rate]
        # Binomial over 20,000 elements: five standard deviations on either side.
        assert abs(np.sum(y == 0) - x.size * rate) < 5 * (x.size * rate * (1 - rate)) ** 0.5
        # The rate is a multiple of 2^-16, and the scale is of the rate that is drawn: 0.1 is 6554 / 65536.
        drawn = round(rate * 2**16) / 2**16
        np.testing.assert_allclose(y[y != 0], x[y != 0] / (1 - drawn), rtol=1e-6)
        # An element's variance is at most rate / (1 - rate): five deviations of the mean of 20,000.
        assert abs(y.mean() - x.mean()) < 5 * (rate / (1 - rate) / x.size) ** 0.5
    for lower, higher in zip(RATES[:-1], RATES[1:], strict=True):
        assert np.all((by_rate[lower] == 0) <= (by_rate[higher] == 0))
    assert not by_rate[1.0].any()


def test_float64_is_scaled_in_float64() -> None:
    with jax.enable_x64(True):
        y = np.asarray(drop(0.1, jnp.ones((4, 8), jnp.float64)))
    assert y.dtype == np.float64
    np.testing.assert_allclose(y[y != 0], 1 / (1 - 6554 / 65536), rtol=1e-15)


def test_threefry_equals_jax() -> None:
    # JAX splits its counter in halves, one to a word of the blocks: here they are 0, 1, 2 and zeros.
    seed = jnp.array([0x13198A2E, 0x03707344], jnp.uint32)
    words = np.stack(jax.jit(_threefry)(seed, np.arange(3, dtype=np.uint32)))
    assert np.array_equal(words.ravel(), threefry_2x32(seed, np.array([0, 1, 2, 0, 0, 0], np.uint32)))


def test_bits_are_uniform_and_independent() -> None:
    bits = np.asarray(_random_bits(KEY, (64, 4096))).ravel()
    size = bits.size
    # Each of the 16 bits is a fair coin: five deviations of the mean of 262,144.
    coins = (bits[:, None] >> np.arange(16)) & 1
    assert np.abs(coins.mean(axis=0) - 0.5).max() < 5 * 0.5 / size**0.5
    # And so are any two of them, of one element or of neighbours in a block (1,024 apart), in a row or between rows.
    signs = (2.0 * coins - 1.0).astype(np.float32)
    for other in (signs, *(np.roll(signs, distance, axis=0) for distance in (1, 1024, 2048, 4096))):
        products = signs.T @ other / size
        if other is signs:
            products -= np.eye(16)
        assert np.abs(products).max() < 5 / size**0.5
    # 256 equal bins: chi-squared of 255 degrees has deviation sqrt(510) = 22.6.
    counts = np.bincount(bits >> 8, minlength=256)
    assert abs(((counts - size / 256) ** 2).sum() / (size / 256) - 255) < 5 * 22.6


def test_any_shape_and_any_kind_of_key() -> None:
    shapes = [(), (1,), (3,), (5, 2), (2, 3, 7), (0, 4)]
    run = jax.jit(jax.vmap(lambda key: [drop(0.5, jnp.ones(shape), key) for shape in shapes]))
    for shape, masks in zip(shapes, run(jax.random.split(KEY, 200)), strict=True):
        assert masks.shape == (200, *shape)
        # Every element is dropped with probability one half: five deviations of 200 draws are 0.18.
        assert np.abs((np.asarray(masks) == 0).mean(axis=0) - 0.5).max(initial=0.0) < 0.18
    dropped = np.asarray(jax.jit(lambda: drop(0.5, key=jax.random.key(0, impl="rbg")))()) == 0.0
    assert abs(dropped.mean() - 0.5) < 0.02


def test_masks_depend_on_the_key_alone_also_in_vmap_and_scan() -> None:
    keys = jax.random.split(KEY, 3)

    def masked(key: jax.Array) -> jax.Array:
        return drop(0.3, ONES[:5, :7], key)

    alone, again, mapped, (_, scanned) = jax.jit(
        lambda: (
            jnp.stack([masked(keys[k]) for k in range(3)]),
            masked(keys[0]),
            jax.vmap(masked)(keys),
            jax.lax.scan(lambda _, key: (None, masked(key)), None, keys),
        )
    )()
    assert np.array_equal(mapped, alone) and np.array_equal(scanned, alone) and np.array_equal(again, alone[0])
    assert not np.array_equal(alone[0], alone[1])


def test_identity_without_training_or_at_rate_0_needs_no_key() -> None:
    assert Dropout(0.0).apply({}, ONES, train=True) is ONES
    assert Dropout(0.5).apply({}, ONES, train=False) is ONES
    evaluate = jax.make_jaxpr(lambda rate: Dropout(rate).apply({}, ONES, train=False))(0.5)
    assert not evaluate.eqns


def test_rate_one_gives_zeros_and_no_nan() -> None:
    slope = jax.value_and_grad(lambda x, rate: drop(rate, x).sum())
    x = jnp.array([0.0, 1.0, -jnp.inf])
    for value, gradient in jax.jit(lambda x, rate: (slope(x, rate), slope(x, 1.0)))(x, 1.0):
        assert float(value) == 0.0 and np.array_equal(gradient, [0.0, 0.0, 0.0])


def test_errors_and_the_name_of_the_key() -> None:
    for rate in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="dropout rate .* 0…1"):
            Dropout(rate)
    with pytest.raises(ConfigError, match="rngs={'noise': key}"):
        Dropout(0.5, rng_collection="noise").apply({}, ONES, train=True)
    with pytest.raises(ConfigError, match="floats.* int32"):
        Dropout(0.5).apply({}, jnp.ones(3, jnp.int32), train=True, rngs={"dropout": KEY})
    named = jax.jit(lambda: Dropout(0.5, rng_collection="noise").apply({}, ONES, train=True, rngs={"noise": KEY}))()
    assert not np.array_equal(named, ONES)


def test_shards_of_a_batch_are_dropped_as_in_the_full_batch() -> None:
    keys, layer = {"dropout": jax.random.key(3)}, Stacked([LSTM(3), LSTM(3)], dropout=0.5)
    x, sequences = jnp.ones((6, 4, 8)), draws.normal(0, 4, 5, 2)
    variables = draws.variables(layer, sequences)

    def sharded(function: Any, x: jax.Array, axis: int) -> jax.Array:
        def of_its_rows(rows: jax.Array) -> jax.Array:
            with use_batch_axis("data"):
                return function(rows)

        parts = jax.vmap(of_its_rows, axis_name="data")(jnp.stack(jnp.split(x, 2, axis)))
        return jnp.concatenate(list(parts), axis)

    pairs = []
    for axis in (0, 1):
        dropout = Dropout(0.5, batch_axis=axis)
        pairs.append((lambda x, layer=dropout: layer.apply({}, x, train=True, rngs=keys), x, axis))
    pairs.append((lambda x: layer.apply(variables, x, train=True, rngs=keys), sequences, 0))
    run = jax.jit(lambda: [(sharded(*pair), pair[0](pair[1])) for pair in pairs])
    for found, expected in run():
        np.testing.assert_allclose(found, expected, rtol=1e-6)
