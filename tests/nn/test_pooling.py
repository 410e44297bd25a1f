"""Pooling: values and gradients by definition, by every way they are computed."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax

from jaxnn import nn
from tests import draws

POOLS = (nn.max_pool, nn.avg_pool)

# shape, window, strides, padding
CASES: list[tuple[Any, ...]] = [
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
    ((2, 80, 2), (40,), (40,), "VALID"),  # tiles too large for slices
]


def distinct(shape: tuple[int, ...]) -> jax.Array:
    """Numbers of both signs, no two of them equal, so that no window has a tie."""
    numbers = np.random.default_rng(0).permutation(math.prod(shape))
    return jnp.asarray(numbers.reshape(shape) / 7 - 5, jnp.float32)


def by_hand(pool: Any, x: Any, window: Any, strides: Any = None, padding: Any = "VALID", count: bool = True) -> Any:
    """The maximum or mean of each window, in NumPy's float64; padding counts in the mean if ``count``."""
    strides = strides or (1,) * len(window)
    first = x.ndim - 1 - len(window)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[first:-1], window, strides, padding.upper())

    def windows(x: Any, fill: float) -> np.ndarray:
        padded = np.pad(np.float64(x), [*[(0, 0)] * first, *padding, (0, 0)], constant_values=fill)
        views = np.lib.stride_tricks.sliding_window_view(padded, window, range(first, x.ndim - 1))
        views = views[(slice(None),) * first + tuple(slice(None, None, step) for step in strides)]
        return views.reshape(*views.shape[: x.ndim], -1)

    if pool is nn.max_pool:
        return windows(x, -np.inf).max(-1)
    return windows(x, 0.0).sum(-1) / (math.prod(window) if count else windows(np.ones_like(x), 0.0).sum(-1))


def test_values_and_gradients_by_hand():
    calls = [(pool, case) for case in CASES for pool in POOLS]
    calls += [(nn.avg_pool, (*case, False)) for case in CASES if case[3] != "VALID"]

    def graded(pool: Callable[..., jax.Array], x: jax.Array, *how: Any) -> Any:
        def weighted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            values = pool(x, *how)
            return jnp.sum(values * draws.normal(1, *values.shape)), values

        return jax.grad(weighted, has_aux=True)(x)

    run = jax.jit(lambda xs: [graded(pool, x, *how) for x, (pool, (_, *how)) in zip(xs, calls, strict=True)])
    xs = [distinct(shape) for _, (shape, *_) in calls]
    for (gradient, values), x, (pool, (shape, *how)) in zip(run(xs), xs, calls, strict=True):
        expected, name = by_hand(pool, x, *how), str((pool.__name__, shape, *how))
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        # Steps below half of the least difference, 1/7, change no maximum: pooling is linear there.
        step = np.random.default_rng(2).uniform(-0.07, 0.07, shape)
        change = by_hand(pool, np.float64(x) + step, *how) - expected
        weights = np.float64(draws.normal(1, *values.shape))
        assert gradient.shape == shape
        error = abs(np.vdot(gradient, step) - np.vdot(weights, change))
        assert error < 1e-5 * np.linalg.norm(gradient), name


def test_integers_and_dtypes():
    # Summed in int8, these would wrap around.
    integers = np.asarray(draws.integers(3, 200, 2, 3, 5, 4, 2) - 100)
    calls = list(itertools.product((jnp.int8, jnp.int32), POOLS, [(2, 2), (1, 2)]))
    run = jax.jit(lambda x: [pool(x.astype(dtype), (2, 2), strides, "SAME") for dtype, pool, strides in calls])
    for found, (dtype, pool, strides) in zip(run(integers), calls, strict=True):
        assert found.dtype == (dtype if pool is nn.max_pool else jnp.float32)
        np.testing.assert_allclose(found, by_hand(pool, integers, (2, 2), strides, "SAME"), rtol=1e-5)
    narrow = jax.ShapeDtypeStruct((1, 5, 4, 1), jnp.bfloat16)
    for pool, strides in itertools.product([*POOLS, partial(nn.avg_pool, count_include_pad=False)], ([2, 2], [1, 1])):
        lists = partial(pool, window_shape=[2, 2], strides=strides, padding="SAME")
        assert jax.eval_shape(lists, narrow).dtype == jnp.bfloat16
    for pool in POOLS:  # nothing is left
        empty = jax.eval_shape(partial(pool, window_shape=(2, 2), strides=(2, 2)), np.ones((2, 1, 5, 3)))
        assert empty.shape == (2, 0, 2, 3)


def test_no_window_reduction_in_the_gradients_of_tiles_and_maxima():
    x = distinct((2, 7, 8, 3))
    cases = [(pool, (2, 2), padding) for pool in POOLS for padding in ("valid", "SAME", ((1, 0), (0, 0)))]
    for pool, window, padding in [*cases, (nn.max_pool, (3, 3), "VALID")]:
        pooled = partial(pool, window_shape=window, strides=(2, 2), padding=padding)
        program = str(jax.make_jaxpr(jax.grad(lambda x, f=pooled: f(x).sum()))(x))
        assert "reduce_window" not in program and "select_and_scatter" not in program
    symbolic = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("batch"), 8, 8, 3), jnp.float32)
    tiles = jax.jit(partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2)))
    assert "gather" not in jax.export.export(tiles)(symbolic).mlir_module()


@pytest.mark.slow
def test_gradients_of_equal_maxima_and_nan():
    tile = np.zeros((1, 40, 1), np.float32)
    # Small integers: nearly every window has ties, many between a row and another.
    x = np.float32(draws.integers(2, 3, 3, 9, 8, 4))
    nans = np.where(np.arange(5)[:, None] == np.array([1, 2, 3])[:, None, None], np.float32(np.nan), np.float32(0))

    def run(pool: Callable[..., jax.Array], x: jax.Array, nans: jax.Array) -> Any:
        calls = [((3, 3), (2, 2)), ((2, 3), (1, 1)), ((4, 2), (3, 1)), ((2, 2), (2, 2)), ((3, 4), (3, 4))]
        gradients = [jax.grad(lambda x, how=how: jnp.sum(pool(x, *how) ** 2 + pool(x, *how)))(x) for how in calls]
        return gradients, [jnp.isnan(pool(nans, (3,), (step,))) for step in (2, 3)]

    both = jax.jit(lambda *given: [run(pool, *given) for pool in (nn.max_pool, linen.max_pool)])
    ours, theirs = both(x, nans)
    shared = jax.jit(jax.grad(lambda x: nn.max_pool(x, (40,), (40,)).sum()))(tile)
    np.testing.assert_allclose(shared, np.full_like(tile, 1 / 40))  # large tiles share
    # Otherwise the first gets all, as in Flax.
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
