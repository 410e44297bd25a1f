"""What normalisation layers compute, with backward passes that read the inputs as few times as can be.

Automatic differentiation sums a cotangent over the inputs once for each of mean, variance, gain and bias. By hand two
sums do, and where each row is normalised by itself they are matrix products. Whatever is of the size of the statistics
(epsilon, square roots, gains) stays with automatic differentiation.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnn.nn.custom_vjp import custom_vjp


@partial(custom_vjp, nondiff_argnums=(1, 2))
def moments(
    x: jax.Array, axes: tuple[int, ...], dtype: DTypeLike, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over ``axes``, in two passes: exact also where the mean is large beside the deviation.

    Args:
        x: floats of any shape.
        axes: what is averaged over; kept with size 1.
        dtype: of the sums and of the results.
        rows: ``[rows, 1, ..., 1]`` bool, which along the first axis, one of ``axes``, count; None: all. If none does,
            both moments are 0.
    """
    wide = x.astype(dtype)
    mean = _mean(wide, axes, rows)
    return mean, _mean(jnp.square(wide - mean), axes, rows)


def _mean(wide: jax.Array, axes: tuple[int, ...], rows: jax.Array | None) -> jax.Array:
    if rows is None:
        return wide.mean(axes, keepdims=True)
    # Of each row first, so that only these means are selected from.
    means = jnp.where(rows, wide.mean(axes[1:], keepdims=True), 0)
    return means.sum(0, keepdims=True) / jnp.maximum(rows.sum(), 1)


type _Kept = tuple[jax.Array, jax.Array, jax.Array | None]


def _moments_forward(
    x: jax.Array, axes: tuple[int, ...], dtype: DTypeLike, rows: jax.Array | None
) -> tuple[tuple[jax.Array, jax.Array], _Kept]:
    mean, variance = moments(x, axes, dtype, rows)
    return (mean, variance), (x, mean, rows)


def _moments_backward(
    axes: tuple[int, ...], dtype: DTypeLike, kept: _Kept, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    x, mean, rows = kept
    to_mean, to_variance = cotangents
    count: int | jax.Array = math.prod(x.shape[axis] for axis in axes)
    if rows is not None:
        count = jnp.maximum(rows.sum(), 1) * (count // max(1, len(x)))
    # The variance does not change with the mean it is taken about, so nothing is summed here.
    grad = to_mean / count + (x.astype(dtype) - mean) * (2 * to_variance / count)
    grad = grad if rows is None else jnp.where(rows, grad, 0)
    return grad.astype(x.dtype), None


moments.defvjp(_moments_forward, _moments_backward)


@custom_vjp
def scale_channels(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """``(x - mean) * factor + bias`` where each channel has its own.

    Args:
        x: ``[..., channels]`` floats.
        mean: ``[1, ..., channels]``, as ``factor`` and ``bias``; their dtype is that of the result.
        factor: ``[1, ..., channels]``.
        bias: ``[1, ..., channels]``.
    """
    return (x.astype(mean.dtype) - mean) * factor + bias


type _Four = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
type _Five = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def _channels_forward(
    x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return scale_channels(x, mean, factor, bias), (x, mean, factor)


def _channels_backward(kept: tuple[jax.Array, jax.Array, jax.Array], grad: jax.Array) -> _Four:
    x, mean, factor = kept
    rows = tuple(range(x.ndim - 1))
    total = grad.sum(rows, keepdims=True)
    to_factor = (grad * (x.astype(mean.dtype) - mean)).sum(rows, keepdims=True)
    return (grad * factor).astype(x.dtype), -total * factor, to_factor, total


scale_channels.defvjp(_channels_forward, _channels_backward)


@custom_vjp
def scale_rows(x: jax.Array, mean: jax.Array, factor: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """``(x - mean) * factor * gain + bias`` where each row has its own mean and factor.

    Args:
        x: ``[..., features]`` floats.
        mean: ``[..., 1]``, as ``factor``; their dtype, and that of gain and bias, is that of the result.
        factor: ``[..., 1]``.
        gain: ``[1, ..., features]``.
        bias: ``[1, ..., features]``.
    """
    return (x.astype(mean.dtype) - mean) * factor * gain + bias


def _rows_forward(
    x: jax.Array, mean: jax.Array, factor: jax.Array, gain: jax.Array, bias: jax.Array
) -> tuple[jax.Array, _Four]:
    return scale_rows(x, mean, factor, gain, bias), (x, mean, factor, gain)


def _rows_backward(kept: _Four, grad: jax.Array) -> _Five:
    x, mean, factor, gain = kept
    product = grad * (x.astype(mean.dtype) - mean)
    rows, column = grad.reshape(-1, grad.shape[-1]), gain.reshape(-1, 1)
    # On CPU a matrix product is faster than a sum whose terms are computed on the way.
    to_mean = -factor * (grad @ column)
    to_factor = product @ column
    to_gain = factor.reshape(1, -1) @ product.reshape(rows.shape)
    to_bias = jnp.ones((1, rows.shape[0]), rows.dtype) @ rows
    to_x = (grad * factor * gain).astype(x.dtype)
    return to_x, to_mean, to_factor, to_gain.reshape(gain.shape), to_bias.reshape(gain.shape)


scale_rows.defvjp(_rows_forward, _rows_backward)
