"""Pooling with Flax's results, in the form that is fast on each backend."""

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
from jaxnn.kernels import custom_vjp
from jaxnn.types import ConfigError, is_half, suggest

type Padding = str | Sequence[tuple[int, int]]
_PADDINGS = ("SAME", "SAME_LOWER", "VALID")
# With fewer, a CPU's loop over the gradient and what follows, such as relu's, is not vectorized, and twice as slow.
_FEW_FEATURES = 16
_MAX_SLICES = 32  # one per window position; larger tiles are reduced, other large windows left to Flax


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
