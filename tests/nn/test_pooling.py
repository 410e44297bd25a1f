"""Pooling: Flax's values and gradients, by every way they are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

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
    ((2, 1, 5, 3), (2, 2), (2, 2), "VALID"),  # nothing left
]


def distinct(shape: tuple[int, ...]) -> jax.Array:
    """Numbers of both signs, no two of them equal, so that no window has a tie."""
    numbers = np.random.default_rng(0).permutation(math.prod(shape))
    return jnp.asarray(numbers.reshape(shape) / 7 - 5, jnp.float32)


@pytest.mark.parametrize("part", range(3))
def test_values_and_gradients_equal_flax(part: int) -> None:
    cases = CASES[part::3]

    def graded(pool: Callable[..., jax.Array], x: jax.Array, *how: Any) -> Any:
        def weighted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            values = pool(x, *how)
            return jnp.sum(values * draws.normal(1, *values.shape)), values

        return jax.grad(weighted, has_aux=True)(x)

    xs = [distinct(shape) for shape, *_ in cases]
    results = jax.jit(
        lambda xs: [
            [graded(pool, x, *how) for pool in pair] for x, (_, *how) in zip(xs, cases, strict=True) for pair in PAIRS
        ]
    )(xs)
    for (ours, flaxs), (case, _) in zip(results, itertools.product(cases, PAIRS), strict=True):
        for found, expected in zip(ours, flaxs, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=str(case))


def test_padding_in_the_mean_integers_and_dtypes() -> None:
    x = distinct((2, 5, 5, 3))
    options = list(itertools.product(("SAME", "VALID", ((1, 1), (0, 1))), [(2, 2), (1, 2)], [True, False]))
    # Flax sums int8 in int8, where the sum wraps around: its mean is that of int32.
    integers = np.asarray(draws.integers(3, 200, 2, 3, 5, 4, 2) - 100)

    @jax.jit
    def run(x: jax.Array) -> Any:
        means = [[pool(x, (2, 2), strides, padding, count) for padding, strides, count in options] for pool in PAIRS[1]]
        pooled = []
        for dtype, strides in itertools.product((jnp.int8, jnp.int32), [(2, 2), (1, 2)]):
            given = ((2, 2), strides, "SAME")
            ours = [pool(integers.astype(dtype), *given) for pool in (nn.max_pool, nn.avg_pool)]
            assert ours[0].dtype == dtype and ours[1].dtype == jnp.float32
            theirs = [pool(integers.astype(np.int32), *given) for pool in (linen.max_pool, linen.avg_pool)]
            pooled.append([[array.astype(jnp.float32) for array in pair] for pair in (ours, theirs)])
        return means, pooled

    (ours, theirs), pooled = run(x)
    for found, expected in [(ours, theirs), *pooled]:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    for dtype, (pool, _), strides in itertools.product(("bfloat16", "float16"), PAIRS, [(2, 2), (1, 1)]):
        narrow = jax.ShapeDtypeStruct((1, 5, 4, 1), dtype)
        rest = ([],) if pool is nn.max_pool else ([True], [False])
        for options in rest:
            given = ((2, 2), strides, "SAME", *options)
            assert jax.eval_shape(lambda x, pool=pool, given=given: pool(x, *given), narrow).dtype == dtype
    for strides in ([2, 2], [1, 1]):  # lists for tuples
        assert np.array_equal(nn.max_pool(x, [2, 2], strides), linen.max_pool(x, (2, 2), tuple(strides)))


def test_no_window_reduction_in_the_gradients_of_tiles_and_maxima() -> None:
    x = distinct((2, 7, 8, 3))
    cases = [(pool, (2, 2), padding) for pool, _ in PAIRS for padding in ("valid", "SAME", ((1, 0), (0, 0)))]
    for pool, window, padding in [*cases, (nn.max_pool, (3, 3), "VALID")]:
        program = str(
            jax.make_jaxpr(jax.grad(lambda x, pool=pool, w=window, p=padding: pool(x, w, (2, 2), p).sum()))(x)
        )
        assert "reduce_window" not in program and "select_and_scatter" not in program


def test_gradients_of_equal_maxima_and_nan() -> None:
    tile = jnp.array([[2.0, 1.0], [2.0, 0.0]])[None, :, :, None]
    # Small integers: nearly every window has ties, many between a row and another.
    x = draws.integers(2, 3, 3, 9, 8, 4).astype(jnp.float32)
    nans = jnp.stack([jnp.zeros((5, 1)).at[place, 0].set(jnp.nan) for place in (1, 2, 3)])

    def gradients(pool: Callable[..., jax.Array]) -> list[jax.Array]:
        return [
            jax.grad(lambda x, how=how: jnp.sum(pool(x, *how) ** 2 + pool(x, *how)))(x)
            for how in [((3, 3), (2, 2)), ((2, 3), (1, 1)), ((4, 2), (3, 1))]
        ]

    shared, ours, theirs, found, expected = jax.jit(
        lambda: (
            jax.grad(lambda x: nn.max_pool(x, (2, 2), (2, 2)).sum())(tile),
            gradients(nn.max_pool),
            gradients(linen.max_pool),
            nn.max_pool(nans, (3,), (2,)),
            linen.max_pool(nans, (3,), (2,)),
        )
    )()
    assert np.array_equal(shared.squeeze(), [[0.5, 0.0], [0.5, 0.0]])  # tiles share
    for a, b in zip(ours, theirs, strict=True):  # of overlapping windows the first gets all, as in Flax
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


BAD: list[tuple[Any, Any, Any, str]] = [
    (2, None, "VALID", r"the window must be a tuple of integers >= 1, as \(2, 2\), not 2"),
    ((0, 2), (0, 2), "VALID", r"the window must be a tuple of integers >= 1"),
    ((2, 2), 2, "VALID", r"the strides must be a tuple of integers >= 1"),
    ((2, 2), (2,), "VALID", r"window \(2, 2\) and strides \(2,\)"),
    ((2, 2), None, "FULL", "no padding 'FULL'.* 'SAME', 'SAME_LOWER', 'VALID'"),
    ((2, 2), None, 1, r"padding must be .*\(low, high\).*, not 1"),
    ((2, 2), None, ((1, 1),), r"padding must be .*\(low, high\)"),
]


def test_bad_arguments() -> None:
    for window, strides, padding, words in BAD:
        for pool in (nn.max_pool, nn.avg_pool):
            with pytest.raises(ConfigError, match=words):
                pool(np.ones((1, 4, 4, 1)), window, strides, padding)
    for x in (np.ones((4, 4), np.float32), np.ones((1, 4, 4, 1), bool)):
        with pytest.raises(ConfigError, match=r"2 spatial axes, features\], not"):
            nn.avg_pool(jnp.asarray(x), (2, 2), (2, 2))
