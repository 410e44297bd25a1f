"""Cross-entropy: by hand, equal to the plain formula in value and gradient, and the memory it needs."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.nn import cross_entropy, linear_cross_entropy
from tests import draws

# Softmax of ln(1, 2, 5) is 1/8, 2/8, 5/8.
EIGHTHS = np.log(np.array([1.0, 2.0, 5.0], np.float32))


def plain(logits: Any, labels: Any, smoothing: Any = 0.0) -> Any:
    targets = (1 - smoothing) * jax.nn.one_hot(labels, logits.shape[-1]) + smoothing / logits.shape[-1]
    return -jnp.sum(targets.astype(logits.dtype) * jax.nn.log_softmax(logits), axis=-1)


def case(shape: tuple[int, ...], classes: int, dtype: Any = "float32") -> tuple[jax.Array, jax.Array]:
    return 3.0 * draws.normal(0, *shape, classes, dtype=dtype), draws.integers(1, classes, *shape)


def assert_close(found: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=rtol, atol=atol)


def test_by_hand():
    # -ln(5/8); smoothed by 0.3 each class has 0.1 more: 0.7 ln(8/5) + 0.1 (ln 8 + ln 4 + ln(8/5)).
    # The gradient is softmax less the target: (1/8, 2/8, 5/8 - 1), and smoothed by 0.3 less (0.1, 0.1, 0.8).
    def run(logits: jax.Array, label: jax.Array) -> Any:
        return [jax.value_and_grad(cross_entropy)(logits, label, smoothing) for smoothing in (0.0, 0.3)]

    (loss, gradient), (smoothed, slope) = jax.jit(run)(EIGHTHS, jnp.int32(2))
    assert_close(loss, math.log(1.6), 1e-6)
    assert_close(smoothed, 0.7 * math.log(1.6) + 0.1 * math.log(8 * 4 * 1.6), 1e-6)
    assert_close(np.stack([gradient, slope]), np.array([[0.125, 0.25, -0.375], [0.025, 0.15, -0.175]]), 1e-5)
    # Large logits do not overflow; an excluded class has no gradient.
    (loss, gradient), _ = jax.jit(run)(jnp.array([1e4, 0.0, -jnp.inf]), jnp.int32(1))
    assert float(loss) == 1e4 and gradient.tolist() == [1.0, -1.0, 0.0]
    # A label that is no class: NaN.
    linear = functools.partial(linear_cross_entropy, jnp.ones((3, 1)), EIGHTHS[None], chunk=2)
    both = jax.jit(lambda labels: (cross_entropy(jnp.tile(EIGHTHS, (3, 1)), labels), linear(labels)))
    assert np.isnan(both(jnp.array([-1, 3, 100]))).all()


def test_equals_the_plain_formula_in_float64():
    with jax.enable_x64(True):
        logits, labels = case((2, 3), 11, "float64")
        weights, smoothings = draws.normal(2, 2, 3, dtype="float64"), np.array([0.0, 0.1, 1.0])

        def graded(f: Callable[..., jax.Array], logits: jax.Array, smoothings: jax.Array) -> Any:
            loss = lambda logits, smoothing: jnp.sum(weights * f(logits, labels, smoothing))  # noqa: E731
            traced = jax.vmap(jax.value_and_grad(loss, (0, 1)), (None, 0))(logits, smoothings)
            return traced, [f(logits, labels, smoothing) for smoothing in (0.0, 0.1)]

        found, expected = jax.jit(lambda *given: [graded(f, *given) for f in (cross_entropy, plain)])(
            logits, smoothings
        )
        assert_close(found, expected, 1e-12, 1e-14)


def test_narrow_floats_are_summed_in_float32_and_keep_two_numbers_per_label():
    logits, labels = case((16,), 5000, "bfloat16")
    hidden, kernel, bias, targets = linear_case((8,), 16, 50, "bfloat16")
    linear = lambda *args: linear_cross_entropy(args[0], args[1], targets, args[2], chunk=20).sum()  # noqa: E731
    exact = lambda *args: plain_linear(args[0], args[1], targets, args[2]).sum()  # noqa: E731

    def run(logits: jax.Array, *arrays: jax.Array) -> Any:
        wide, *wides = (array.astype(jnp.float32) for array in (logits, *arrays))
        ours = jax.value_and_grad(lambda logits: cross_entropy(logits, labels).sum())(logits)
        theirs = jax.value_and_grad(lambda logits: plain(logits, labels).sum())(wide)
        return ours, theirs, jax.value_and_grad(linear, (0, 1, 2))(*arrays), jax.grad(exact, (0, 1, 2))(*wides)

    (loss, gradient), (expected, slope), (value, gradients), slopes = jax.jit(run)(logits, hidden, kernel, bias)
    assert (loss.dtype, gradient.dtype, value.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert_close(loss, expected, 1e-6)
    assert_close(gradient, slope, 2**-8, 1e-7)
    assert {gradient.dtype for gradient in gradients} == {jnp.dtype(jnp.bfloat16)}
    assert_close(gradients, slopes, 0.05, 0.05)
    backward = jax.eval_shape(lambda logits: jax.vjp(lambda logits: cross_entropy(logits, labels), logits)[1], logits)
    kept = [leaf for leaf in jax.tree.leaves(backward) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    shapes = sorted((leaf.shape, str(leaf.dtype)) for leaf in kept)
    assert shapes == [((16,), "float32")] * 2 + [((16, 5000), "bfloat16")]


def test_a_common_offset_of_the_logits_changes_nothing():
    # float32 has steps of 8 at 1e8, so the logits are rounded first: all forms then see the same numbers.
    offsets = np.array([0.0, 1e4, 1e8, -1e8])[:, None, None]
    logits = np.float32(8.0 * np.random.default_rng(5).integers(0, 4, (1, 6, 9)) + offsets)
    labels = draws.integers(1, 9, 6)
    forms: list[Callable[..., jax.Array]] = [
        # The rows of a unit matrix pick the logits out of the kernel, four classes at a time.
        lambda logits: linear_cross_entropy(jnp.eye(6), logits, labels, chunk=4),
        lambda logits: cross_entropy(logits, labels),
        lambda logits: cross_entropy(logits, labels, 0.1),
    ]

    def graded(loss: Callable[..., jax.Array], logits: jax.Array) -> Any:
        return loss(logits), jax.grad(lambda logits: loss(logits).sum())(logits)

    run = jax.jit(lambda logits: [jax.vmap(functools.partial(graded, loss))(logits) for loss in forms])
    for losses, gradients in run(logits):
        assert_close(losses, np.broadcast_to(losses[0], losses.shape), 1e-6, 1e-6)
        assert_close(gradients, np.broadcast_to(gradients[0], gradients.shape), 1e-5, 1e-7)


def test_smoothing_traced_as_0_with_an_excluded_class_is_none():
    logits, labels = jnp.array([1.0, 0.5, -jnp.inf]), jnp.array([0, 2])
    graded = jax.vmap(jax.value_and_grad(cross_entropy), (None, 0, None))
    run = jax.jit(lambda rates: [graded(logits, labels, rate) for rate in (0.0, *rates)])
    expected, none, smoothed = run((0.0, 0.1))
    assert_close(none, expected, 1e-6)
    # Of a class that cannot be, a share of the target costs infinitely much.
    assert not np.isfinite(smoothed[0]).any()


def linear_case(shape: tuple[int, ...], features: int, classes: int, dtype: str = "float32") -> Any:
    shapes = ((*shape, features), (features, classes), (classes,))
    arrays = (draws.normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    return *arrays, draws.integers(3, classes, *shape)


def plain_linear(hidden: Any, kernel: Any, labels: Any, bias: Any = None) -> Any:
    return plain(hidden @ kernel + (0.0 if bias is None else jnp.expand_dims(bias, range(hidden.ndim - 1))), labels)


CHUNKS = [(12, 4, False), (13, 4, True), (5, 100, True), (1, 3, False)]


def test_chunks_of_classes_equal_the_plain_formula_in_float64():
    def graded(loss: Callable[..., jax.Array], given: Any, labels: jax.Array) -> Any:
        weights = draws.normal(4, *labels.shape, dtype="float64")
        weighed = lambda hidden, kernel, bias: jnp.sum(weights * loss(hidden, kernel, labels, bias))  # noqa: E731
        return jax.vmap(jax.value_and_grad(weighed, (0, 1, 2)), (None, 0, None))(*given)  # of two kernels

    def run(cases: Any) -> Any:
        chunked = [functools.partial(linear_cross_entropy, chunk=size) for _, size, _ in CHUNKS]
        return [
            [graded(loss, *case) for loss in (ours, plain_linear)] for ours, case in zip(chunked, cases, strict=True)
        ]

    with jax.enable_x64(True):
        cases = []
        for classes, _, with_bias in CHUNKS:
            hidden, kernel, bias, labels = linear_case((2, 3), 5, classes, "float64")
            cases.append(((hidden, np.stack([kernel, 2 * kernel]), bias if with_bias else None), labels))
        for found, expected in jax.jit(run)(cases):
            assert_close(found, expected, 1e-10, 1e-12)


def test_memory_is_one_copy_of_the_logits_or_none():
    hidden, kernel, _, labels = linear_case((256,), 8, 4096)
    logits_bytes = 4 * 256 * 4096

    def temporary_bytes(loss: Callable[..., jax.Array]) -> int:
        compiled = jax.jit(jax.grad(lambda *args: loss(*args).mean(), (0, 1))).lower(hidden, kernel).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporary_bytes(lambda hidden, kernel: cross_entropy(hidden @ kernel, labels)) < 1.2 * logits_bytes
    linear = functools.partial(linear_cross_entropy, labels=labels, chunk=256)
    assert temporary_bytes(linear) < 0.4 * logits_bytes
