"""Softmax cross-entropy that keeps the logits as they come: one copy of them, not three in float32."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnn.nn.ids import widened
from jaxnn.nn.varying import varying_alike
from jaxnn.types import ConfigError


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: ArrayLike = 0.0) -> jax.Array:
    """Cross-entropy against ``1 - label_smoothing`` of the label and ``label_smoothing / classes`` of every class.

    ``logsumexp(logits)`` less the expected logit, computed in float32 or wider. From the forward pass it keeps the
    logits in their own dtype and one number a label; the gradient, ``softmax(logits)`` less the target, is made anew in
    one pass, without a scatter. Smoothing is that of Szegedy et al. 2016, "Rethinking the Inception Architecture".

    Unlike ``optax.softmax_cross_entropy_with_integer_labels`` the result is float32 for narrower logits, and there is
    no forward-mode derivative (``jax.jvp``, ``jax.jacfwd``) of it, though there is of its gradient.

    Args:
        logits: ``[..., classes]`` floats.
        labels: ``[...]`` integers, 0 to below ``classes``; of a label outside the loss is NaN.
        label_smoothing: ``[]`` the share of a target spread evenly over all classes, 0…1; may be a tracer.

    Returns:
        ``[...]`` in nats.

    Raises:
        ConfigError: logits, labels or smoothing that do not fit.
    """
    labels = checked_labels(labels, logits.shape[:-1], "logits [..., classes]", logits)
    outside = isinstance(label_smoothing, numbers.Real) and not 0 <= label_smoothing <= 1
    if jnp.ndim(label_smoothing) or outside:
        raise ConfigError(f"cross_entropy: label_smoothing must be one number, 0…1, not {label_smoothing!r}.")
    is_sharp = isinstance(label_smoothing, numbers.Real) and label_smoothing == 0
    smoothing = None if is_sharp else jnp.asarray(label_smoothing, wide(logits))
    loss: jax.Array = _cross_entropy(*varying_alike(logits, labels, smoothing))
    return loss


def checked_labels(labels: jax.Array, expected: tuple[int, ...], name: str, scores: jax.Array) -> jax.Array:
    """``labels`` as int32 or wider, integers of shape ``expected``, that of ``scores`` but for the last axis.

    Raises:
        ConfigError: they are not.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer) or scores.ndim < 1 or labels.shape != expected:
        raise ConfigError(
            f"cross-entropy needs {name} and labels [...] of integers, not {list(scores.shape)} and "
            f"{labels.dtype} {list(labels.shape)}."
        )
    return widened(labels)


def wide(scores: jax.Array) -> Any:
    """The dtype to sum exponentials in: float32, or wider where ``scores`` are."""
    return jnp.promote_types(scores.dtype, jnp.float32)


@jax.custom_vjp
def _cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: jax.Array | None) -> jax.Array:
    return _forward(logits, labels, smoothing)[0]


def _forward(logits: jax.Array, labels: jax.Array, smoothing: jax.Array | None) -> tuple[jax.Array, Any]:
    normaliser = jax.nn.logsumexp(logits.astype(wide(logits)), axis=-1)
    chosen = _of_labels(logits, labels)
    if smoothing is not None:
        chosen = chosen + smoothing * (_mean(logits) - chosen)
    return normaliser - chosen, (logits, labels, smoothing, normaliser)


def _backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, None, jax.Array | None]:
    logits, labels, smoothing, normaliser = residuals
    gradient = jnp.exp(logits.astype(wide(logits)) - normaliser[..., None])
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    if smoothing is None:
        return ((gradient - is_label) * cotangent[..., None]).astype(logits.dtype), None, None
    gradient = gradient - jnp.where(is_label, 1.0 - smoothing, 0.0) - smoothing / logits.shape[-1]
    to_smoothing = jnp.sum(cotangent * (_of_labels(logits, labels) - _mean(logits)))
    return (gradient * cotangent[..., None]).astype(logits.dtype), None, to_smoothing


_cross_entropy.defvjp(_forward, _backward)


def _of_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The logit of each label; NaN for one that is no class, negative ones too."""
    classes = logits.shape[-1]
    known = jnp.where(labels < 0, classes, labels)
    chosen = jnp.take_along_axis(logits, known[..., None], axis=-1, mode="fill", fill_value=jnp.nan)
    return chosen[..., 0].astype(wide(logits))


def _mean(logits: jax.Array) -> jax.Array:
    return jnp.mean(logits, axis=-1, dtype=wide(logits))
