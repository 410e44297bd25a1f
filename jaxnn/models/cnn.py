"""A convolutional network for small images: convolutions and pooling, then dense layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
from flax import linen
from jax.typing import ArrayLike

from jaxnn.nn.checks import positive_int, positive_ints
from jaxnn.nn.conv import Conv
from jaxnn.nn.dropout import Dropout, check_rate
from jaxnn.nn.normalization import BatchNorm
from jaxnn.nn.pooling import max_pool
from jaxnn.types import ConfigError, DataError, suggest

_PADDINGS = ("SAME", "VALID")


class CNN(linen.Module):
    """Blocks of convolutions, each closed by max pooling, then dense layers and the logits.

    Each block: convolution, batch norm if asked for, and activation, once for each of its channel
    counts; then max pooling, then dropout. After the last it is flattened. Each dense layer: dense,
    activation, dropout. Then the dense logits. ``CNN(num_classes=10)`` suits 28x28x1 and 32x32x3.
    Parameters: ``Conv_0``, …, ``Dense_0``, …, and ``BatchNorm_0``, … with running statistics in the
    collection ``batch_stats`` (at momentum 0.9, since runs are short).

    Attributes:
        num_classes: how many logits.
        blocks: the channels of each convolution of each block.
        kernel_size: the window of the convolutions, height and width.
        pool: the window and the strides of the pooling, height and width; a remainder is dropped.
        padding: of the convolutions: ``"SAME"`` keeps height and width, ``"VALID"`` shrinks them by
            the kernel less one.
        dense: the units of the dense layers before the logits; may be empty.
        activation: an elementwise function.
        dropout: ``[]`` the rate after each pooling and after each dense activation, 0…1; may be a
            tracer.
        batch_norm: whether each convolution is normalised over the batch (Ioffe & Szegedy, 2015),
            and has no bias.

    Raises:
        ConfigError: sizes that are not positive integers, another padding, or a dropout rate
        outside 0…1.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    blocks: tuple[tuple[int, ...], ...] = ((32,), (64,))
    kernel_size: tuple[int, int] = (3, 3)
    pool: tuple[int, int] = (2, 2)
    padding: str = "SAME"
    dense: tuple[int, ...] = (128,)
    activation: Callable[[jax.Array], jax.Array] = linen.relu
    dropout: ArrayLike = 0.0
    batch_norm: bool = False

    def __post_init__(self) -> None:
        self.num_classes = positive_int("CNN: num_classes", self.num_classes)
        self.blocks = _checked_blocks(self.blocks)
        self.kernel_size = _pair("CNN: kernel_size", self.kernel_size)
        self.pool = _pair("CNN: pool", self.pool)
        self.dense = positive_ints("CNN: dense", self.dense, "(128,)")
        if self.padding not in _PADDINGS:
            raise ConfigError(f"CNN: no padding {self.padding!r}: {suggest(self.padding, _PADDINGS)}.")
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``.

        Args:
            x: ``[batch, height, width, channels]``.
            train: whether dropout is active, which then needs ``rngs={"dropout": key}``, and batch
                statistics are updated, which then needs ``mutable=["batch_stats"]``.

        Raises:
            DataError: inputs that are not of rank 4.
            ConfigError: images too small for the blocks.
        """
        _check_images(self, x.shape)
        for block in self.blocks:
            for channels in block:
                x = self._convolve(x, channels, train)
            x = max_pool(x, self.pool, self.pool)
            x = Dropout(self.dropout)(x, train=train)
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        for width in self.dense:
            x = self.activation(linen.Dense(width)(x))
            x = Dropout(self.dropout)(x, train=train)
        return linen.Dense(self.num_classes)(x)

    def _convolve(self, x: jax.Array, channels: int, train: bool) -> jax.Array:
        use_bias = not self.batch_norm  # the norm subtracts any bias again
        x = Conv(channels, self.kernel_size, padding=self.padding, use_bias=use_bias)(x)
        if self.batch_norm:
            x = BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return self.activation(x)


def _check_images(cnn: CNN, shape: tuple[int, ...]) -> None:
    if len(shape) != 4:
        hint = ": add a channel axis, images[..., None]" if len(shape) == 3 else ""
        raise DataError(f"CNN needs images [batch, height, width, channels], not of shape {shape}{hint}.")
    height, width = shape[1:3]
    lost = (0, 0) if cnn.padding == "SAME" else (cnn.kernel_size[0] - 1, cnn.kernel_size[1] - 1)
    for number, block in enumerate(cnn.blocks, start=1):
        height = (height - len(block) * lost[0]) // cnn.pool[0]
        width = (width - len(block) * lost[1]) // cnn.pool[1]
        if min(height, width) < 1:
            raise ConfigError(
                f"CNN: images of {shape[1]}x{shape[2]} are too small, nothing is left after block "
                f"{number} of {len(cnn.blocks)}: use fewer blocks or smaller windows."
            )


def _checked_blocks(blocks: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    given = blocks if isinstance(blocks, Sequence) else ()
    checked = tuple(positive_ints(f"CNN: blocks[{number}]", block, "(32,)") for number, block in enumerate(given))
    if not checked or () in checked:
        raise ConfigError(
            f"CNN: blocks must hold a tuple of channel counts for each block, as ((32,), (64,)), not {blocks!r}."
        )
    return checked


def _pair(name: str, values: tuple[int, int]) -> tuple[int, int]:
    checked = positive_ints(name, values, "(3, 3)")
    if len(checked) != 2:
        raise ConfigError(f"{name} must be two integers, height and width, not {values!r}.")
    return checked[0], checked[1]
