"""Residual networks of bottleneck blocks, for photographs."""

from __future__ import annotations

import dataclasses

import jax
from flax import linen
from jax import numpy as jnp

from jaxnn.models.convolutions import check_images, checked_stages, conv_norm, residual_stages
from jaxnn.nn import Dense, max_pool, positive_int

_WIDENING = 4  # of a bottleneck's last convolution


class BottleneckResNet(linen.Module):
    """ResNet-50 and deeper: a 7x7 convolution and pooling, stages of bottleneck blocks, the mean and the logits.

    He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.1, with the strides of a
    stage in its first 3x3 convolution instead of the 1x1 before it, known as version 1.5 and as torchvision's. The
    image is halved five times: 224x224 is usual. ``BottleneckResNet()`` is ResNet-50, ``num_blocks=(3, 4, 23, 3)``
    ResNet-101 and ``(3, 8, 36, 3)`` ResNet-152: 25,557,032, 44,549,160 and 60,192,808 parameters. `ResNet` is for
    small images. Parameters: ``Conv_0``, ``BatchNorm_0``, ``Bottleneck_0``, …, ``Dense_0``; each block ``Conv_0`` to
    ``Conv_2``, ``BatchNorm_0`` to ``BatchNorm_2`` and, where it changes the shape, ``Conv_3``, ``BatchNorm_3``;
    running statistics, at momentum 0.9, in the collection ``batch_stats``.

    Attributes:
        num_classes: how many logits.
        num_blocks: the blocks of each stage.
        features: the channels of the first convolution and of the first stage's 3x3 ones.

    Raises:
        ConfigError: sizes that are not positive integers, or no stage.
    """

    num_classes: int = 1000
    _: dataclasses.KW_ONLY
    num_blocks: tuple[int, ...] = (3, 4, 6, 3)
    features: int = 64

    def __post_init__(self) -> None:
        self.num_classes = positive_int("BottleneckResNet: num_classes", self.num_classes)
        self.num_blocks = checked_stages("BottleneckResNet", self.num_blocks, "(3, 4, 6, 3)")
        self.features = positive_int("BottleneckResNet: features", self.features)
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
        check_images("BottleneckResNet", x)
        x = linen.relu(conv_norm(x, self.features, 7, train=train, strides=2))
        x = max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for features, strides in residual_stages(self.num_blocks, self.features):
            x = Bottleneck(features, strides)(x, train)
        return Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


class Bottleneck(linen.Module):
    """Convolutions 1x1, 3x3 and 1x1, each normalised, added to the input; that is projected where the shape changes.

    Attributes:
        features: the channels of the first two convolutions; the last has four times as many.
        strides: of the 3x3 convolution and of the projection, height and width alike.
    """

    features: int
    strides: int = 1

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, 4 * features]``."""
        y = linen.relu(conv_norm(x, self.features, 1, train=train))
        y = linen.relu(conv_norm(y, self.features, 3, train=train, strides=self.strides))
        y = conv_norm(y, _WIDENING * self.features, 1, train=train)
        if x.shape != y.shape:
            x = conv_norm(x, _WIDENING * self.features, 1, train=train, strides=self.strides)
        return linen.relu(x + y)
