"""Cross-entropy: by hand, equal to the plain formula in value and gradient, and lean in what it keeps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxnn.nn import cross_entropy, linear_cross_entropy
from jaxnn.types import ConfigError
from tests import draws

KEY = jax.random.key(0)
# Softmax of ln(1, 2, 5) is 1/8, 2/8, 5/8.
EIGHTHS = jnp.log(jnp.array([1.0, 2.0, 5.0]))


def plain(logits: Any, labels: Any, smoothing: Any = 0.0) -> Any:
    targets = (1 - smoothing) * jax.nn.one_hot(labels, logits.shape[-1]) + smoothing / logits.shape[-1]
    return -jnp.sum(targets.astype(logits.dtype) * jax.nn.log_softmax(logits), axis=-1)


def case(shape: tuple[int, ...], classes: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    return 3.0 * draws.normal(0, *shape, classes, dtype=dtype), draws.integers(1, classes, *shape)


def test_by_hand() -> None:
    # -ln(5/8); smoothed by 0.3 each class has 0.1 more: 0.7 ln(8/5) + 0.1 (ln 8 + ln 4 + ln(8/5)).
    assert float(cross_entropy(EIGHTHS, jnp.int32(2))) == pytest.approx(math.log(1.6), rel=1e-6)
    smoothed = 0.7 * math.log(1.6) + 0.1 * math.log(8 * 4 * 1.6)
    assert float(cross_entropy(EIGHTHS, jnp.int32(2), 0.3)) == pytest.approx(smoothed, rel=1e-6)
    # The gradient is softmax less the target: (1/8, 2/8, 5/8 - 1), and smoothed by 0.3 less (0.1, 0.1, 0.8).
    gradient = jax.grad(cross_entropy)
    np.testing.assert_allclose(gradient(EIGHTHS, jnp.int32(2)), [0.125, 0.25, -0.375], rtol=1e-5)
    np.testing.assert_allclose(gradient(EIGHTHS, jnp.int32(2), 0.3), [0.025, 0.15, -0.175], rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_equals_the_plain_formula_in_float64(shape: tuple[int, ...]) -> None:
    with jax.enable_x64(True):
        logits, labels = case(shape, 11, "float64")
        weights, smoothings = draws.normal(2, *shape, dtype="float64"), jnp.array([0.0, 0.1, 1.0])

        @functools.partial(jax.jit, static_argnums=0)
        def graded(f: Callable[..., jax.Array]) -> Any:
            loss = lambda logits, smoothing: jnp.sum(weights * f(logits, labels, smoothing))  # noqa: E731
            return jax.vmap(jax.value_and_grad(loss, (0, 1)), (None, 0))(logits, smoothings)

        found, expected = (graded(f) for f in (cross_entropy, plain))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)
        for smoothing in (0.0, 0.1):
            fixed = cross_entropy(logits, labels, smoothing)
            np.testing.assert_allclose(fixed, plain(logits, labels, smoothing), rtol=1e-12)


def test_narrow_logits_are_summed_in_float32() -> None:
    logits, labels = case((16,), 5000, "bfloat16")
    loss, gradient = jax.value_and_grad(lambda logits: cross_entropy(logits, labels).sum())(logits)
    wide = logits.astype(jnp.float32)
    expected, slope = jax.value_and_grad(lambda logits: plain(logits, labels).sum())(wide)
    assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient.astype(jnp.float32), slope, rtol=2**-8, atol=1e-7)


def test_large_logits_do_not_overflow_and_excluded_classes_have_no_gradient() -> None:
    logits = jnp.array([1e4, 0.0, -jnp.inf])
    loss, gradient = jax.value_and_grad(cross_entropy)(logits, jnp.int32(1))
    assert float(loss) == 1e4
    assert gradient.tolist() == [1.0, -1.0, 0.0]


OFFSETS = jnp.array([0.0, 1e4, 1e8, -1e8])


@pytest.mark.parametrize("form", ["plain", "smoothed", "linear"])
def test_a_common_offset_of_the_logits_changes_nothing(form: str) -> None:
    # float32 has steps of 8 at 1e8, so the logits are rounded first: all forms then see the same numbers.
    logits = 8.0 * draws.integers(5, 4, 1, 6, 9) + OFFSETS[:, None, None]
    labels = draws.integers(1, 9, 6)
    smoothing = 0.1 if form == "smoothed" else 0.0

    def loss(logits: jax.Array) -> jax.Array:
        # The rows of a unit matrix pick the logits out of the kernel, four classes at a time.
        chunked = lambda logits: linear_cross_entropy(jnp.eye(6), logits, labels, chunk=4)  # noqa: E731
        return chunked(logits) if form == "linear" else cross_entropy(logits, labels, smoothing)

    graded = lambda logits: (loss(logits), jax.grad(lambda logits: loss(logits).sum())(logits))  # noqa: E731
    values, gradients = jax.jit(jax.vmap(graded))(logits)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.float64(logits)).reshape(-1, 9)
        repeated = jnp.tile(labels, len(OFFSETS))
        expected, slopes = (
            array.reshape(len(OFFSETS), 6, *array.shape[1:])
            for array in (
                plain(wide, repeated, smoothing),
                jax.grad(lambda wide: plain(wide, repeated, smoothing).sum())(wide),
            )
        )
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradients, slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("label", [0, 2])
def test_a_traced_smoothing_of_zero_with_an_excluded_class_is_none_at_all(label: int) -> None:
    logits = jnp.array([1.0, 0.5, -jnp.inf])
    graded = jax.value_and_grad(cross_entropy)
    expected = graded(logits, jnp.int32(label))
    smoothed = jax.jit(jax.vmap(graded, (None, None, 0)))(logits, jnp.int32(label), jnp.array([0.0, 0.1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-6), smoothed, expected)
    # Of a class that cannot be, a share of the target costs infinitely much.
    assert not jnp.isfinite(smoothed[0][1])


@pytest.mark.parametrize("label", [-1, 3, 100])
def test_a_label_that_is_no_class_gives_nan(label: int) -> None:
    assert math.isnan(cross_entropy(EIGHTHS, jnp.int32(label)))
    assert math.isnan(linear_cross_entropy(jnp.ones((1, 1)), EIGHTHS[None], jnp.array([label]), chunk=2)[0])


def test_transformations_agree() -> None:
    logits, labels = case((4, 6), 9)
    smoothings = jnp.array([0.0, 0.1, 0.2, 0.3])
    gradient = jax.grad(lambda *args: cross_entropy(*args).sum())
    alone = jnp.stack([gradient(*args) for args in zip(logits, labels, smoothings, strict=True)])
    np.testing.assert_allclose(jax.vmap(gradient)(logits, labels, smoothings), alone, rtol=1e-6, atol=1e-7)
    remat = jax.grad(lambda *args: jax.checkpoint(cross_entropy)(*args).sum())
    scanned = jax.lax.scan(lambda _, args: (None, remat(*args)), None, (logits, labels, smoothings))[1]
    np.testing.assert_allclose(scanned, alone, rtol=1e-6, atol=1e-7)


# Without the logits.

type Linear = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def linear_case(shape: tuple[int, ...], features: int, classes: int, dtype: str = "float32") -> Linear:
    shapes = ((*shape, features), (features, classes), (classes,))
    hidden, kernel, bias = (draws.normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    return hidden, kernel, bias, draws.integers(3, classes, *shape)


def plain_linear(hidden: Any, kernel: Any, labels: Any, bias: Any = None) -> Any:
    return plain(hidden @ kernel + (0.0 if bias is None else jnp.expand_dims(bias, range(hidden.ndim - 1))), labels)


@pytest.mark.parametrize(("classes", "chunk"), [(12, 4), (13, 4), (5, 100), (1, 3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_equal_the_whole_in_float64(classes: int, chunk: int, with_bias: bool) -> None:
    with jax.enable_x64(True):
        hidden, kernel, bias, labels = linear_case((2, 3), 5, classes, "float64")
        weights = draws.normal(4, *labels.shape, dtype="float64")
        given = (hidden, kernel, bias if with_bias else None)

        def graded(f: Callable[..., jax.Array]) -> Any:
            loss = lambda given: jnp.sum(weights * f(given[0], given[1], labels, given[2]))  # noqa: E731
            return jax.jit(jax.value_and_grad(loss))(given)

        found = graded(lambda *args: linear_cross_entropy(*args, chunk=chunk))
        expected = graded(plain_linear)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)


def test_chunks_of_narrow_floats_keep_their_dtype() -> None:
    hidden, kernel, bias, labels = linear_case((8,), 16, 50, "bfloat16")
    loss = lambda *args: linear_cross_entropy(args[0], args[1], labels, args[2], chunk=20).sum()  # noqa: E731
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(hidden, kernel, bias)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (hidden, kernel, bias))
    expected = jax.grad(lambda *args: plain_linear(args[0], args[1], labels, args[2]).sum(), (0, 1, 2))(*wide)
    assert value.dtype == jnp.float32
    for gradient, slope in zip(gradients, expected, strict=True):
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(gradient.astype(jnp.float32), slope, rtol=0.05, atol=0.05)


def test_chunks_map_over_kernels() -> None:
    hidden, kernel, _, labels = linear_case((3,), 4, 10)
    kernels = jnp.stack([kernel, 2 * kernel])
    gradient = jax.grad(lambda kernel: linear_cross_entropy(hidden, kernel, labels, chunk=4).sum())
    alone = jnp.stack([gradient(kernel) for kernel in kernels])
    np.testing.assert_allclose(jax.vmap(gradient)(kernels), alone, rtol=1e-5, atol=1e-6)


# What is kept.


def temporary_bytes(loss: Callable[..., jax.Array], *args: jax.Array) -> int:
    compiled = jax.jit(jax.grad(lambda *args: loss(*args).mean(), (0, 1))).lower(*args).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def test_one_copy_of_the_logits_or_none() -> None:
    hidden, kernel, _, labels = linear_case((256,), 8, 4096)
    logits_bytes = 4 * 256 * 4096
    optaxs = optax.softmax_cross_entropy_with_integer_labels
    usual = temporary_bytes(lambda hidden, kernel: optaxs(hidden @ kernel, labels), hidden, kernel)
    lean = temporary_bytes(lambda hidden, kernel: cross_entropy(hidden @ kernel, labels), hidden, kernel)
    none = temporary_bytes(
        lambda hidden, kernel: linear_cross_entropy(hidden, kernel, labels, chunk=256), hidden, kernel
    )
    assert usual > 1.9 * logits_bytes
    assert lean < 1.2 * logits_bytes
    assert none < 0.4 * logits_bytes


def test_the_only_floats_kept_for_the_gradient_are_the_logits_and_two_per_label() -> None:
    logits, labels = case((6,), 50, "bfloat16")
    backward = jax.vjp(lambda logits: cross_entropy(logits, labels), logits)[1]
    kept = [leaf for leaf in jax.tree.leaves(backward) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert sorted((leaf.shape, str(leaf.dtype)) for leaf in kept) == [((6,), "float32")] * 2 + [((6, 50), "bfloat16")]


# Bad input.


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: cross_entropy(jnp.ones((2, 3)), jnp.ones(2)), r"labels \[...\] of integers, not \[2, 3\] and float32"),
        (lambda: cross_entropy(jnp.ones((2, 3)), jnp.ones(3, int)), r"not \[2, 3\] and int32 \[3\]"),
        (lambda: cross_entropy(jnp.float32(1), jnp.int32(0)), r"needs logits \[..., classes\]"),
        (lambda: cross_entropy(EIGHTHS, jnp.int32(0), 1.5), "label_smoothing must be one number, 0…1, not 1.5"),
        (
            lambda: linear_cross_entropy(jnp.ones((2, 3)), jnp.ones((4, 5)), jnp.ones(2, int)),
            r"kernel \(4, 5\), bias None",
        ),
        (
            lambda: linear_cross_entropy(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones(2, int), jnp.ones(4)),
            r"hidden \(2, 3\), kernel \(3, 5\), bias \(4,\)",
        ),
        (
            lambda: linear_cross_entropy(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones(2, int), chunk=0),
            "chunk must be an integer >= 1, not 0",
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()
