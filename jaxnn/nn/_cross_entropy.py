"""Softmax cross-entropy that keeps the logits as they come, one copy of them, or that never makes them."""

from __future__ import annotations

import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnn.nn._custom_vjp import custom_vjp
from jaxnn.nn._device_axes import varying_alike
from jaxnn.nn._layer_arguments import widened
from jaxnn.types import ConfigError


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: ArrayLike = 0.0) -> jax.Array:
    """Cross-entropy against ``1 - label_smoothing`` of the label and ``label_smoothing / classes`` of every class.

    ``logsumexp(logits)`` less the expected logit, computed in float32 or wider, of logits less their maximum: an offset
    common to all classes costs no accuracy. From the forward pass it keeps the logits in their own dtype and two
    numbers per label; the gradient, ``softmax(logits)`` less the target, is computed from them in one pass, without a
    scatter. Smoothing is that of Szegedy et al. 2016, "Rethinking the Inception Architecture".

    Unlike ``optax.softmax_cross_entropy_with_integer_labels`` the result is float32 for narrower logits.

    Args:
        logits: ``[..., classes]`` floats.
        labels: ``[...]`` integers, 0 to below ``classes``; of a label outside the loss is NaN.
        label_smoothing: ``[]`` the share of a target spread evenly over all classes, 0…1; may be a tracer.

    Returns:
        ``[...]`` in nats.

    Raises:
        ConfigError: logits, labels or smoothing that do not fit.
    """
    labels = _checked_labels(labels, logits.shape[:-1], "logits [..., classes]", logits)
    outside = isinstance(label_smoothing, numbers.Real) and not 0 <= label_smoothing <= 1
    if jnp.ndim(label_smoothing) or outside:
        raise ConfigError(f"cross_entropy: label_smoothing must be one number, 0…1, not {label_smoothing!r}.")
    is_sharp = isinstance(label_smoothing, numbers.Real) and label_smoothing == 0
    smoothing = None if is_sharp else jnp.asarray(label_smoothing, _wide(logits))
    return _cross_entropy(*varying_alike(logits, labels, smoothing))


def _checked_labels(labels: jax.Array, expected: tuple[int, ...], name: str, scores: jax.Array) -> jax.Array:
    """``labels`` as int32 or wider; ConfigError unless they are integers of shape ``expected``."""
    if not jnp.issubdtype(labels.dtype, jnp.integer) or scores.ndim < 1 or labels.shape != expected:
        raise ConfigError(
            f"cross-entropy needs {name} and labels [...] of integers, not {list(scores.shape)} and "
            f"{labels.dtype} {list(labels.shape)}."
        )
    return widened(labels)


def _wide(scores: jax.Array) -> Any:
    return jnp.promote_types(scores.dtype, jnp.float32)


def _finite(highest: jax.Array) -> jax.Array:
    """``highest``, the largest logits, with 0 where they are not finite and nothing can be subtracted."""
    return jnp.where(jnp.isfinite(highest), highest, 0)


@custom_vjp
def _cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: jax.Array | None) -> jax.Array:
    return _forward(logits, labels, smoothing)[0]


def _forward(logits: jax.Array, labels: jax.Array, smoothing: jax.Array | None) -> tuple[jax.Array, Any]:
    highest = _finite(logits.max(-1).astype(_wide(logits)))
    total = jnp.sum(jnp.exp(logits.astype(highest.dtype) - highest[..., None]), axis=-1)
    chosen = _of_labels(logits, labels)
    expected = chosen - highest
    if smoothing is not None:
        # A share of 0 is nothing also of minus infinity, the logit of a class that is excluded.
        expected = expected + jnp.where(smoothing > 0, smoothing * _mean_above(logits, chosen), 0.0)
    return jnp.log(total) - expected, (logits, labels, smoothing, highest, total)


def _backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, None, jax.Array | None]:
    logits, labels, smoothing, highest, total = residuals
    # Not `logits - highest`, which is the same: XLA would keep the difference that it shares with the forward pass.
    softmax = jnp.exp(logits.astype(highest.dtype) + (-highest)[..., None]) * (cotangent / total)[..., None]
    on_label, on_all, to_smoothing = cotangent, jnp.zeros_like(cotangent), None
    if smoothing is not None:
        on_all = cotangent * smoothing / logits.shape[-1]
        on_label = cotangent * (1.0 - smoothing) + on_all
        to_smoothing = -jnp.sum(cotangent * _mean_above(logits, _of_labels(logits, labels)))
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    gradient = softmax - jnp.where(is_label, on_label[..., None], on_all[..., None])
    return gradient.astype(logits.dtype), None, to_smoothing


_cross_entropy.defvjp(_forward, _backward)


def _of_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The logit of each label; NaN for one that is no class, negative ones too."""
    classes = logits.shape[-1]
    known = jnp.where(labels < 0, classes, labels)
    chosen = jnp.take_along_axis(logits, known[..., None], axis=-1, mode="fill", fill_value=jnp.nan)
    return chosen[..., 0].astype(_wide(logits))


def _mean_above(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """The mean over the classes of ``logits - chosen[..., None]``: of the difference, which has no large offset."""
    return jnp.mean(logits.astype(chosen.dtype) - chosen[..., None], axis=-1)


def linear_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    chunk: int = 4096,
) -> jax.Array:
    """``cross_entropy(hidden @ kernel + bias, labels)`` without the logits: a chunk of the classes at a time.

    Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (arXiv:2411.09009), as a scan over
    matrix products. The most that exists at once is ``[labels, chunk]`` floats, three of them, instead of ``[labels,
    classes]``; the price is one more product of the size of the forward one, in the backward pass. Use it where the
    logits do not fit or their memory traffic rules, not for some thousand classes.

    Args:
        hidden: ``[..., features]`` floats.
        kernel: ``[features, classes]``, as ``nn.Dense``'s; an embedding's table transposed.
        labels: ``[...]`` integers, 0 to below ``classes``; of a label outside the loss is NaN.
        bias: ``[classes]``, or None.
        chunk: how many classes at a time, at least 1.

    Returns:
        ``[...]`` in nats, float32 or wider.

    Raises:
        ConfigError: arguments that do not fit together.
    """
    labels = _checked_labels(labels, hidden.shape[:-1], "hidden [..., features]", hidden)
    features = hidden.shape[-1]
    fits = kernel.ndim == 2 and kernel.shape[0] == features and kernel.size
    if not fits or not (bias is None or bias.shape == kernel.shape[1:]):
        raise ConfigError(
            "linear_cross_entropy needs hidden [..., features], a kernel [features, classes] and a bias [classes] or "
            f"None, not hidden {hidden.shape}, kernel {kernel.shape}, bias {None if bias is None else bias.shape}."
        )
    if not isinstance(chunk, numbers.Integral) or chunk < 1:
        raise ConfigError(f"linear_cross_entropy: chunk must be an integer >= 1, not {chunk!r}.")
    arrays = varying_alike(hidden.reshape(-1, features), kernel, bias, labels.reshape(-1))
    return _linear_cross_entropy(*arrays, int(chunk)).reshape(labels.shape)


class _Chunks(NamedTuple):
    """Equally wide ranges of classes, as few as may be; the last may begin within the one before."""

    firsts: jax.Array  # [chunks] the first class that is each chunk's own
    width: int  # classes that each spans
    classes: int  # in all

    def part(self, array: jax.Array, first: jax.Array) -> jax.Array:
        start = jnp.minimum(first, self.classes - self.width)
        return jax.lax.dynamic_slice_in_dim(array, start, self.width, axis=-1)

    def added(self, array: jax.Array, first: jax.Array, part: jax.Array) -> jax.Array:
        start = jnp.minimum(first, self.classes - self.width)
        total = self.part(array, first) + part.astype(array.dtype)
        return jax.lax.dynamic_update_slice_in_dim(array, total, start, axis=-1)


def _chunks(classes: int, chunk: int) -> _Chunks:
    count = -(-classes // chunk)
    width = -(-classes // count)
    return _Chunks(jnp.arange(count) * width, width, classes)


def _chunk_logits(
    chunks: _Chunks, first: jax.Array, hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits ``[labels, width]``, ``-inf`` where another chunk counts the class; and which are the labels'."""
    classes = chunks.part(jnp.arange(chunks.classes), first)[None]
    logits = jnp.matmul(hidden, chunks.part(kernel, first), preferred_element_type=_wide(hidden))
    if bias is not None:
        logits = logits + chunks.part(bias, first)[None]
    is_own = classes >= first
    return jnp.where(is_own, logits, _varying_zero(first, logits) - jnp.inf), is_own & (classes == labels[:, None])


def _varying_zero(first: jax.Array, logits: jax.Array) -> jax.Array:
    # JAX moves constants [labels, width] out of a loop it differentiates, and XLA then holds them in memory: this 0
    # depends on the loop's counter.
    return (0 * first).astype(logits.dtype)


@functools.partial(custom_vjp, nondiff_argnums=(4,))
def _linear_cross_entropy(
    hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array, chunk: int
) -> jax.Array:
    return _linear_forward(hidden, kernel, bias, labels, chunk)[0]


def _linear_forward(
    hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array, chunk: int
) -> tuple[jax.Array, Any]:
    chunks = _chunks(kernel.shape[1], chunk)

    def of_chunk(first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits, is_label = _chunk_logits(chunks, first, hidden, kernel, bias, labels)
        highest = logits.max(-1)
        total = jnp.sum(jnp.exp(logits - _finite(highest)[:, None]), axis=-1)
        return highest, total, jnp.sum(jnp.where(is_label, logits, _varying_zero(first, logits)), axis=-1)

    maxima, totals, chosen = jax.lax.map(of_chunk, chunks.firsts)
    highest = _finite(maxima.max(0))
    log_sum = jnp.log(jnp.sum(totals * jnp.exp(maxima - highest[None]), axis=0))
    is_class = (labels >= 0) & (labels < chunks.classes)
    loss = jnp.where(is_class, log_sum - (chosen.sum(axis=0) - highest), jnp.nan)
    return loss, (hidden, kernel, bias, labels, highest, log_sum)


def _linear_backward(chunk: int, residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    hidden, kernel, bias, labels, highest, log_sum = residuals
    chunks = _chunks(kernel.shape[1], chunk)
    matmul = functools.partial(jnp.matmul, preferred_element_type=_wide(hidden))

    def add_chunk(gradients: tuple[Any, ...], first: jax.Array) -> tuple[tuple[Any, ...], None]:
        to_hidden, to_kernel, to_bias = gradients
        logits, is_label = _chunk_logits(chunks, first, hidden, kernel, bias, labels)
        softmax = jnp.exp((logits - highest[:, None]) - log_sum[:, None])
        gradient = (softmax - is_label) * cotangent[:, None]
        if bias is not None:
            to_bias = chunks.added(to_bias, first, gradient.sum(axis=0))
        gradient = gradient.astype(hidden.dtype)
        to_hidden = to_hidden + matmul(gradient, chunks.part(kernel, first).T)
        return (to_hidden, chunks.added(to_kernel, first, matmul(hidden.T, gradient)), to_bias), None

    zeros = (jnp.zeros_like(hidden, _wide(hidden)), jnp.zeros_like(kernel), jax.tree.map(jnp.zeros_like, bias))
    to_hidden, to_kernel, to_bias = jax.lax.scan(add_chunk, zeros, chunks.firsts)[0]
    return to_hidden.astype(hidden.dtype), to_kernel, to_bias, None


def _linear_pushforward(chunk: int, residuals: Any, tangents: tuple[Any, ...]) -> jax.Array:
    *arrays, labels, _, _ = residuals
    tangent: jax.Array
    _, tangent = jax.jvp(lambda h, k, b: _linear_forward(h, k, b, labels, chunk)[0], tuple(arrays), tangents[:3])
    return tangent


_linear_cross_entropy.defvjp(_linear_forward, _linear_backward, _linear_pushforward)
