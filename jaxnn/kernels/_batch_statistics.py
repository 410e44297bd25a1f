"""Mean and variance of each channel of a batch, and the sums of their backward pass."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn._batch_context import batch_sharding
from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._package import native_call


def _moments_by_xla(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = tuple(range(x.ndim - 1))
    mean = x.mean(rows, keepdims=True)
    return mean, jnp.square(x - mean).mean(rows, keepdims=True)


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


def _unfit(x: Any, *others: Any) -> str | None:
    if any(array.dtype != jnp.float32 for array in (x, *others)):
        return "it sums in float32"
    if batch_sharding(0) is not None:
        return "devices share the batch"
    return None if x.size else "there are no rows or channels"


# Of ``x [..., channels]``: mean and variance ``[1, ..., channels]``, in two passes, exact for a large mean too.
moments = Kernel("normalization", _moments_by_xla, lambda x: _natively("jaxnn_moments", [x]), _unfit)

# Of ``grad`` and ``x [..., channels]`` and ``mean [1, ..., channels]``: the sums of grad and of its products with
# ``x - mean``, ``[1, ..., channels]``.
channel_sums = Kernel(
    "normalization",
    _sums_by_xla,
    lambda grad, x, mean: _natively("jaxnn_channel_sums", [grad, x], mean),
    _unfit,
)
