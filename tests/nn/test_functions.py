"""Functions beside layers: pooling equals Flax's, cross-entropy its definition, in value and gradient; their memory."""

import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from jaxnn import nn
from jaxnn.nn import cross_entropy
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


def by_flax(pool: Any, x: Any, window: Any, strides: Any = None, padding: Any = "VALID", *count: bool) -> jax.Array:
    padding = padding.upper() if isinstance(padding, str) else padding
    return getattr(linen, pool.__name__)(x, window, strides, padding, *count)


@pytest.mark.slow
def test_values_and_gradients_equal_flax():
    calls = [(pool, case) for case in CASES for pool in POOLS]
    calls += [(nn.avg_pool, (*case, False)) for case in CASES if case[3] != "VALID"]

    def run(xs: Any) -> Any:
        each = [(pool, x, how) for x, (pool, (_, *how)) in zip(xs, calls, strict=True)]
        both = [((pool, partial(by_flax, pool)), x, how) for pool, x, how in each]
        return [[draws.graded(lambda x, f=f, how=how: f(x, *how))(x) for f in pair] for pair, x, how in both]

    for (found, expected), call in zip(jax.jit(run)([distinct(shape) for _, (shape, *_) in calls]), calls, strict=True):
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=str(call))


def test_integers_and_dtypes():
    # Summed in int8, these would wrap around.
    integers = np.asarray(draws.integers(3, 200, 2, 3, 5, 4, 2) - 100)
    calls = list(itertools.product((jnp.int8, jnp.int32), POOLS, [(2, 2), (1, 2)]))
    run = jax.jit(lambda x: [pool(x.astype(dtype), (2, 2), strides, "SAME") for dtype, pool, strides in calls])
    for found, (dtype, pool, strides) in zip(run(integers), calls, strict=True):
        assert found.dtype == (dtype if pool is nn.max_pool else jnp.float32)
        np.testing.assert_allclose(found, by_flax(pool, np.float32(integers), (2, 2), strides, "SAME"), rtol=1e-5)
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


def plain(logits: Any, labels: Any, smoothing: Any = 0.0) -> Any:
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), smoothing)
    return optax.softmax_cross_entropy(logits, targets)


def case(shape: tuple[int, ...], classes: int, dtype: Any = "float32") -> tuple[jax.Array, jax.Array]:
    return 3.0 * draws.normal(0, *shape, classes, dtype=dtype), draws.integers(1, classes, *shape)


def assert_close(found: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    near = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(lambda a, b: near(np.float64(a), np.float64(b)), found, expected)


def test_large_logits_lose_nothing_and_labels_that_are_no_class_are_nan():
    def run(logits: jax.Array, label: jax.Array) -> Any:
        return [jax.value_and_grad(cross_entropy)(logits, label, smoothing) for smoothing in (0.0, 0.3)]

    # Large logits do not overflow; an excluded class has no gradient.
    (loss, gradient), _ = jax.jit(run)(jnp.array([1e4, 0.0, -jnp.inf]), jnp.int32(1))
    assert float(loss) == 1e4 and gradient.tolist() == [1.0, -1.0, 0.0]
    # Smoothed too: of float32's steps of 8 at 1e8 an offset of all loses nothing.
    far = jnp.float32([1e8 + 8, 1e8, 1e8])
    assert_close(jax.jit(run)(far, jnp.int32(1)), jax.jit(run)(far - 1e8, jnp.int32(1)), 1e-6)
    assert np.isnan(jax.jit(cross_entropy)(jnp.ones((3, 3)), jnp.array([-1, 3, 100]))).all()


def test_equals_the_plain_formula_in_float64():
    with jax.enable_x64(True):
        logits, labels = case((2, 3), 11, "float64")
        weights, smoothings = draws.normal(2, 2, 3, dtype="float64"), np.array([0.0, 0.1, 1.0])

        def graded(f: Callable[..., jax.Array], logits: jax.Array, smoothings: jax.Array) -> Any:
            loss = lambda logits, smoothing: jnp.sum(weights * f(logits, labels, smoothing))  # noqa: E731
            traced = jax.vmap(jax.value_and_grad(loss, (0, 1)), (None, 0))(logits, smoothings)
            return traced, [f(logits, labels, smoothing) for smoothing in (0.0, 0.1)]

        run = jax.jit(lambda *given: [graded(f, *given) for f in (cross_entropy, plain)])
        found, expected = run(logits, smoothings)
        assert_close(found, expected, 1e-12, 1e-14)


def test_narrow_floats_are_summed_in_float32_and_keep_two_numbers_per_label():
    logits, labels = case((16,), 5000, "bfloat16")

    def run(logits: jax.Array) -> Any:
        ours = jax.value_and_grad(lambda logits: cross_entropy(logits, labels).sum())(logits)
        theirs = jax.value_and_grad(lambda logits: plain(logits, labels).sum())(logits.astype(jnp.float32))
        return ours, theirs

    (loss, gradient), (expected, slope) = jax.jit(run)(logits)
    assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    assert_close(loss, expected, 1e-6)
    assert_close(gradient, slope, 2**-8, 1e-7)
    backward = jax.eval_shape(lambda logits: jax.vjp(lambda logits: cross_entropy(logits, labels), logits)[1], logits)
    kept = [leaf for leaf in jax.tree.leaves(backward) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    shapes = sorted((leaf.shape, str(leaf.dtype)) for leaf in kept)
    assert shapes == [((16,), "float32")] * 2 + [((16, 5000), "bfloat16")]


def test_smoothing_traced_as_0_with_an_excluded_class_is_none():
    logits, labels = jnp.array([1.0, 0.5, -jnp.inf]), jnp.array([0, 2])
    graded = jax.vmap(jax.value_and_grad(cross_entropy), (None, 0, None))
    run = jax.jit(lambda rates: [graded(logits, labels, rate) for rate in (0.0, *rates)])
    expected, none, smoothed = run((0.0, 0.1))
    assert_close(none, expected, 1e-6)
    # Of a class that cannot be, a share of the target costs infinitely much.
    assert not np.isfinite(smoothed[0]).any()


def test_memory_is_one_copy_of_the_logits():
    hidden, kernel, labels = draws.normal(0, 256, 8), draws.normal(1, 8, 4096), draws.integers(3, 4096, 256)
    loss = lambda hidden, kernel: cross_entropy(hidden @ kernel, labels).mean()  # noqa: E731
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, kernel).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * 4 * 256 * 4096
