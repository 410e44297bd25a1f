"""Softmax cross-entropy that keeps one copy of the logits."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnn.kernels import custom_vjp
from jaxnn.nn._layer_arguments import at_least_int32
from jaxnn.types import ConfigError


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: ArrayLike = 0.0) -> jax.Array:
    """Softmax cross-entropy of integer labels, with label smoothing.

    The target is ``1 - label_smoothing`` for the label plus ``label_smoothing / classes`` for every class (Szegedy et
    al. 2016, "Rethinking the Inception Architecture"). Computed in float32 or wider from logits less their maximum, so
    that a large common offset costs no accuracy. For the backward pass it keeps the logits in their own dtype and two
    numbers per label; the gradient is one pass without a scatter. Unlike
    ``optax.softmax_cross_entropy_with_integer_labels`` the result is float32 for narrower logits.

    >>> logits = jnp.log(jnp.array([[1.0, 2.0, 5.0]]))  # probabilities 1/8, 2/8, 5/8
    >>> jn.nn.cross_entropy(logits, jnp.array([2]))
    Array([0.47...], dtype=float32)

    Args:
        logits: ``[..., classes]`` floats.
        labels: ``[...]`` integers in ``[0, classes)``; any other label gives a loss of NaN.
        label_smoothing: ``[]`` 0…1; may be a tracer.

    Returns:
        ``[...]`` in nats.
    """
    labels = _checked_labels(labels, "logits [..., classes]", logits)
    outside = isinstance(label_smoothing, numbers.Real) and not 0 <= label_smoothing <= 1
    if jnp.ndim(label_smoothing) or outside:
        raise ConfigError(f"cross_entropy: label_smoothing must be one number in 0…1, not {label_smoothing!r}.")
    is_sharp = isinstance(label_smoothing, numbers.Real) and label_smoothing == 0
    smoothing = None if is_sharp else jnp.asarray(label_smoothing, _wide(logits))
    return _cross_entropy(logits, labels, smoothing)


def _checked_labels(labels: jax.Array, name: str, scores: jax.Array) -> jax.Array:
    """``labels`` as int32 or wider; ConfigError unless they are integers, one for each row of ``scores``."""
    if not jnp.issubdtype(labels.dtype, jnp.integer) or scores.ndim < 1 or labels.shape != scores.shape[:-1]:
        raise ConfigError(
            f"cross-entropy needs {name} and labels [...] of integers, not {list(scores.shape)} and "
            f"{labels.dtype} {list(labels.shape)}."
        )
    return at_least_int32(labels)


def _wide(scores: jax.Array) -> Any:
    return jnp.promote_types(scores.dtype, jnp.float32)


def _finite(highest: jax.Array) -> jax.Array:
    """``highest``, the largest logits, with 0 where they are not finite and nothing can be subtracted."""
    return jnp.where(jnp.isfinite(highest), highest, 0)


def _forward(logits: jax.Array, labels: jax.Array, smoothing: jax.Array | None) -> tuple[jax.Array, Any]:
    highest = _finite(logits.max(-1).astype(_wide(logits)))
    total = jnp.sum(jnp.exp(logits.astype(highest.dtype) - highest[..., None]), axis=-1)
    chosen = _of_labels(logits, labels)
    expected = chosen - highest
    if smoothing is not None:
        # 0 times minus infinity, the logit of an excluded class, is 0 here.
        expected = expected + jnp.where(smoothing > 0, smoothing * _mean_above(logits, chosen), 0.0)
    return jnp.log(total) - expected, (logits, labels, smoothing, highest, total)


def _backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, None, jax.Array | None]:
    logits, labels, smoothing, highest, total = residuals
    # Not `logits - highest`, as in the forward pass: XLA would keep the difference.
    softmax = jnp.exp(logits.astype(highest.dtype) + (-highest)[..., None]) * (cotangent / total)[..., None]
    on_label, on_all, to_smoothing = cotangent, jnp.zeros_like(cotangent), None
    if smoothing is not None:
        on_all = cotangent * smoothing / logits.shape[-1]
        on_label = cotangent * (1.0 - smoothing) + on_all
        to_smoothing = -jnp.sum(cotangent * _mean_above(logits, _of_labels(logits, labels)))
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    gradient = softmax - jnp.where(is_label, on_label[..., None], on_all[..., None])
    return gradient.astype(logits.dtype), None, to_smoothing


_cross_entropy = custom_vjp(lambda *arrays: _forward(*arrays)[0])
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
