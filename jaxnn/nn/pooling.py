"""Pooling as Flax's, by reshaping where windows tile the input.

``flax.linen`` pools by ``reduce_window``, whose gradient for the maximum, select-and-scatter, is
slow on CPU and not deterministic on GPU. Where the strides equal the window and nothing is padded,
the windows are tiles: a reshape and a reduction over the tile's axes give the same values, and a
gradient that is neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import linen

from jaxnn.types import ConfigError

type Padding = str | Sequence[tuple[int, int]]


def max_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """The maximum of each window, as ``flax.linen.max_pool``.

    The gradient of equal maxima within one window is shared equally where windows tile the input
    (``jnp.max``'s rule); elsewhere all of it goes to the first (Flax's rule). Without ties the
    gradients are the same.

    Args:
        inputs: ``[..., *spatial, features]``.
        window_shape: the window along each spatial axis.
        strides: the step along each; 1 where not given, as in Flax: pass ``window_shape`` for
            tiles.
        padding: ``"VALID"`` (a remainder is dropped), ``"SAME"`` or ``(low, high)`` for each
            spatial axis.

    Returns:
        ``[..., *pooled, features]``.

    Raises:
        ConfigError: ranks of inputs, window and strides that do not fit.
    """
    window, steps = _checked(inputs, window_shape, strides)
    if steps == window and padding == "VALID":
        tiles, axes = _tiled(inputs, window)
        return tiles.max(axes)
    pooled: jax.Array = linen.max_pool(inputs, window, steps, padding)  # type: ignore[no-untyped-call]
    return pooled


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """The mean of each window, as ``flax.linen.avg_pool``.

    Args:
        inputs: ``[..., *spatial, features]``, floats.
        window_shape: the window along each spatial axis.
        strides: the step along each; 1 where not given, as in Flax: pass ``window_shape`` for
            tiles.
        padding: ``"VALID"`` (a remainder is dropped), ``"SAME"`` or ``(low, high)`` for each
            spatial axis.
        count_include_pad: whether padding counts in the mean.

    Returns:
        ``[..., *pooled, features]``.

    Raises:
        ConfigError: ranks of inputs, window and strides that do not fit.
    """
    window, steps = _checked(inputs, window_shape, strides)
    if steps == window and padding == "VALID":
        tiles, axes = _tiled(inputs, window)
        return tiles.mean(axes)
    pooled: jax.Array = linen.avg_pool(inputs, window, steps, padding, count_include_pad)  # type: ignore[no-untyped-call]
    return pooled


def _checked(
    inputs: jax.Array, window_shape: Sequence[int], strides: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    window = tuple(window_shape)
    steps = (1,) * len(window) if strides is None else tuple(strides)
    if len(steps) != len(window):
        raise ConfigError(f"pooling window {window} and strides {steps} need equally many axes.")
    if inputs.ndim <= len(window):
        raise ConfigError(
            f"pooling with window {window} needs inputs [..., {len(window)} spatial axes, "
            f"features], not of shape {inputs.shape}."
        )
    return window, steps


def _tiled(inputs: jax.Array, window: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """``[..., tiles_0, window_0, tiles_1, window_1, …, features]``, and its window axes."""
    first = inputs.ndim - 1 - len(window)
    num_tiles = [size // width for size, width in zip(inputs.shape[first:-1], window, strict=True)]
    whole = tuple(slice(count * width) for count, width in zip(num_tiles, window, strict=True))
    split = [size for pair in zip(num_tiles, window, strict=True) for size in pair]
    tiles = inputs[(slice(None),) * first + whole]
    axes = tuple(range(first + 1, first + 2 * len(window), 2))
    return tiles.reshape(*inputs.shape[:first], *split, inputs.shape[-1]), axes
