"""Softmax cross-entropy that keeps the logits as they come: one copy of them, not three in float32."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnn.nn.custom_vjp import custom_vjp
from jaxnn.nn.ids import widened
from jaxnn.nn.varying import varying_alike
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


def finite(highest: jax.Array) -> jax.Array:
    """``highest``, the largest logits, with 0 where they are not finite and nothing can be subtracted."""
    return jnp.where(jnp.isfinite(highest), highest, 0)


@custom_vjp
def _cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: jax.Array | None) -> jax.Array:
    return _forward(logits, labels, smoothing)[0]


def _forward(logits: jax.Array, labels: jax.Array, smoothing: jax.Array | None) -> tuple[jax.Array, Any]:
    highest = finite(logits.max(-1).astype(wide(logits)))
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
    return chosen[..., 0].astype(wide(logits))


def _mean_above(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """The mean over the classes of ``logits - chosen[..., None]``: of the difference, which has no large offset."""
    return jnp.mean(logits.astype(chosen.dtype) - chosen[..., None], axis=-1)
