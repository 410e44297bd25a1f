"""A convolution and its gradients, each as a convolution with channels last: the one form XLA:CPU runs fast anywhere.

Elsewhere than in a program's entry, as in a loop, it does not bring convolutions into this form itself (jax#12868).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnn.nn.varying import varying_alike

THIN = 4  # up to so many features, as of images, are few
_CHUNK = 8  # examples
_CACHED = 1_000_000  # elements of float32 that a processor's caches hold beside what else a network keeps there


class Geometry(NamedTuple):
    """All of a convolution but its arrays, with one entry for each spatial axis.

    Attributes:
        input_size: of the input, not dilated or padded.
        kernel_size: of the kernel, not dilated.
        output_size: of the output.
        strides: of the window.
        padding: ``(low, high)`` of the dilated input.
        input_dilation: 1 is none.
        kernel_dilation: 1 is none.
        dtype: of input and kernel, floating.
        output_dtype: of the output.
        preferred_element_type: as in ``jax.lax``.
        precision: as in ``jax.lax``.
    """

    input_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    output_size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    dtype: Any
    output_dtype: Any
    preferred_element_type: Any
    precision: Any

    def dilated(self) -> zip[tuple[int, int, int, int]]:
        """For each axis the sizes of input and kernel dilated, of the output by the strides, and the low padding."""
        factors = (self.input_dilation, self.kernel_dilation, self.strides)
        sizes = (self.input_size, self.kernel_size, self.output_size)
        spread = [
            [(size - 1) * factor + 1 for size, factor in zip(*pair, strict=True)]
            for pair in zip(sizes, factors, strict=True)
        ]
        return zip(*spread, [low for low, _ in self.padding], strict=True)


def channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    """The dimension numbers of ``[batch, *spatial, features]`` and ``[*spatial, in_features, out_features]``."""
    arrays = (0, ndim - 1, *range(1, ndim - 1))
    return lax.ConvDimensionNumbers(arrays, (ndim - 1, ndim - 2, *range(ndim - 2)), arrays)


def output(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """The convolution itself: ``[batch, *output_size, out_features]``."""
    g = geometry
    return _convolve(inputs, kernel, g, g.strides, g.padding, g.input_dilation, g.kernel_dilation)


def input_gradient(kernel: jax.Array, output: jax.Array, geometry: Geometry) -> jax.Array:
    """``[batch, *input_size, in_features]``: the kernel is turned, strides and input dilation change places."""
    g = geometry
    padding = tuple((k - 1 - low, x - y + low) for x, k, y, low in g.dilated())
    turned = jnp.flip(kernel, range(kernel.ndim - 2)).swapaxes(-2, -1)
    return _convolve(output, turned, g, g.input_dilation, padding, g.strides, g.kernel_dilation)


def kernel_gradient(inputs: jax.Array, output: jax.Array, geometry: Geometry) -> jax.Array:
    """``[*kernel_size, in_features, out_features]``: summed over chunks of the batch where that is faster."""
    batch = inputs.shape[0]
    # A symbolic batch (`jax.export`) has no chunks: how many there are is not known.
    if not isinstance(batch, int) or batch <= _CHUNK or not _in_chunks(inputs, output):
        return _kernel_gradient(inputs, output, geometry)
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    gradient = functools.partial(_kernel_gradient, geometry=geometry._replace(preferred_element_type=dtype))
    whole = batch - batch % _CHUNK
    chunks = [array[:whole].reshape(-1, _CHUNK, *array.shape[1:]) for array in (inputs, output)]
    zeros = jnp.zeros((*geometry.kernel_size, inputs.shape[-1], output.shape[-1]), dtype)
    total, _ = varying_alike(zeros, inputs)
    total, _ = lax.scan(lambda total, chunk: (total + gradient(*chunk), None), total, chunks)
    return total if whole == batch else total + gradient(inputs[whole:], output[whole:])


def _in_chunks(inputs: jax.Array, output: jax.Array) -> bool:
    """Thin inputs, or more than the caches hold: 1.2–3× faster there (measured on CPU), no faster elsewhere."""
    return inputs.shape[-1] <= THIN or inputs.size + output.size > _CACHED


def _kernel_gradient(inputs: jax.Array, output: jax.Array, geometry: Geometry) -> jax.Array:
    """Input features are the batch, the batch the features summed over, and strides a dilation of the kernel."""
    g = geometry
    padding = tuple((low, y + k - 1 - x - low) for x, k, y, low in g.dilated())
    features_first = inputs.swapaxes(0, -1)
    batch_as_features = jnp.moveaxis(output, 0, -2)
    gradient = _convolve(features_first, batch_as_features, g, g.kernel_dilation, padding, g.input_dilation, g.strides)
    return jnp.moveaxis(gradient, 0, -2)


def _convolve(
    inputs: jax.Array,
    kernel: jax.Array,
    geometry: Geometry,
    strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
) -> jax.Array:
    return lax.conv_general_dilated(
        inputs,
        kernel,
        strides,
        padding,
        input_dilation,
        kernel_dilation,
        channels_last(inputs.ndim),
        precision=geometry.precision,
        preferred_element_type=geometry.preferred_element_type,
    )
