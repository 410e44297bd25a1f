"""What residual networks are made of: a convolution without a bias, and the batch norm that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import linen

from jaxnn.nn import BatchNorm, Conv, positive_ints
from jaxnn.types import ConfigError, DataError


def conv_norm(x: jax.Array, features: int, size: int, *, train: bool, strides: int = 1, groups: int = 1) -> jax.Array:
    """A convolution padded by half its window, and batch norm: ``Conv_n`` and ``BatchNorm_n`` of the calling module.

    Args:
        x: ``[batch, height, width, channels]``.
        features: the channels it gives.
        size: of the window, height and width alike; odd.
        train: whether batch statistics are updated.
        strides: its steps, height and width alike; a remainder counts.
        groups: into how many the channels are split; as many as channels: a depthwise convolution.

    Returns:
        ``[batch, height / strides, width / strides, features]``, rounded up.
    """
    half = size // 2
    conv = Conv(
        features,
        (size, size),
        strides=(strides, strides),
        padding=((half, half), (half, half)),
        feature_group_count=groups,
        use_bias=False,
        kernel_init=linen.initializers.he_normal(),
    )
    normed: jax.Array = BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)(conv(x))
    return normed


def residual_stages(num_blocks: Sequence[int], features: int) -> Iterator[tuple[int, int]]:
    """The channels and the strides of each block: every stage but the first doubles the channels and halves the size.

    Args:
        num_blocks: of each stage.
        features: the channels of the first.
    """
    for stage, count in enumerate(num_blocks):
        for index in range(count):
            yield features * 2**stage, 2 if stage > 0 and index == 0 else 1


def checked_stages(model: str, num_blocks: Any, example: str) -> tuple[int, ...]:
    """``num_blocks`` as a tuple; ConfigError, which names ``model``, unless it has a positive integer or more."""
    checked = positive_ints(f"{model}: num_blocks", num_blocks, example)
    if not checked:
        raise ConfigError(f"{model}: num_blocks is empty: give the blocks of each stage, such as {example}.")
    return checked


def check_images(model: str, x: jax.Array) -> None:
    """Raises DataError unless ``x`` is of rank 4; ``model`` says for whom."""
    if x.ndim != 4:
        hint = ": add a channel axis, images[..., None]" if x.ndim == 3 else ""
        raise DataError(f"{model} needs images [batch, height, width, channels], not of shape {x.shape}{hint}.")
