"""Dropout: masks and scales are exact, from the bits of JAX's generator; keys."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.extend.random import threefry_2x32

from jaxnn.nn import Dropout
from jaxnn.observe import Traced
from tests import draws, native

KEY = jax.random.key(0)
ONES = jnp.ones((5, 7))


def drop(rate: Any, x: jax.Array, key: jax.Array = KEY) -> jax.Array:
    return Dropout(rate).apply({}, x, train=True, rngs={"dropout": key})


class LayerKey(linen.Module):
    """Returns the key that Flax gives a layer."""

    @linen.compact
    def __call__(self) -> jax.Array:
        return self.make_rng("dropout")


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """16 bits for each element: quarters of the last axis are the halves of the two words of Threefry's blocks."""
    *leading, width = shape or (1,)
    blocks = (*leading, -(-width // 4))
    # JAX takes the first words of all blocks, then the second: here they are 0, 1, 2, … and zeros.
    counter = np.append(np.arange(math.prod(blocks)), np.zeros(math.prod(blocks))).astype(np.uint32)
    seed = jax.random.bits(LayerKey().apply({}, rngs={"dropout": key}), (2,), jnp.uint32)
    first, second = threefry_2x32(seed, counter).reshape(2, *blocks)
    halves = [half for word in (first, second) for half in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, -1)[..., :width].reshape(shape)


SHAPES = [((), "threefry2x32"), ((3,), "rbg"), ((5, 7), "threefry2x32"), ((2, 3, 4), "threefry2x32")]


def test_masks_and_scales_are_exact():
    @jax.jit
    def run(given: Any) -> Any:
        results = []
        for (shape, _), (key, x) in zip(SHAPES, given, strict=True):
            bits = random_bits(key, shape)
            # An element is kept up to the rate of its own bits, and dropped from the next one.
            thresholds = jnp.append(bits.ravel(), jnp.append(bits.ravel() + 1, jnp.array([0, 2**16], jnp.uint32)))
            outputs = jax.vmap(lambda rate, x=x, key=key: drop(rate, x, key))(thresholds / 2**16)
            results.append((x, bits, thresholds, outputs))
        # Rates are rounded: 0.1 is 6554 / 65536.
        constant = [drop(rate, x, key) for rate in (0.1, 0.3, 1.0)]
        results.append((x, bits, jnp.array([6554, 19661, 2**16]), jnp.stack(constant)))
        return results

    given = [(jax.random.key(1, impl=generator), draws.normal(0, *shape)) for shape, generator in SHAPES]
    for x, bits, thresholds, outputs in jax.tree.map(np.asarray, run(given)):
        for threshold, output in zip(thresholds, outputs, strict=True):
            kept = x / (1 - min(threshold, 2**16 - 1) / 2**16)
            np.testing.assert_allclose(output, np.where(bits < threshold, 0.0, kept), rtol=1e-6)
    assert jax.eval_shape(lambda: drop(0.5, jnp.ones((0, 4)))).shape == (0, 4)


def test_many_elements_are_drawn_from_the_same_bits():
    shapes = [(70, 61), (40_001,), (9, 5, 8, 16)]  # by the native kernel, if it is installed, also on two threads

    def run(key: jax.Array) -> Any:
        return [(drop(0.5, jnp.ones(shape), key), random_bits(key, shape)) for shape in shapes]

    keys = jax.random.split(KEY, 3)
    for outputs, bits in jax.jit(lambda key, keys: [*run(key), *jax.vmap(run)(keys)])(KEY, keys):
        np.testing.assert_array_equal(outputs, np.where(bits < 2**15, 0, 2))
    found = Traced(lambda key: drop(0.5, jnp.ones(shapes[0]), key), KEY).implementations
    assert found == {"dropout": ["native" if native.USED else "xla"]}


def test_float64_is_scaled_in_float64():
    with jax.enable_x64(True):
        y = np.asarray(jax.jit(drop)(0.1, np.ones((4, 8))))
    assert y.dtype == np.float64
    np.testing.assert_allclose(y[y != 0], 1 / (1 - 6554 / 65536), rtol=1e-15)


def test_identity_without_training_or_at_rate_0_needs_no_key():
    assert Dropout(0.0).apply({}, ONES, train=True) is ONES
    assert Dropout(0.5).apply({}, ONES, train=False) is ONES
    evaluate = jax.make_jaxpr(lambda rate: Dropout(rate).apply({}, ONES, train=False))(0.5)
    assert not evaluate.eqns


def test_rate_one_gives_zeros_and_no_nan_also_by_a_key_of_another_name():
    def named(rate: Any, x: jax.Array) -> jax.Array:
        return Dropout(rate, rng_collection="noise").apply({}, x, train=True, rngs={"noise": KEY}).sum()

    slope = jax.value_and_grad(named, 1)
    x = jnp.array([0.0, 1.0, -jnp.inf])
    for value, gradient in jax.jit(lambda x, rate: (slope(rate, x), slope(1.0, x)))(x, 1.0):
        assert float(value) == 0.0 and np.array_equal(gradient, [0.0, 0.0, 0.0])
