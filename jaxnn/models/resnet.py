"""Residual networks for small images."""

from __future__ import annotations

import dataclasses

import jax
from flax import linen
from jax import numpy as jnp

from jaxnn.models.convolutions import check_images, checked_stages, conv_norm, residual_stages
from jaxnn.nn import Dense, positive_int


class ResNet(linen.Module):
    """Stages of residual blocks of two 3x3 convolutions each, then the mean over positions and the logits.

    He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2: each stage but
    the first halves height and width and doubles the channels. ``ResNet(10)`` is their ResNet-20 for
    CIFAR-10 and ``ResNet(10, num_blocks=(9, 9, 9))`` their ResNet-56, but for 1x1 convolutions where a
    block changes the shape (their option B): 272,474 and 855,770 parameters. With ``project=False`` they are
    theirs (option A): 269,722 and 853,018.
    Parameters: ``Conv_0``, ``BatchNorm_0``, ``ResNetBlock_0``, …, ``Dense_0``; each block ``Conv_0``,
    ``BatchNorm_0``, ``Conv_1``, ``BatchNorm_1`` and, where it changes the shape, ``Conv_2``,
    ``BatchNorm_2``; running statistics, at momentum 0.9, in the collection ``batch_stats``.

    Attributes:
        num_classes: how many logits.
        num_blocks: the residual blocks of each stage.
        features: the channels of the first stage.
        project: whether a shortcut is a 1x1 convolution where a block changes the shape; if not, it skips
            positions and has zeros for the channels that are new.

    Raises:
        ConfigError: sizes that are not positive integers, or no stage.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    num_blocks: tuple[int, ...] = (3, 3, 3)
    features: int = 16
    project: bool = True

    def __post_init__(self) -> None:
        self.num_classes = positive_int("ResNet: num_classes", self.num_classes)
        self.num_blocks = checked_stages("ResNet", self.num_blocks, "(3, 3, 3)")
        self.features = positive_int("ResNet: features", self.features)
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
        check_images("ResNet", x)
        x = linen.relu(conv_norm(x, self.features, 3, train=train))
        for features, strides in residual_stages(self.num_blocks, self.features):
            x = ResNetBlock(features, strides, self.project)(x, train)
        return Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


class ResNetBlock(linen.Module):
    """``relu(norm(conv(relu(norm(conv(x))))) + x)``; ``x`` is made to fit where the shape changes.

    Attributes:
        features: the channels.
        strides: of the first convolution and of the shortcut, height and width alike.
        project: whether ``x`` is made to fit by a 1x1 convolution, or by skipping positions and padding with zeros.
    """

    features: int
    strides: int = 1
    project: bool = True

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, features]``."""
        y = linen.relu(conv_norm(x, self.features, 3, train=train, strides=self.strides))
        y = conv_norm(y, self.features, 3, train=train)
        if x.shape != y.shape and self.project:
            x = conv_norm(x, self.features, 1, train=train, strides=self.strides)
        elif x.shape != y.shape:
            x = x[:, :: self.strides, :: self.strides]
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, self.features - x.shape[-1])])
        return linen.relu(x + y)
