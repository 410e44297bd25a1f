"""Pooling: Flax's values and gradients, by whichever way they are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn import nn
from jaxnn.types import ConfigError
from tests import draws

PAIRS = [(nn.max_pool, linen.max_pool), (nn.avg_pool, linen.avg_pool)]

# shape, window, strides, padding
CASES = [
    ((2, 8, 8, 3), (2, 2), (2, 2), "VALID"),  # tiles
    ((2, 7, 9, 3), (2, 2), (2, 2), "VALID"),  # tiles and a remainder on both axes
    ((2, 8, 9, 3), (3, 2), (3, 2), "VALID"),  # tiles that are not square
    ((2, 11, 4), (3,), (3,), "VALID"),  # one spatial axis
    ((2, 5, 4, 6, 2), (2, 2, 3), (2, 2, 3), "VALID"),  # three
    ((5, 7, 3), (2, 2), (2, 2), "VALID"),  # no batch axis
    ((2, 3, 4, 6, 2), (2, 2), (2, 2), "VALID"),  # two batch axes
    ((2, 3, 4, 6, 2), (2, 2), (2, 1), "SAME"),
    ((2, 5, 5, 3), (2, 2), None, "VALID"),  # Flax's default strides, 1
    ((2, 5, 5, 3), (1, 1), None, "VALID"),
    ((2, 7, 7, 3), (3, 3), (2, 2), "VALID"),  # windows that overlap
    ((2, 7, 7, 3), (2, 2), (3, 3), "VALID"),  # gaps between windows
    ((2, 7, 7, 3), (2, 2), (2, 2), "SAME"),
    ((2, 7, 7, 3), (2, 2), (2, 2), "same_lower"),
    ((2, 7, 7, 3), (2, 2), (2, 2), ((1, 0), (0, 1))),
    ((2, 7, 7, 3), (2, 2), (2, 2), ((0, 0), (0, 0))),
    ((2, 7, 7, 3), (3, 3), (2, 2), ((1, 0), (0, 1))),
    ((2, 9, 8, 3), (3, 2), (1, 3), "SAME"),  # overlapping along one axis, gaps along the other
    ((2, 7, 5, 6, 3), (3, 2, 3), (2, 1, 2), "VALID"),  # three axes that overlap
    ((2, 40, 2), (35,), (1,), "VALID"),  # too wide for slices
    ((2, 1, 5, 3), (2, 2), (2, 2), "VALID"),  # nothing left
]


def distinct(shape: tuple[int, ...]) -> jax.Array:
    """Numbers of both signs, no two of them equal, so that no window has a tie."""
    numbers = np.random.default_rng(0).permutation(math.prod(shape))
    return jnp.asarray(numbers.reshape(shape) / 7 - 5, jnp.float32)


@pytest.mark.parametrize(("ours", "flaxs"), PAIRS)
@pytest.mark.parametrize(("shape", "window", "strides", "padding"), CASES)
def test_values_and_gradients_are_flaxs(
    ours: Callable, flaxs: Callable, shape: tuple, window: tuple, strides: tuple, padding: str
) -> None:
    def weighted(x: jax.Array, pool: Callable) -> tuple[jax.Array, jax.Array]:
        values = pool(x, window, strides, padding)
        return jnp.sum(values * draws.normal(1, *values.shape)), values

    both = jax.jit(lambda x: [jax.grad(weighted, has_aux=True)(x, pool) for pool in (ours, flaxs)])
    (gradient, values), (flax_gradient, flax_values) = both(distinct(shape))
    np.testing.assert_allclose(values, flax_values, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(gradient, flax_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count_include_pad", [True, False])
def test_padding_counts_in_the_mean_as_in_flax(count_include_pad: bool) -> None:
    x = distinct((2, 5, 5, 3))
    for padding in ("SAME", "VALID", ((1, 1), (0, 1))):
        for strides in ((2, 2), (1, 2)):
            given = (x, (2, 2), strides, padding, count_include_pad)
            np.testing.assert_allclose(nn.avg_pool(*given), linen.avg_pool(*given), rtol=1e-5)


@pytest.mark.parametrize("strides", [(2, 2), (1, 2)])
def test_integers_are_pooled_as_in_flax(strides: tuple[int, int]) -> None:
    # Flax sums int8 in int8, where the sum wraps around: its mean is that of int32.
    x = draws.integers(3, 200, 2, 3, 5, 4, 2) - 100
    given = ((2, 2), strides, "SAME")
    for dtype in (jnp.int8, jnp.int32):
        highest, mean = (pool(x.astype(dtype), *given) for pool in (nn.max_pool, nn.avg_pool))
        assert highest.dtype == dtype
        np.testing.assert_array_equal(highest, linen.max_pool(x, *given))
        np.testing.assert_allclose(mean, linen.avg_pool(x, *given), rtol=1e-6)


def test_tiles_need_no_window_reduction() -> None:
    x = distinct((2, 7, 8, 3))
    for pool, padding in itertools.product((nn.max_pool, nn.avg_pool), ("valid", "SAME", ((1, 0), (0, 0)))):
        tiled = jax.make_jaxpr(jax.grad(lambda x, pool=pool: pool(x, (2, 2), (2, 2), padding).sum()))(x)  # noqa: B023
        assert not any(name in str(tiled) for name in ("reduce_window", "select_and_scatter"))
    overlapping = jax.make_jaxpr(jax.grad(lambda x: nn.max_pool(x, (3, 3), (2, 2)).sum()))(x)
    assert not any(name in str(overlapping) for name in ("reduce_window", "select_and_scatter"))


def test_equal_maxima_share_the_gradient() -> None:
    x = jnp.array([[2.0, 1.0], [2.0, 0.0]])[None, :, :, None]
    gradient = jax.grad(lambda x: nn.max_pool(x, (2, 2), (2, 2)).sum())(x)
    assert np.array_equal(gradient.squeeze(), [[0.5, 0.0], [0.5, 0.0]])


@pytest.mark.parametrize("pool", [nn.max_pool, nn.avg_pool])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strides", [(2, 2), (1, 1)])
def test_dtype_is_kept(pool: Callable, strides: tuple, dtype: str) -> None:
    assert pool(jnp.ones((1, 4, 4, 1), dtype), (2, 2), strides, "SAME").dtype == dtype
    if pool is nn.avg_pool:
        assert pool(jnp.ones((1, 5, 4, 1), dtype), (2, 2), strides, "SAME", False).dtype == dtype


def test_lists_do_for_tuples() -> None:
    x = distinct((2, 7, 7, 3))
    for strides in ([2, 2], [1, 1]):
        expected = linen.max_pool(x, (2, 2), tuple(strides))
        assert np.array_equal(nn.max_pool(x, [2, 2], strides), expected)


def test_ranks_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"window \(2, 2\) and strides \(2,\) need equally many"):
        nn.max_pool(jnp.ones((1, 4, 4, 1)), (2, 2), (2,))
    with pytest.raises(ConfigError, match=r"2 spatial axes, features\], not float32 of shape \(4, 4\)"):
        nn.avg_pool(jnp.ones((4, 4)), (2, 2), (2, 2))


@pytest.mark.parametrize(
    ("window", "strides", "padding", "words"),
    [
        (2, None, "VALID", r"the window must be a tuple of integers >= 1, as \(2, 2\), not 2"),
        ((0, 2), (0, 2), "VALID", r"the window must be a tuple of integers >= 1"),
        ((2, 2), 2, "VALID", r"the strides must be a tuple of integers >= 1"),
        ((2, 2), None, "FULL", "no padding 'FULL'.* Known are 'SAME', 'SAME_LOWER', 'VALID'"),
        ((2, 2), None, 1, r"padding must be a name or \(low, high\) for each spatial axis, not 1"),
        ((2, 2), None, ((1, 1),), r"padding must be a name or \(low, high\) for each spatial axis"),
    ],
)
def test_what_is_no_window_is_named(window: object, strides: object, padding: object, words: str) -> None:
    for pool in (nn.max_pool, nn.avg_pool):
        with pytest.raises(ConfigError, match=words):
            pool(jnp.ones((1, 4, 4, 1)), window, strides, padding)


@pytest.mark.parametrize(("window", "strides"), [((3, 3), (2, 2)), ((2, 3), (1, 1)), ((4, 2), (3, 1))])
def test_among_equal_maxima_of_windows_that_overlap_the_first_gets_all_as_in_flax(
    window: tuple[int, int], strides: tuple[int, int]
) -> None:
    # Small integers: nearly every window has ties, many between a row and another.
    x = draws.integers(2, 3, 3, 9, 8, 4).astype(jnp.float32)

    def gradient(pool: Callable) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(pool(x, window, strides) ** 2 + pool(x, window, strides)))(x)

    np.testing.assert_array_equal(gradient(nn.max_pool), gradient(linen.max_pool))


def test_a_nan_is_the_maximum_of_its_windows_wherever_it_stands() -> None:
    for place in range(3):
        x = jnp.zeros((1, 5, 1)).at[0, place + 1, 0].set(jnp.nan)
        np.testing.assert_array_equal(jnp.isnan(nn.max_pool(x, (3,), (2,))), jnp.isnan(linen.max_pool(x, (3,), (2,))))
