"""Mean and variance of each channel of a batch, and the sums of their backward pass."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnn._batch_context import batch_sharding
from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._package import native_call


def _moments_by_xla(
    x: jax.Array, rows: jax.Array | None, *, axes: tuple[int, ...], dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(dtype)
    mean = _mean(wide, rows, axes)
    return mean, _mean(jnp.square(wide - mean), rows, axes)


def _mean(wide: jax.Array, rows: jax.Array | None, axes: tuple[int, ...]) -> jax.Array:
    if rows is None:
        return wide.mean(axes, keepdims=True)
    # Each row's mean first, so that the selection is among the means only.
    means = jnp.where(rows, wide.mean(axes[1:], keepdims=True), 0)
    return means.sum(0, keepdims=True) / jnp.maximum(rows.sum(), 1)


def _sums_by_xla(grad: jax.Array, x: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = tuple(range(x.ndim - 1))
    products = (grad * (x.astype(mean.dtype) - mean)).sum(rows, keepdims=True)
    return grad.sum(rows, keepdims=True), products


def _natively(target: str, batches: Sequence[jax.Array], *of_channels: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = batches[0].shape
    rows = [batch.reshape(-1, shape[-1]) for batch in batches]
    channels = [array.reshape(shape[-1]) for array in of_channels]
    first, second = native_call(target, [shape[-1:]] * 2, *rows, *channels)
    broad = (1,) * (len(shape) - 1) + shape[-1:]
    return first.reshape(broad), second.reshape(broad)


def _unfit(x: Any, rows: Any, *, axes: tuple[int, ...], dtype: DTypeLike) -> str | None:
    if x.dtype != jnp.float32:
        return "it sums in float32"
    if rows is not None:
        return "the batch has padding"
    if batch_sharding(0) is not None:
        return "devices share the batch"
    return None if x.size else "there are no rows or channels"


# Of ``x``: mean and variance over ``axes``, kept with size 1, in two passes, so that they are exact for a large mean.
# If ``rows [rows, 1, ..., 1]`` bool are given, only rows that are True count; if none is, both are 0. The native form
# takes ``x [..., channels]`` and all axes but the last.
moments = Kernel("normalization", _moments_by_xla, lambda x, *_, **__: _natively("jaxnn_moments", [x]), _unfit)

# Of ``grad`` and ``x [..., channels]`` and ``mean [1, ..., channels]``: the sums of grad and of its products with
# ``x - mean``, ``[1, ..., channels]``. It fits where `moments` does.
channel_sums = Kernel(
    "normalization",
    _sums_by_xla,
    lambda grad, x, mean: _natively("jaxnn_channel_sums", [grad, x], mean),
    lambda *operands: None,
)
