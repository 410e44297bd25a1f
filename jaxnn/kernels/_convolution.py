"""A convolution with rules of its own for gradients and members of `jax.vmap`, with channels last.

In a loop, XLA:CPU is fast only if the gradients have channels last too (jax#12868). Members with kernels of their own
are groups to XLA, which are slow on CPUs and with cuDNN: there they run one after another, or as products of patches.

``sum(output * conv(input, kernel))`` is linear in input, kernel and output. Its derivative by one of them (`missing`)
is a function of the other two, and the derivatives of each function are again among the three. Any two share an
axis that the third lacks: the batch, the input features or the output features.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxnn._batch_context import map_rows
from jaxnn.kernels._custom_vjp import vary_together
from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._package import native_call, native_package
from jaxnn.kernels._product import dtype_obstacle

_THIN = 4  # inputs with at most this many features, such as images, are thin
_CHUNK = 8  # examples
_CACHED = 1_000_000  # float32 elements that fit into the caches beside the other data of a network
_MAX_TAPS = 128  # kernel positions, each an operation in the program
_ROLES = "input", "kernel", "output"  # numbered as in the package
_FEW_ELEMENTS = 32  # of a kernel for each output feature: 3×3 of coloured images, 5×5 of grey ones


class Geometry(NamedTuple):
    """A convolution's static parameters. Sizes exclude dilation and padding; ``dtype`` is that of the inputs."""

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
    groups: int = 1
    # ``native``: on a CPU, by the native package; ``patches``: XLA's own, and members by patches.
    form: str = "channels_last"

    def dilated(self) -> zip[tuple[int, int, int, int]]:
        """For each axis the dilated sizes of input, kernel and output (by the strides), and the low padding."""
        factors = (self.input_dilation, self.kernel_dilation, self.strides)
        sizes = (self.input_size, self.kernel_size, self.output_size)
        dilated_sizes = [
            [(size - 1) * factor + 1 for size, factor in zip(*pair, strict=True)]
            for pair in zip(sizes, factors, strict=True)
        ]
        return zip(*dilated_sizes, [low for low, _ in self.padding], strict=True)


def conv_dimension_numbers(ndim: int) -> lax.ConvDimensionNumbers:
    """The dimension numbers of ``[batch, *spatial, features]`` and ``[*spatial, in_features, out_features]``."""
    arrays = (0, ndim - 1, *range(1, ndim - 1))
    return lax.ConvDimensionNumbers(arrays, (ndim - 1, ndim - 2, *range(ndim - 2)), arrays)


def _output(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """The convolution itself: ``[batch, *output_size, out_features]``."""
    g = geometry
    return _convolve(inputs, kernel, g, (g.strides, g.padding, g.input_dilation, g.kernel_dilation))


def _input_gradient(kernel: jax.Array, output: jax.Array, geometry: Geometry) -> jax.Array:
    """``[batch, *input_size, in_features]``: the kernel is flipped, strides and input dilation are swapped."""
    g = geometry
    padding = tuple((k - 1 - low, x - y + low) for x, k, y, low in g.dilated())
    flipped = jnp.flip(kernel, range(kernel.ndim - 2)).swapaxes(-2, -1)
    return _convolve(output, flipped, g, (g.input_dilation, padding, g.strides, g.kernel_dilation))


def _kernel_gradient(inputs: jax.Array, output: jax.Array, geometry: Geometry) -> jax.Array:
    """``[*kernel_size, in_features, out_features]``; summed over chunks of the batch if that is faster.

    Chunks are 1.2 to 3 times faster on CPU for thin inputs and for arrays larger than the caches.
    """
    batch = inputs.shape[0]
    # A symbolic batch (`jax.export`) has an unknown number of chunks: it is not split.
    chunked = isinstance(batch, int) and batch > _CHUNK
    if not chunked or (inputs.shape[-1] > _THIN and inputs.size + output.size <= _CACHED):
        return _full_kernel_gradient(inputs, output, geometry)
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    gradient = functools.partial(_full_kernel_gradient, geometry=geometry._replace(preferred_element_type=dtype))
    in_chunks = batch - batch % _CHUNK
    chunks = [array[:in_chunks].reshape(-1, _CHUNK, *array.shape[1:]) for array in (inputs, output)]
    zeros = jnp.zeros((*geometry.kernel_size, inputs.shape[-1], output.shape[-1]), dtype)
    total, _ = vary_together(zeros, inputs)
    total, _ = lax.scan(lambda total, chunk: (total + gradient(*chunk), None), total, chunks)
    return total if in_chunks == batch else total + gradient(inputs[in_chunks:], output[in_chunks:])


def _full_kernel_gradient(inputs: jax.Array, output: jax.Array, geometry: Geometry) -> jax.Array:
    """A convolution with input features as the batch, the batch as features, and strides as kernel dilation."""
    g = geometry
    padding = tuple((low, y + k - 1 - x - low) for x, k, y, low in g.dilated())
    features_first = inputs.swapaxes(0, -1)
    batch_as_features = jnp.moveaxis(output, 0, -2)
    windows = (g.kernel_dilation, padding, g.input_dilation, g.strides)
    gradient = _convolve(features_first, batch_as_features, g, windows)
    return jnp.moveaxis(gradient, 0, -2)


def _convolve(
    inputs: jax.Array, kernel: jax.Array, geometry: Geometry, windows: tuple[Any, Any, Any, Any]
) -> jax.Array:
    """Convolves with ``windows``: strides, padding, and the dilations of input and kernel."""
    options = {"precision": geometry.precision, "preferred_element_type": geometry.preferred_element_type}
    numbers = conv_dimension_numbers(inputs.ndim)
    return lax.conv_general_dilated(inputs, kernel, *windows, dimension_numbers=numbers, **options)


def channels_last_conv(inputs: jax.Array, kernel: jax.Array, geometry: Geometry, groups: int) -> jax.Array:
    """Convolves ``groups`` groups, in the form that is fastest with channels last."""
    taps = math.prod(kernel.shape[:-2])
    in_features, out_features = inputs.shape[-1], kernel.shape[-1]
    if groups == in_features == out_features > 1 and taps <= _MAX_TAPS:
        return _by_elements(inputs, kernel, geometry)
    if groups > 1:
        # One convolution per group: XLA:CPU is 3× (forward) to 500× (kernel gradient) slower with a grouped one.
        split, kernels = (array.reshape(*array.shape[:-1], groups, -1) for array in (inputs, kernel))
        each = jax.vmap(lambda x, k: convolve(x, k, geometry), in_axes=-2, out_axes=-2)(split, kernels)
        return each.reshape(*each.shape[:-2], -1)
    plain = math.prod(geometry.input_dilation) == 1 and not any(map(any, geometry.padding))
    if taps > 1 or not plain:
        return convolve(inputs, kernel, geometry)
    # A kernel of one element: a matrix product of the pixels at the strides.
    pixels = inputs[:, *(slice(None, None, stride) for stride in geometry.strides)]
    options = {"precision": geometry.precision, "preferred_element_type": geometry.preferred_element_type}
    return jnp.matmul(pixels, kernel.reshape(kernel.shape[-2:]), **options)


def _by_elements(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """Sums, over the kernel's elements, the shifted input feature times the element; depthwise, or of few features."""
    g = geometry
    dtype = jnp.promote_types(g.output_dtype, jnp.float32)
    columns = range(kernel.shape[-2])
    weights = lax.expand_dims(kernel.reshape(-1, *kernel.shape[-2:]).astype(dtype), range(2, inputs.ndim + 1))
    pairs = zip(_shifted(inputs.astype(dtype), g), weights, strict=True)
    # One input feature for each output feature, or for all.
    terms = [(x if len(columns) == 1 else x[..., i : i + 1]) * weight[i] for x, weight in pairs for i in columns]
    return functools.reduce(jnp.add, terms).astype(g.output_dtype)


def _shifted(inputs: jax.Array, geometry: Geometry) -> list[jax.Array]:
    """For each element of the kernel the inputs ``[batch, *output_size, features]`` that it is multiplied with."""
    g = geometry
    borders = [(low, high, factor - 1) for (low, high), factor in zip(g.padding, g.input_dilation, strict=True)]
    padded = lax.pad(inputs, jnp.zeros((), inputs.dtype), [(0, 0, 0), *borders, (0, 0, 0)])

    def at(tap: tuple[int, ...]) -> jax.Array:
        starts = [index * factor for index, factor in zip(tap, g.kernel_dilation, strict=True)]
        windows = zip(starts, g.output_size, g.strides, strict=True)
        return padded[:, *(slice(low, low + (size - 1) * step + 1, step) for low, size, step in windows)]

    return [*map(at, itertools.product(*map(range, g.kernel_size)))]


def convolve(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """The convolution of ``[batch, *input_size, in_features]`` and ``[*kernel_size, in_features, out_features]``."""
    inputs, kernel = vary_together(inputs, kernel)
    result: jax.Array = _convolution.bind(inputs, kernel, missing="output", geometry=geometry)
    return result


# How each of the three is computed, and the axes it shares with the others.
_FUNCTIONS = {"input": _input_gradient, "kernel": _kernel_gradient, "output": _output}
_AXES = {
    "input": {"batch": 0, "in_features": -1},
    "kernel": {"in_features": -2, "out_features": -1},
    "output": {"batch": 0, "out_features": -1},
}


def _operand_roles(missing: str) -> list[str]:
    return [role for role in _AXES if role != missing]


def evaluate(first: jax.Array, second: jax.Array, *, missing: str, geometry: Geometry) -> jax.Array:
    """The one of the three that is ``missing``, from the other two, by XLA."""
    if geometry.form == "patches":
        compute_missing = _by_patches if _member_axes(first, geometry) else _by_xla
        return compute_missing(first, second, missing, geometry)
    if _member_axes(first, geometry):
        one = functools.partial(evaluate, missing=missing, geometry=geometry)
        result: jax.Array = lax.map(lambda pair: one(*pair), (first, second))
        return result
    dtype = jnp.promote_types(first.dtype, second.dtype)
    compute, operands = _FUNCTIONS[missing], (first.astype(dtype), second.astype(dtype))
    if geometry.groups == 1:
        result = compute(*operands, geometry)
    else:
        split = (x.reshape(*x.shape[:-1], geometry.groups, -1) for x in operands)
        each = jax.vmap(lambda x, y: compute(x, y, geometry), in_axes=-2, out_axes=-2)(*split)
        result = each.reshape(*each.shape[:-2], -1)
    return result.astype(geometry.output_dtype if missing == "output" else geometry.dtype)


def _by_xla(first: jax.Array, second: jax.Array, missing: str, geometry: Geometry) -> jax.Array:
    """As `lax.conv_general_dilated` and its own gradients, which cuDNN knows."""
    g, result = geometry, abstract_result(first, second, missing=missing, geometry=geometry)
    dtype = jnp.promote_types(first.dtype, second.dtype)
    operands = dict(zip(_operand_roles(missing), (first.astype(dtype), second.astype(dtype)), strict=True))
    windows, numbers = (g.strides, g.padding, g.input_dilation, g.kernel_dilation), conv_dimension_numbers(first.ndim)
    options: dict[str, Any] = {"feature_group_count": g.groups, "precision": g.precision}

    def convolve(inputs: jax.Array, kernel: jax.Array, wide: Any = None) -> Any:
        return lax.conv_general_dilated(inputs, kernel, *windows, numbers, preferred_element_type=wide, **options)

    if missing == "output":
        found: jax.Array = convolve(operands["input"], operands["kernel"], g.preferred_element_type)
        return found.astype(result.dtype)
    output, like = operands.pop("output"), jax.ShapeDtypeStruct(result.shape, dtype)
    ((_, other),) = operands.items()
    linear = (lambda x: convolve(x, other)) if missing == "input" else (lambda x: convolve(other, x))
    (gradient,) = jax.linear_transpose(linear, like)(output)
    return gradient.astype(result.dtype)  # type: ignore[no-any-return]


def _by_patches(first: jax.Array, second: jax.Array, missing: str, geometry: Geometry) -> jax.Array:
    """For members with kernels of their own: batched products of patches, with an input for each kernel element.

    The outputs of few input features are sums of shifted inputs, which XLA does not write to memory before they are
    added: 0.8 times the memory traffic of a step of 64 small networks of grey images.
    """
    g, ahead = geometry, _member_axes(first, geometry)
    result, dtype = abstract_result(first, second, missing=missing, geometry=g), jnp.promote_types(first, second)
    num_members, wide = math.prod(first.shape[:ahead]), jnp.promote_types(dtype, jnp.float32)
    arrays = [x.astype(dtype).reshape(num_members, *x.shape[ahead:]) for x in (first, second)]
    given = dict(zip(_operand_roles(missing), arrays, strict=True))

    def by_group(array: jax.Array, *axes: int) -> jax.Array:  # [members, *axes, groups, features]
        return array.reshape(num_members, *axes, g.groups, array.shape[-1] // g.groups)

    def patches(inputs: jax.Array) -> jax.Array:  # [members, pixels, kernel elements, groups, features]
        stacked = jax.vmap(lambda x: jnp.stack(_shifted(x, g), -2))(inputs)
        return by_group(stacked, math.prod(stacked.shape[1:-2]), math.prod(g.kernel_size))

    def product(equation: str, *operands: jax.Array) -> jax.Array:
        found: jax.Array = jnp.einsum(equation, *operands, precision=g.precision, preferred_element_type=wide)
        return found

    if "kernel" in given:
        weights = by_group(given["kernel"], math.prod(g.kernel_size), given["kernel"].shape[-2])
    if "output" in given:
        output = by_group(given["output"], math.prod(given["output"].shape[1:-1]))
    if missing == "output" and g.groups == 1 and weights.shape[1] * weights.shape[2] <= _FEW_ELEMENTS:
        found = jax.vmap(lambda x, kernel: _by_elements(x, kernel, g))(given["input"], given["kernel"])
    elif missing == "output":
        found = product("mptgi,mtigo->mpgo", patches(given["input"]), weights)
    elif missing == "kernel":
        found = product("mptgi,mpgo->mtigo", patches(given["input"]), output)
    else:
        columns = product("mpgo,mtigo->mptgi", output, weights)
        like = jax.ShapeDtypeStruct((num_members, *result.shape[ahead:]), wide)
        (found,) = jax.linear_transpose(patches, like)(columns)
    return found.reshape(result.shape).astype(result.dtype)


def _member_axes(operand: Any, geometry: Geometry) -> int:
    """The number of axes before those of a single convolution: members of `jax.vmap`, equal for all arrays."""
    return operand.ndim - len(geometry.input_size) - 2  # type: ignore[no-any-return]


def _sizes(operands: Any, missing: str, geometry: Geometry) -> dict[str, int]:
    """Sizes of the batch and the features; the input features of one group, unless the kernel is ``missing``."""
    ahead = _member_axes(operands[0], geometry)
    given = zip(_operand_roles(missing), [x.shape[ahead:] for x in operands], strict=True)
    return {name: shape[axis] for role, shape in given for name, axis in _AXES[role].items()}


def abstract_result(*operands: Any, missing: str, geometry: Geometry) -> Any:
    """The abstract value of the primitive's result."""
    members, sizes = operands[0].shape[: _member_axes(operands[0], geometry)], _sizes(operands, missing, geometry)
    if missing == "input":
        sizes["in_features"] *= geometry.groups
    elif missing == "kernel":
        sizes["in_features"] //= geometry.groups
    first, last = (sizes[name] for name in _AXES[missing])
    spatial = getattr(geometry, f"{missing}_size")
    shape = (*spatial, first, last) if missing == "kernel" else (first, *spatial, last)
    dtype = geometry.output_dtype if missing == "output" else geometry.dtype
    return operands[0].update(shape=(*members, *shape), dtype=dtype, weak_type=False)


def _transpose(wanted: int, cotangent: jax.Array, *operands: Any, missing: str, geometry: Geometry) -> Any:
    roles = _operand_roles(missing)
    arrays = {roles[1 - wanted]: operands[1 - wanted], missing: cotangent}
    given = [arrays[role] for role in _operand_roles(roles[wanted])]
    return _convolution.bind(*given, missing=roles[wanted], geometry=geometry)


def _batch(operands: Any, dims: Any, *, missing: str, geometry: Geometry) -> tuple[jax.Array, int]:
    # Never a grouped convolution: members are put side by side along the batch, or along the output features if they
    # share thin inputs; otherwise they run one after another, or at once in the native kernel, or as
    # products of patches.
    apply = functools.partial(_convolution.bind, missing=missing, geometry=geometry)
    if None not in dims:
        return apply(*(jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True))), 0
    k = 0 if dims[1] is None else 1  # the operand of which each member has its own
    apart = _one_by_one if geometry.form != "patches" else _with_copies
    if _member_axes(operands[1 - k], geometry):
        return apart(apply, operands, dims)
    roles = _operand_roles(missing)
    (shared,) = _AXES[roles[k]].keys() & _AXES[missing].keys()
    thin = roles[1 - k] == "input" and operands[1 - k].shape[-1] <= _THIN
    if shared != "batch" and not ((thin or geometry.form == "patches") and geometry.groups == 1):
        return apart(apply, operands, dims)
    axis = _AXES[roles[k]][shared] % (operands[k].ndim - 1)
    side_by_side, members = list(operands), jnp.moveaxis(operands[k], dims[k], axis)
    side_by_side[k] = lax.collapse(members, axis, axis + 2)
    result = apply(*side_by_side)
    at = _AXES[missing][shared] % result.ndim
    return result.reshape(*result.shape[:at], *members.shape[axis : axis + 2], *result.shape[at + 1 :]), at


def _one_by_one(apply: Callable[..., jax.Array], operands: Any, dims: Any) -> tuple[jax.Array, int]:
    members = [None if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)]

    def one(member: list[Any]) -> jax.Array:
        return apply(*(x if own is None else own for x, own in zip(operands, member, strict=True)))

    return lax.map(one, members), 0


def _with_copies(apply: Callable[..., jax.Array], operands: Any, dims: Any) -> tuple[jax.Array, int]:
    """As `_one_by_one`, all at once: members that share an operand get a copy each."""
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    each = (
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    )
    return apply(*each), 0


def _natively(first: jax.Array, second: jax.Array, *, missing: str, geometry: Geometry) -> jax.Array:
    if geometry.form != "native":
        return evaluate(first, second, missing=missing, geometry=geometry)
    g, aval = geometry, abstract_result(first, second, missing=missing, geometry=geometry)
    dtype = jnp.promote_types(first.dtype, second.dtype)
    # A kernel's gradient is summed over parts of the batch in float32.
    like = jax.ShapeDtypeStruct(aval.shape, dtype if aval.dtype == dtype and missing != "kernel" else jnp.float32)
    low, high = zip(*g.padding, strict=True)
    windows = {"strides": g.strides, "low": low, "high": high, "dilation": g.kernel_dilation}
    numbers: dict[str, Any] = {"missing": _ROLES.index(missing), "groups": g.groups, **windows}
    arrays = first.astype(dtype), second.astype(dtype)
    (result,) = native_call("jaxnn_convolution", [like], *arrays, **numbers)
    return result.astype(aval.dtype)


def _unfit(inputs: Any, kernel: Any, *, missing: str, geometry: Geometry) -> str | None:
    g, output_like = geometry, jax.ShapeDtypeStruct((), geometry.output_dtype)
    if (obstacle := dtype_obstacle(inputs, kernel, output_like)) is not None:
        return obstacle
    if not 3 <= inputs.ndim <= 5:
        return f"it has 1 to 3 spatial axes, not {inputs.ndim - 2}"
    if max(g.input_dilation) > 1 and max(g.strides) > 1:
        return "it takes no convolution with both strides and input dilation"
    dilated = [(size - 1) * factor + 1 for size, factor in zip(g.input_size, g.input_dilation, strict=True)]
    if any(n + min(a, 0) + min(b, 0) < 1 for n, (a, b) in zip(dilated, g.padding, strict=True)):
        return "padding crops all of the input"
    windows = g.strides, g.input_dilation, g.kernel_dilation, g.kernel_size, g.groups
    if native_package().fits_convolution(*windows, *kernel.shape[-2:], inputs.dtype == jnp.float32):
        return None
    return "the package jaxnn-native was built without oneDNN, and Winograd's algorithm does not fit"


def _products(*operands: Any, missing: str, geometry: Geometry) -> float:
    """The same for all three: each output is a sum over its group's kernel, without the zeros of input dilation."""
    g, sizes = geometry, _sizes(operands, missing, geometry)
    members = math.prod(operands[0].shape[: _member_axes(operands[0], geometry)])
    per_pixel = math.prod(g.kernel_size) * sizes["in_features"] / (g.groups if missing == "kernel" else 1)
    pixels = sizes["batch"] * math.prod(g.output_size) / math.prod(g.input_dilation)
    return float(members * pixels * sizes["out_features"] * per_pixel)


# Of two of inputs, kernel and output: the one that is ``missing``. Whether it fits is asked of inputs and kernel.
convolution = Kernel("convolution", evaluate, _natively, _unfit, products=_products)


def native_conv(inputs: jax.Array, kernel: jax.Array, geometry: Geometry, groups: int) -> jax.Array:
    """The convolution of ``[batch, *input_size, in_features]`` and ``[*kernel_size, in_features // groups, out]``.

    `convolution` had no obstacle. In a program that XLA partitions, each device convolves its rows.
    """
    g = geometry._replace(groups=groups, form="native")

    convolve_rows = _transposed_convolution if max(g.input_dilation) > 1 else _cropped_convolution
    run = map_rows(functools.partial(convolve_rows, geometry=g), inputs.shape[0], (0, None), 0)
    return run(inputs, kernel)  # type: ignore[no-any-return]


def _cropped_convolution(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """Crops the input first where padding is negative, which the native kernel does not have."""
    crops = [(min(low, 0), min(high, 0), 0) for low, high in geometry.padding]
    if any(map(any, crops)):
        inputs = lax.pad(inputs, jnp.zeros((), inputs.dtype), [(0, 0, 0), *crops, (0, 0, 0)])
        padding = tuple((max(low, 0), max(high, 0)) for low, high in geometry.padding)
        geometry = geometry._replace(input_size=inputs.shape[1:-1], padding=padding)
    return convolve(inputs, kernel, geometry)


def _transposed_convolution(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """The convolution of a dilated input: the input gradient of one with strides and the flipped kernel."""
    g = geometry
    borders = [(k - 1 - low, x - y + low) for x, k, y, low in g.dilated()]
    # Outputs beyond the reach of the kernel are zeros, which are added in the end.
    beyond = [(max(-low, 0), max(-high, 0), 0) for low, high in borders]
    size = tuple(n - low - high for n, (low, high, _) in zip(g.output_size, beyond, strict=True))
    inverse = g._replace(
        input_size=size,
        output_size=g.input_size,
        strides=g.input_dilation,
        input_dilation=g.strides,
        padding=tuple((max(low, 0), max(high, 0)) for low, high in borders),
        dtype=g.output_dtype,
        output_dtype=g.dtype,
    )
    flipped = jnp.flip(kernel, range(kernel.ndim - 2))
    by_group = flipped.reshape(*flipped.shape[:-1], g.groups, -1)  # [*kernel_size, in, groups, out]
    swapped = jnp.swapaxes(by_group, -3, -1).reshape(*kernel.shape[:-2], kernel.shape[-1] // g.groups, -1)
    result = _convolution.bind(swapped, inputs, missing="input", geometry=inverse)
    if any(map(any, beyond)):
        result = lax.pad(result, jnp.zeros((), result.dtype), [(0, 0, 0), *beyond, (0, 0, 0)])
    return result  # type: ignore[no-any-return]


_convolution = Primitive("channels_last_convolution")
_convolution.def_abstract_eval(abstract_result)
ad.defbilinear(_convolution, functools.partial(_transpose, 0), functools.partial(_transpose, 1))
batching.primitive_batchers[_convolution] = _batch
convolution.lower(_convolution)
