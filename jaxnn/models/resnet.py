"""Residual networks for small images."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
from flax import linen
from jax import numpy as jnp

from jaxnn.nn.checks import positive_int, positive_ints
from jaxnn.nn.conv import Conv
from jaxnn.nn.normalization import BatchNorm
from jaxnn.types import ConfigError, DataError

_Conv = partial(Conv, use_bias=False, kernel_init=linen.initializers.he_normal())
_Conv3x3 = partial(_Conv, kernel_size=(3, 3), padding=((1, 1), (1, 1)))
_Norm = partial(BatchNorm, momentum=0.9, epsilon=1e-5)


class ResNet(linen.Module):
    """Stages of residual blocks of two 3x3 convolutions each, then the mean over positions and the logits.

    He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2: each stage but
    the first halves height and width and doubles the channels. ``ResNet(10)`` is their ResNet-20 for
    CIFAR-10 and ``ResNet(10, num_blocks=(9, 9, 9))`` their ResNet-56, but for 1x1 convolutions where a
    block changes the shape (their option B) instead of padding with zeros: 272,474 and 855,770 parameters.
    Parameters: ``Conv_0``, ``BatchNorm_0``, ``ResNetBlock_0``, …, ``Dense_0``; each block ``Conv_0``,
    ``BatchNorm_0``, ``Conv_1``, ``BatchNorm_1`` and, where it changes the shape, ``Conv_2``,
    ``BatchNorm_2``; running statistics, at momentum 0.9, in the collection ``batch_stats``.

    Attributes:
        num_classes: how many logits.
        num_blocks: the residual blocks of each stage.
        features: the channels of the first stage.

    Raises:
        ConfigError: sizes that are not positive integers, or no stage.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    num_blocks: tuple[int, ...] = (3, 3, 3)
    features: int = 16

    def __post_init__(self) -> None:
        self.num_classes = positive_int("ResNet: num_classes", self.num_classes)
        self.num_blocks = positive_ints("ResNet: num_blocks", self.num_blocks, "(3, 3, 3)")
        self.features = positive_int("ResNet: features", self.features)
        if not self.num_blocks:
            raise ConfigError("ResNet: num_blocks is empty: give the blocks of each stage, such as (3, 3, 3).")
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``.

        Args:
            x: ``[batch, height, width, channels]``; odd heights and widths are halved upwards.
            train: whether batch statistics are updated, which then needs ``mutable=["batch_stats"]``.

        Raises:
            DataError: inputs that are not of rank 4.
        """
        if x.ndim != 4:
            raise DataError(f"ResNet needs images [batch, height, width, channels], not of shape {x.shape}.")
        x = _Conv3x3(self.features)(x)
        x = linen.relu(_Norm(use_running_average=not train)(x))
        for stage, num_blocks in enumerate(self.num_blocks):
            for index in range(num_blocks):
                strides = 2 if stage > 0 and index == 0 else 1
                x = ResNetBlock(self.features * 2**stage, strides)(x, train)
        return linen.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


class ResNetBlock(linen.Module):
    """``relu(norm(conv(relu(norm(conv(x))))) + x)``; ``x`` is projected where the shape changes.

    Attributes:
        features: the channels.
        strides: of the first convolution and of the projection, height and width alike.
    """

    features: int
    strides: int = 1

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, features]``."""
        norm = partial(_Norm, use_running_average=not train)
        strides = (self.strides, self.strides)
        y = linen.relu(norm()(_Conv3x3(self.features, strides=strides)(x)))
        y = norm()(_Conv3x3(self.features)(y))
        if x.shape != y.shape:
            x = norm()(_Conv(self.features, (1, 1), strides=strides, padding="VALID")(x))
        return linen.relu(x + y)
