"""Softmax cross-entropy of a linear layer without its logits: a chunk of the classes at a time."""

from __future__ import annotations

import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnn.nn.cross_entropy import checked_labels, finite, wide
from jaxnn.nn.custom_vjp import custom_vjp
from jaxnn.nn.varying import varying_alike
from jaxnn.types import ConfigError


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
    labels = checked_labels(labels, hidden.shape[:-1], "hidden [..., features]", hidden)
    features = hidden.shape[-1]
    fits = (
        kernel.ndim == 2
        and kernel.shape[0] == features
        and kernel.size
        and (bias is None or bias.shape == kernel.shape[1:])
    )
    if not fits:
        shapes = {"hidden": hidden.shape, "kernel": kernel.shape, "bias": None if bias is None else bias.shape}
        raise ConfigError(
            "linear_cross_entropy needs hidden [..., features], a kernel [features, classes] and a bias [classes] or "
            f"None, not {', '.join(f'{name} {shape}' for name, shape in shapes.items())}."
        )
    if not isinstance(chunk, numbers.Integral) or chunk < 1:
        raise ConfigError(f"linear_cross_entropy: chunk must be an integer >= 1, not {chunk!r}.")
    arrays = varying_alike(hidden.reshape(-1, features), kernel, bias, labels.reshape(-1))
    loss: jax.Array = _linear_cross_entropy(*arrays, int(chunk))
    return loss.reshape(labels.shape)


class _Chunks(NamedTuple):
    """Equally wide ranges of classes, as few as may be; the last may begin within the one before.

    Attributes:
        firsts: ``[chunks]`` the first class that is each chunk's own.
        width: how many classes each spans.
        classes: how many there are in all.
    """

    firsts: jax.Array
    width: int
    classes: int

    def start(self, first: jax.Array) -> jax.Array:
        return jnp.minimum(first, self.classes - self.width)

    def part(self, array: jax.Array, first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, self.start(first), self.width, axis=-1)

    def added(self, array: jax.Array, first: jax.Array, part: jax.Array) -> jax.Array:
        total = self.part(array, first) + part.astype(array.dtype)
        return jax.lax.dynamic_update_slice_in_dim(array, total, self.start(first), axis=-1)


def _chunks(classes: int, chunk: int) -> _Chunks:
    count = -(-classes // chunk)
    width = -(-classes // count)
    return _Chunks(jnp.arange(count) * width, width, classes)


def _chunk_logits(
    chunks: _Chunks, first: jax.Array, hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits ``[labels, width]``, ``-inf`` where another chunk counts the class; and which are the labels'."""
    classes = chunks.start(first) + jnp.arange(chunks.width)
    logits = jnp.matmul(hidden, chunks.part(kernel, first), preferred_element_type=wide(hidden))
    if bias is not None:
        logits = logits + chunks.part(bias, first)[None]
    is_own = (classes >= first)[None]
    return jnp.where(is_own, logits, _varying_zero(first, logits) - jnp.inf), is_own & (
        classes[None] == labels[:, None]
    )


def _varying_zero(first: jax.Array, logits: jax.Array) -> jax.Array:
    """0 that depends on the loop's counter.

    JAX moves constants ``[labels, width]`` out of a loop it differentiates, and XLA then holds them in memory.
    """
    return (0 * first).astype(logits.dtype)


@functools.partial(custom_vjp, nondiff_argnums=(4,))
def _linear_cross_entropy(
    hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array, chunk: int
) -> jax.Array:
    return _forward(hidden, kernel, bias, labels, chunk)[0]


def _forward(
    hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array, chunk: int
) -> tuple[jax.Array, Any]:
    chunks = _chunks(kernel.shape[1], chunk)

    def of_chunk(first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits, is_label = _chunk_logits(chunks, first, hidden, kernel, bias, labels)
        highest = logits.max(-1)
        total = jnp.sum(jnp.exp(logits - finite(highest)[:, None]), axis=-1)
        return highest, total, jnp.sum(jnp.where(is_label, logits, _varying_zero(first, logits)), axis=-1)

    maxima, totals, chosen = jax.lax.map(of_chunk, chunks.firsts)
    highest = finite(maxima.max(0))
    log_sum = jnp.log(jnp.sum(totals * jnp.exp(maxima - highest[None]), axis=0))
    is_class = (labels >= 0) & (labels < chunks.classes)
    loss = jnp.where(is_class, log_sum - (chosen.sum(axis=0) - highest), jnp.nan)
    return loss, (hidden, kernel, bias, labels, highest, log_sum)


def _backward(chunk: int, residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    hidden, kernel, bias, labels, highest, log_sum = residuals
    chunks = _chunks(kernel.shape[1], chunk)
    matmul = functools.partial(jnp.matmul, preferred_element_type=wide(hidden))

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

    zeros = (jnp.zeros_like(hidden, wide(hidden)), jnp.zeros_like(kernel), jax.tree.map(jnp.zeros_like, bias))
    to_hidden, to_kernel, to_bias = jax.lax.scan(add_chunk, zeros, chunks.firsts)[0]
    return to_hidden.astype(hidden.dtype), to_kernel, to_bias, None


def _pushforward(chunk: int, residuals: Any, tangents: tuple[Any, ...]) -> jax.Array:
    *arrays, labels, _, _ = residuals

    def loss(hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        return _forward(hidden, kernel, bias, labels, chunk)[0]

    tangent: jax.Array = jax.jvp(loss, tuple(arrays), tangents[:3])[1]
    return tangent


_linear_cross_entropy.defvjp(_forward, _backward, _pushforward)
