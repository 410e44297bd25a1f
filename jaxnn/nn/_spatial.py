"""Convolution and pooling with Flax's results, in the form that is fast on each backend."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax import lax

from jaxnn._fields import positive_ints
from jaxnn.nn._channels_last_conv import Geometry, channels_last_conv, conv_dimension_numbers, convolve
from jaxnn.nn._choice import choose, scope
from jaxnn.nn._custom_vjp import custom_vjp
from jaxnn.nn._layer_arguments import narrowed, with_wide_bias
from jaxnn.nn._onednn import onednn_conv, onednn_obstacle
from jaxnn.types import ConfigError, is_half, suggest

type Padding = str | Sequence[tuple[int, int]]
type Implementation = str | Callable[..., jax.Array] | None
_PADDINGS = ("SAME", "SAME_LOWER", "VALID")
# With fewer, a CPU's loop over the gradient and what follows, such as relu's, is not vectorized, and twice as slow.
_FEW_FEATURES = 16
_MAX_SLICES = 32  # one per window position; larger tiles are reduced, other large windows left to Flax


class Conv(linen.Conv):
    """``flax.linen.Conv`` with `jaxnn.nn.conv_general_dilated`: the same parameters, names and results (to rounding).

    On CPU its gradients are as fast inside `jax.lax.scan` as outside, and under `jax.vmap` over kernels it is no slower
    than one member after another.

    >>> layer = jn.nn.Conv(32, (3, 3))
    >>> jn.models.num_parameters(layer, jax.ShapeDtypeStruct((1, 28, 28, 1), "float32"))
    320

    Attributes:
        implementation: as in `jaxnn.nn.conv_general_dilated`.
    """

    implementation: Implementation = None
    promote_dtype: Callable[..., Any] = with_wide_bias

    def __post_init__(self) -> None:
        given: Any = self.conv_general_dilated
        # A clone is given what its original set here.
        if given is None or given is _by(getattr(given, "keywords", {}).get("implementation")):
            self.conv_general_dilated = _by(self.implementation)
        elif self.implementation is not None:
            raise ConfigError("Conv: pass an implementation or a conv_general_dilated, not both.")
        super().__post_init__()

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``[batch, *spatial, in_features]`` to features; the bias is added, and its gradient summed, in float32."""
        return narrowed(linen.Conv.__call__, self, inputs)


@functools.cache
def _by(implementation: Implementation) -> Callable[..., Any]:
    """One object per implementation, so that equal layers compare equal."""
    return functools.partial(conv_general_dilated, implementation=implementation)


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
    implementation: Implementation = None,
) -> jax.Array:
    """Convolves with any strides, padding, dilation and groups, as `jax.lax.conv_general_dilated`.

    For Flax's own layer: ``flax.linen.Conv(..., conv_general_dilated=jaxnn.nn.conv_general_dilated)``. Implementations:

    - ``"onednn"``: on CPUs, if the package `jaxnn-onednn` is installed (``make onednn``): all three forms, of float32
      and bfloat16, by oneDNN on XLA's threads. Bits depend on the number of threads and on the CPU. In a jaxpr it is a
      ``channels_last_convolution`` too.
    - ``"xla"``: ``jax.lax``'s own. On CPU, gradients are slow in a loop such as `jax.lax.scan` (jax#12868), and so are
      grouped convolutions anywhere, which `jax.vmap` over kernels creates too (jax#26568).
    - ``"channels_last"``: the gradients have channels last too, and are as fast in a loop as outside. Groups and
      members of `jax.vmap` run one after another; a kernel of one element is a matrix product; a depthwise convolution
      is a sum over the kernel's elements. In a jaxpr it is a ``channels_last_convolution``, which `jax.checkpoint`
      policies that save products do not know: it is recomputed, unless its result has a saved name
      (`jax.ad_checkpoint.checkpoint_name`).
    - ``"patches"``: on GPUs. As ``"xla"``, except that members of `jax.vmap` with kernels of their own are one batched
      product of patches in each direction: cuDNN is slow with the groups that XLA makes of them. Also a
      ``channels_last_convolution``.

    Results are equal to rounding, and differentiable in either mode and to any order.

    >>> numbers = ("NHWC", "HWIO", "NHWC")
    >>> images, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 16))
    >>> jn.nn.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers).shape
    (2, 8, 8, 16)

    Args are ``jax.lax``'s. ``"channels_last"`` takes ``lhs [batch, *spatial, in_features]``, ``rhs [*spatial,
    in_features // groups, out_features]``, the ``dimension_numbers`` of this layout (None is channels first, as in
    ``jax.lax``) and a ``batch_group_count`` of 1, as do ``"onednn"`` and ``"patches"``. ``implementation`` is a name
    above, a function called as ``jax.lax``'s, or None for the best that supports the arguments.
    """
    options = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    rest = (feature_group_count, batch_group_count, precision, preferred_element_type)
    if callable(implementation):
        with scope("convolution", implementation):
            return implementation(lhs, rhs, *options, *rest)
    try:
        output = jax.eval_shape(lambda lhs, rhs: lax.conv_general_dilated(lhs, rhs, *options, *rest), lhs, rhs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"convolution of {lhs.shape} with a kernel {rhs.shape}: {error}") from error
    obstacle = _obstacle(lhs, rhs, output, dimension_numbers, batch_group_count)
    native = obstacle or onednn_obstacle(lhs, rhs, output, window_strides, padding, lhs_dilation)
    name = choose("convolution", implementation, {"onednn": native, "channels_last": obstacle, "patches": obstacle})
    with scope("convolution", name):
        if name == "xla":
            return lax.conv_general_dilated(lhs, rhs, *options, *rest)
        kernel_dilation = tuple(rhs_dilation or (1,) * (rhs.ndim - 2))
        if isinstance(padding, str):
            window = [(size - 1) * factor + 1 for size, factor in zip(rhs.shape[:-2], kernel_dilation, strict=True)]
            padding = lax.padtype_to_pads(lhs.shape[1:-1], window, window_strides, padding)
        geometry = Geometry(
            input_size=lhs.shape[1:-1],
            kernel_size=rhs.shape[:-2],
            output_size=output.shape[1:-1],
            strides=tuple(window_strides),
            padding=tuple((int(low), int(high)) for low, high in padding),
            input_dilation=tuple(lhs_dilation or (1,) * (lhs.ndim - 2)),
            kernel_dilation=kernel_dilation,
            dtype=lhs.dtype,
            output_dtype=output.dtype,
            preferred_element_type=preferred_element_type,
            precision=_default_precision() if precision is None else precision,
        )
        if name == "patches":
            return convolve(lhs, rhs, geometry._replace(form=name, groups=feature_group_count))
        by_name = onednn_conv if name == "onednn" else channels_last_conv
        return by_name(lhs, rhs, geometry, feature_group_count)


def _default_precision() -> lax.Precision | None:
    """That of the config while a layer is traced, as of `jax.lax`'s; its primitive is lowered later."""
    with contextlib.suppress(ValueError):  # the name of an algorithm for matrix products
        return lax.Precision(jax.config.jax_default_matmul_precision)
    return None


def _obstacle(
    lhs: jax.Array, rhs: jax.Array, output: jax.ShapeDtypeStruct, dimension_numbers: Any, batch_group_count: int
) -> str | None:
    if lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers) != conv_dimension_numbers(lhs.ndim):
        return "its dimension numbers are not channels last"
    if batch_group_count > 1:
        return "batch_group_count is not 1"
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        return f"{lhs.dtype} is not floating"
    if jax.typeof(lhs).sharding.mesh.explicit_axes:
        return "the mesh has explicit axes"
    return "an array is empty" if 0 in (*lhs.shape, *rhs.shape, *output.shape) else None


def max_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Max pooling, as ``flax.linen.max_pool``, whose forward and backward pass take 4 to 13 times as long on a CPU.

    The first of equal maxima gets all of the gradient, as in Flax; if windows of more than 32 elements tile the input,
    they share it (``jnp.max``'s rule).

    >>> jn.nn.max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), (2, 2), (2, 2)).ravel()
    Array([ 5.,  7., 13., 15.], dtype=float32)

    Args:
        inputs: ``[..., *spatial, features]``, floats or integers.
        window_shape: the window along each spatial axis.
        strides: the step along each; default 1, as in Flax: pass ``window_shape`` for tiles.
        padding: ``"VALID"`` (a remainder is dropped), ``"SAME"``, ``"SAME_LOWER"`` or ``(low, high)`` for
            each spatial axis.

    Returns:
        ``[..., *pooled, features]``.
    """
    # The gradient of Flax's reduce_window is select-and-scatter, slow on CPU and not deterministic on GPU. The elements
    # of small tiles are a strided slice for each window position; large tiles are a reshape and a reduction. Otherwise
    # pooling is separable: per axis, a strided slice for each window position.
    pooling = _checked(inputs, window_shape, strides, padding)
    lowest = -jnp.inf if jnp.issubdtype(inputs.dtype, jnp.floating) else int(np.iinfo(inputs.dtype).min)
    if pooling.strides == pooling.window:
        tiled = _tiled(inputs, pooling, lowest)
        if math.prod(pooling.window) <= _MAX_SLICES and 0 not in tiled.shape:
            return _tile_max(pooling.window, tiled)
        return _over_tiles(jnp.max, tiled, pooling)
    padded = _padded(inputs, pooling, lowest)
    windows = list(zip(padded.shape[pooling.first : -1], pooling.window, pooling.strides, strict=True))
    if sum(pooling.window) > _MAX_SLICES or any(size < width for size, width, _ in windows):
        return _by_flax(linen.max_pool, inputs, pooling)
    # Rows last, so that the first of equals is the first in row-major order, as in Flax.
    for axis, (size, width, step) in reversed(list(enumerate(windows, pooling.first))):
        # For each window position, the elements there of all windows along the axis.
        elements = [lax.slice_in_dim(padded, at, at + size - width + 1, step, axis) for at in range(width)]
        # The left one of equals gets all of the gradient.
        padded = functools.reduce(lambda a, b: lax.select(_is_first(a, b), a, b), elements)
    return padded


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """Average pooling, as ``flax.linen.avg_pool``, in the dtype of the inputs; of integers in float32.

    Arguments are those of `max_pool`; ``count_include_pad``: whether padding counts in the mean.

    >>> jn.nn.avg_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), (2, 2), (2, 2)).ravel()
    Array([ 2.5,  4.5, 10.5, 12.5], dtype=float32)
    """
    pooling = _checked(inputs, window_shape, strides, padding)
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        inputs = inputs.astype(jnp.float32)
    if pooling.strides != pooling.window:
        wide = inputs.astype(jnp.float32) if is_half(inputs.dtype) else inputs
        return _by_flax(linen.avg_pool, wide, pooling, count_include_pad).astype(inputs.dtype)
    means = _over_tiles(jnp.mean, _tiled(inputs, pooling, 0.0), pooling)
    if count_include_pad or not any(map(any, pooling.padding)):
        return means
    ones = jnp.ones((*[1] * pooling.first, *inputs.shape[pooling.first : -1], 1), inputs.dtype)
    return means / _over_tiles(jnp.mean, _tiled(ones, pooling, 0.0), pooling)


class _Pooling(NamedTuple):
    """The first spatial axis; for each spatial axis window, stride and ``(low, high)`` padding."""

    first: int
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]


def _checked(inputs: jax.Array, window_shape: Any, strides: Any, padding: Any) -> _Pooling:
    window = positive_ints("pooling: the window", window_shape, "(2, 2)")
    steps = (1,) * len(window) if strides is None else positive_ints("pooling: the strides", strides, "(2, 2)")
    if len(steps) != len(window):
        raise ConfigError(f"pooling: window {window} and strides {steps} must have the same number of axes.")
    is_number = jnp.issubdtype(inputs.dtype, jnp.floating) or jnp.issubdtype(inputs.dtype, jnp.integer)
    first = inputs.ndim - 1 - len(window)
    if first < 0 or not is_number:
        raise ConfigError(
            f"pooling with window {window} needs numbers [..., {len(window)} spatial axes, features], "
            f"not {inputs.dtype} of shape {inputs.shape}."
        )
    pads = padding
    if isinstance(padding, str):
        if padding.upper() not in _PADDINGS:
            raise ConfigError(f"pooling: no padding {padding!r}: {suggest(padding.upper(), _PADDINGS)}.")
        pads = lax.padtype_to_pads(inputs.shape[first:-1], window, steps, padding.upper())
    pads = np.asarray(pads, dtype=object)
    if pads.shape != (len(window), 2) or not all(isinstance(pad, int | np.integer) for pad in pads.flat):
        raise ConfigError(f"pooling: padding must be a name or (low, high) for each spatial axis, not {padding!r}.")
    return _Pooling(first, window, steps, tuple((int(low), int(high)) for low, high in pads))


def _by_flax(pool: Callable[..., jax.Array], inputs: jax.Array, pooling: _Pooling, *options: bool) -> jax.Array:
    """Pools by Flax, with a single batch axis: with explicit padding it takes no more."""
    batch = inputs.shape[: pooling.first]
    flat = inputs.reshape(math.prod(batch), *inputs.shape[pooling.first :])
    pooled = pool(flat, pooling.window, pooling.strides, pooling.padding, *options)
    return pooled.reshape(*batch, *pooled.shape[1:])


def _padded(inputs: jax.Array, pooling: _Pooling, fill: Any) -> jax.Array:
    if not any(map(any, pooling.padding)):
        return inputs
    pads = [(0, 0, 0)] * inputs.ndim
    pads[pooling.first : -1] = [(low, high, 0) for low, high in pooling.padding]
    return lax.pad(inputs, jnp.asarray(fill, inputs.dtype), pads)


def _is_first(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether ``a`` is the first maximum of the two, which is NaN if one is NaN."""
    return (a >= b) | jnp.isnan(a)


def _tiled(inputs: jax.Array, pooling: _Pooling, fill: Any) -> jax.Array:
    """The padded input without the remainder that fills no window."""
    padded = _padded(inputs, pooling, fill)
    sizes = zip(padded.shape[pooling.first : -1], pooling.window, strict=True)
    return padded[(..., *(slice(size // width * width) for size, width in sizes), slice(None))]


def _over_tiles(reduce: Callable[..., jax.Array], tiled: jax.Array, pooling: _Pooling) -> jax.Array:
    """Applies ``reduce`` to the tiles of what `_tiled` returned."""
    sizes = zip(tiled.shape[pooling.first : -1], pooling.window, strict=True)
    pairs = [(size // width, width) for size, width in sizes]
    # [..., tiles_0, window_0, tiles_1, window_1, …, features]
    tiles = tiled.reshape(*tiled.shape[: pooling.first], *(size for pair in pairs for size in pair), tiled.shape[-1])
    return reduce(tiles, tuple(range(pooling.first + 1, tiles.ndim - 1, 2)))


def _elements(window: tuple[int, ...], inputs: jax.Array) -> list[jax.Array]:
    """For each place in a tile the elements ``[..., *tiles, features]`` there."""
    first = inputs.ndim - 1 - len(window)
    strides = (*[1] * first, *window, 1)
    return [lax.slice(inputs, (*[0] * first, *place, 0), inputs.shape, strides) for place in np.ndindex(*window)]


def _tile_max_forward(window: tuple[int, ...], inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array]]:
    """The maxima ``[..., *tiles, features]`` of tiles of ``inputs``, and the place of the first in each tile, int8."""
    largest, *others = _elements(window, inputs)
    place = jnp.zeros(largest.shape, jnp.int8)
    for index, element in enumerate(others, 1):
        stays = _is_first(largest, element)
        largest, place = lax.select(stays, largest, element), jnp.where(stays, place, jnp.int8(index))
    # On a CPU, XLA would compute the maxima with what follows, and if that is flattened, element by element.
    return lax.optimization_barrier(largest), (place,)


def _tile_max_backward(window: tuple[int, ...], saved: tuple[jax.Array], grad: jax.Array) -> tuple[jax.Array]:
    first = grad.ndim - 1 - len(window)
    axes = tuple(first + 2 * axis + 1 for axis in range(len(window)))
    # [..., tiles_0, window_0, tiles_1, window_1, …, features]
    shape = (*[1] * first, *(size for width in window for size in (1, width)), 1)
    places = np.arange(math.prod(window), dtype=np.int8).reshape(shape)
    spread = jnp.where(jnp.expand_dims(saved[0], axes) == places, jnp.expand_dims(grad, axes), 0)
    if grad.shape[-1] < _FEW_FEATURES:
        spread = lax.optimization_barrier(spread)
    sizes = (size * width for size, width in zip(grad.shape[first:-1], window, strict=True))
    return (spread.reshape(*grad.shape[:first], *sizes, grad.shape[-1]),)


_tile_max = custom_vjp(lambda *arguments: functools.reduce(jnp.maximum, _elements(*arguments)), num_static=1)
_tile_max.defvjp(_tile_max_forward, _tile_max_backward)
