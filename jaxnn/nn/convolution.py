"""Convolution as ``jax.lax``'s, in the form that is fast where it runs, forward and in its gradients."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnn.nn import implementations
from jaxnn.nn.conv_forms import Geometry, channels_last
from jaxnn.nn.conv_primitive import convolve
from jaxnn.types import ConfigError

_MAX_TAPS = 128  # each is an operation in the program


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """A convolution with any strides, padding, dilation and groups, as `jax.lax.conv_general_dilated`.

    For ``flax.linen.Conv(..., conv_general_dilated=jaxnn.nn.conv_general_dilated)``. Implementations:

    - ``"xla"``: ``jax.lax``'s own. On CPU its gradients are slow in a loop such as `jax.lax.scan` (jax#12868), and
      grouped convolutions anywhere, which `jax.vmap` over kernels makes of it too (jax#26568).
    - ``"canonical"``: with channels last in the gradients too, as fast in a loop as outside. Groups and members of
      `jax.vmap` follow one another; a kernel of one element is a matrix product; a depthwise convolution is a sum
      over the kernel's elements.

    Equal within rounding, and differentiable in either mode and to any order. But ``"canonical"`` is in a jaxpr a
    ``channels_last_convolution``, which policies of `jax.checkpoint` that save products do not know: it is computed
    again, unless its result has a name that is saved (`jax.ad_checkpoint.checkpoint_name`).

    Args:
        lhs: the input; ``[batch, *spatial, in_features]`` for ``"canonical"``.
        rhs: the kernel; ``[*spatial, in_features // groups, out_features]`` for ``"canonical"``.
        window_strides: for each spatial axis.
        padding: ``"SAME"``, ``"SAME_LOWER"``, ``"VALID"``, or ``(low, high)`` for each spatial axis.
        lhs_dilation: of the input, for each spatial axis; None is 1.
        rhs_dilation: of the kernel, likewise.
        dimension_numbers: as in ``jax.lax``: None is channels first, which only ``"xla"`` does.
        feature_group_count: the groups of features that do not see each other.
        batch_group_count: only ``"xla"`` does other than 1.
        precision: as in ``jax.lax``.
        preferred_element_type: as in ``jax.lax``: the dtype to sum in and to return.
        implementation: one of the above; None is the best that can be used here.

    Returns:
        The output; ``[batch, *spatial, out_features]`` for ``"canonical"``.

    Raises:
        ConfigError: arguments ``jax.lax`` does not take, or an implementation that is unknown or cannot be used here.
    """
    options = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    rest = (feature_group_count, batch_group_count, precision, preferred_element_type)

    def xla(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, *options, *rest)

    try:
        output = jax.eval_shape(xla, lhs, rhs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"convolution of {lhs.shape} with a kernel {rhs.shape}: {error}") from error
    obstacle = _obstacle(lhs, rhs, output, dimension_numbers, batch_group_count)
    name = implementations.choose("convolution", implementation, {"canonical": obstacle})
    with implementations.scope("convolution", name):
        if name == "xla":
            return xla(lhs, rhs)
        kernel_dilation = tuple(rhs_dilation or (1,) * (rhs.ndim - 2))
        geometry = Geometry(
            input_size=lhs.shape[1:-1],
            kernel_size=rhs.shape[:-2],
            output_size=output.shape[1:-1],
            strides=tuple(window_strides),
            padding=_pads(lhs, rhs, window_strides, padding, kernel_dilation),
            input_dilation=tuple(lhs_dilation or (1,) * (lhs.ndim - 2)),
            kernel_dilation=kernel_dilation,
            dtype=lhs.dtype,
            output_dtype=output.dtype,
            preferred_element_type=preferred_element_type,
            precision=precision,
        )
        return _canonical(lhs, rhs, geometry, feature_group_count)


def _obstacle(
    lhs: jax.Array, rhs: jax.Array, output: jax.ShapeDtypeStruct, dimension_numbers: Any, batch_group_count: int
) -> str | None:
    if lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers) != channels_last(lhs.ndim):
        return "its dimension numbers are not channels last"
    if batch_group_count > 1:
        return "batch_group_count is not 1"
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        return f"{lhs.dtype} is not floating"
    if jax.typeof(lhs).sharding.mesh.explicit_axes:
        return "the mesh has explicit axes"
    return "an array is empty" if 0 in (*lhs.shape, *rhs.shape, *output.shape) else None


def _pads(
    lhs: jax.Array,
    rhs: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    kernel_dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str):
        window = [(size - 1) * factor + 1 for size, factor in zip(rhs.shape[:-2], kernel_dilation, strict=True)]
        padding = lax.padtype_to_pads(lhs.shape[1:-1], window, strides, padding)
    return tuple((int(low), int(high)) for low, high in padding)


def _canonical(inputs: jax.Array, kernel: jax.Array, geometry: Geometry, groups: int) -> jax.Array:
    taps = math.prod(kernel.shape[:-2])
    in_features, out_features = inputs.shape[-1], kernel.shape[-1]
    if groups > 1:
        if groups == in_features == out_features and taps <= _MAX_TAPS:
            return _depthwise(inputs, kernel, geometry)
        return _grouped(inputs, kernel, geometry, groups)
    plain = math.prod(geometry.input_dilation) == 1 and not any(map(any, geometry.padding))
    if taps == 1 and plain:
        return _product(inputs, kernel, geometry)
    return convolve(inputs, kernel, geometry)


def _product(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """With a kernel of one element: the products of the pixels the strides leave."""
    pixels = inputs[:, *(slice(None, None, stride) for stride in geometry.strides)]
    return jnp.matmul(
        pixels,
        kernel.reshape(kernel.shape[-2:]),
        precision=geometry.precision,
        preferred_element_type=geometry.preferred_element_type,
    )


def _grouped(inputs: jax.Array, kernel: jax.Array, geometry: Geometry, groups: int) -> jax.Array:
    """A convolution for each group; XLA:CPU is 3× (forward) to 500× (kernel gradient) slower with them in one."""
    split = inputs.reshape(*inputs.shape[:-1], groups, -1)
    kernels = kernel.reshape(*kernel.shape[:-1], groups, -1)
    results = jax.vmap(lambda x, k: convolve(x, k, geometry), in_axes=-2, out_axes=-2)(split, kernels)
    return results.reshape(*results.shape[:-2], -1)


def _depthwise(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """The sum over the kernel's elements of the input so far shifted, times that element of each feature."""
    g = geometry
    dtype = jnp.promote_types(g.output_dtype, jnp.float32)
    borders = [(low, high, factor - 1) for (low, high), factor in zip(g.padding, g.input_dilation, strict=True)]
    padded = lax.pad(inputs, jnp.zeros((), inputs.dtype), [(0, 0, 0), *borders, (0, 0, 0)]).astype(dtype)

    def term(tap: tuple[int, ...]) -> jax.Array:
        starts = [index * factor for index, factor in zip(tap, g.kernel_dilation, strict=True)]
        windows = zip(starts, g.output_size, g.strides, strict=True)
        shifted = padded[:, *(slice(low, low + (size - 1) * step + 1, step) for low, size, step in windows)]
        return shifted * lax.expand_dims(kernel[*tap, 0].astype(dtype), range(inputs.ndim - 1))

    terms = map(term, itertools.product(*map(range, g.kernel_size)))
    return functools.reduce(jnp.add, terms).astype(g.output_dtype)
