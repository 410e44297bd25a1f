"""Softmax cross-entropy that keeps one copy of the logits, or never materializes them."""

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnn.kernels import custom_vjp
from jaxnn.nn._layer_arguments import at_least_int32, padded_classes
from jaxnn.types import ConfigError, check_int


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


def linear_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    chunk: int = 4096,
) -> jax.Array:
    """``cross_entropy(hidden @ kernel + bias, labels)`` without materializing the logits.

    Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (arXiv:2411.09009), as a scan over chunks
    of classes. Peak memory is three arrays ``[labels, chunk]`` instead of ``[labels, classes]``; the cost is one more
    product of the size of the forward one, in the backward pass. Use it if the logits do not fit into memory, not for
    speed: of 1,024 labels and 32,000 classes in bfloat16, it took 754 µs on an H200, and the plain form 322.

    >>> hidden, kernel = jnp.ones((4, 8)), jnp.zeros((8, 10))
    >>> jn.nn.linear_cross_entropy(hidden, kernel, jnp.array([0, 3, 9, 3]), chunk=5)  # log(10)
    Array([2.30..., 2.30..., 2.30..., 2.30...], dtype=float32)

    Args:
        hidden: ``[..., features]`` floats.
        kernel: ``[features, classes]``, as ``nn.Dense``'s, or a transposed embedding table.
        labels: ``[...]`` integers in ``[0, classes)``; any other label gives a loss of NaN.
        bias: ``[classes]``, or None.
        chunk: maximum number of classes per chunk.

    Returns:
        ``[...]`` in nats, float32 or wider.
    """
    labels = _checked_labels(labels, "hidden [..., features]", hidden)
    features = hidden.shape[-1]
    fits = kernel.ndim == 2 and kernel.shape[0] == features and kernel.size
    if not fits or not (bias is None or bias.shape == kernel.shape[1:]):
        raise ConfigError(
            "linear_cross_entropy needs hidden [..., features], a kernel [features, classes] and a bias [classes] or "
            f"None, not hidden {hidden.shape}, kernel {kernel.shape}, bias {None if bias is None else bias.shape}."
        )
    num_chunks = -(-kernel.shape[1] // check_int("linear_cross_entropy: chunk", chunk))
    width = -(-kernel.shape[1] // num_chunks)  # equal for all, and as small as this many chunks allow
    width = min(padded_classes(width), chunk, kernel.shape[1])
    loss = _linear_cross_entropy(width, hidden.reshape(-1, features), kernel, bias, labels.reshape(-1))
    return loss.reshape(labels.shape)


# A chunk is ``width`` classes. Slices clamp their start, so the last chunk may overlap the one before it:
# `_chunk_logits` counts each class once.
def _part(array: jax.Array, first: jax.Array, width: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, first, width, axis=-1)


def _add_part(array: jax.Array, first: jax.Array, part: jax.Array) -> jax.Array:
    total = _part(array, first, part.shape[-1]) + part.astype(array.dtype)
    return jax.lax.dynamic_update_slice_in_dim(array, total, first, axis=-1)


def _chunk_logits(
    width: int, first: jax.Array, hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits ``[labels, width]``, ``-inf`` if another chunk counts the class; and whether they are the labels'."""
    classes = _part(jnp.arange(kernel.shape[1]), first, width)[None]
    logits = jnp.matmul(hidden, _part(kernel, first, width), preferred_element_type=_wide(hidden))
    if bias is not None:
        logits = logits + _part(bias, first, width)[None]
    is_own = classes >= first
    return jnp.where(is_own, logits, _varying_zero(first, logits) - jnp.inf), is_own & (classes == labels[:, None])


def _varying_zero(first: jax.Array, logits: jax.Array) -> jax.Array:
    # JAX moves constants [labels, width] out of a loop it differentiates, and XLA then holds them in memory: this 0
    # depends on the loop's counter.
    return (0 * first).astype(logits.dtype)


def _linear_forward(
    width: int, hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array
) -> tuple[jax.Array, Any]:
    num_classes = kernel.shape[1]

    def of_chunk(first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits, is_label = _chunk_logits(width, first, hidden, kernel, bias, labels)
        highest = logits.max(-1)
        total = jnp.sum(jnp.exp(logits - _finite(highest)[:, None]), axis=-1)
        return highest, total, jnp.sum(jnp.where(is_label, logits, _varying_zero(first, logits)), axis=-1)

    maxima, totals, chosen = jax.lax.map(of_chunk, jnp.arange(0, num_classes, width))
    highest = _finite(maxima.max(0))
    log_sum = jnp.log(jnp.sum(totals * jnp.exp(maxima - highest[None]), axis=0))
    is_class = (labels >= 0) & (labels < num_classes)
    loss = jnp.where(is_class, log_sum - (chosen.sum(axis=0) - highest), jnp.nan)
    return loss, (hidden, kernel, bias, labels, highest, log_sum)


def _linear_backward(width: int, residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    hidden, kernel, bias, labels, highest, log_sum = residuals
    matmul = functools.partial(jnp.matmul, preferred_element_type=_wide(hidden))

    def add_chunk(gradients: tuple[Any, ...], first: jax.Array) -> tuple[tuple[Any, ...], None]:
        to_hidden, to_kernel, to_bias = gradients
        logits, is_label = _chunk_logits(width, first, hidden, kernel, bias, labels)
        softmax = jnp.exp((logits - highest[:, None]) - log_sum[:, None])
        gradient = (softmax - is_label) * cotangent[:, None]
        if bias is not None:
            to_bias = _add_part(to_bias, first, gradient.sum(axis=0))
        gradient = gradient.astype(hidden.dtype)
        to_hidden = to_hidden + matmul(gradient, _part(kernel, first, width).T)
        return (to_hidden, _add_part(to_kernel, first, matmul(hidden.T, gradient)), to_bias), None

    zeros = (jnp.zeros_like(hidden, _wide(hidden)), jnp.zeros_like(kernel), jax.tree.map(jnp.zeros_like, bias))
    to_hidden, to_kernel, to_bias = jax.lax.scan(add_chunk, zeros, jnp.arange(0, kernel.shape[1], width))[0]
    return to_hidden.astype(hidden.dtype), to_kernel, to_bias, None


_linear_cross_entropy = custom_vjp(lambda *arguments: _linear_forward(*arguments)[0], num_static=1)
_linear_cross_entropy.defvjp(_linear_forward, _linear_backward, push_forward=True)
