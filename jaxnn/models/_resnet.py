"""Residual networks, for small images and for photographs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import linen
from jax import numpy as jnp

from jaxnn.models._model_inputs import check_images, check_sizes
from jaxnn.nn import BatchNorm, Conv, Dense, max_pool, positive_ints
from jaxnn.types import ConfigError

_WIDENING = 4  # of a bottleneck's last convolution


class ResNet(linen.Module):
    """Stages of residual blocks of two 3x3 convolutions each, then the mean over positions and the logits.

    He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2: each stage but the first
    halves height and width (odd ones upwards) and doubles the channels. ``ResNet(10)`` is their ResNet-20 for CIFAR-10
    and ``ResNet(10, num_blocks=(9, 9, 9))`` their ResNet-56, but for 1x1 convolutions where a block changes the shape
    (their option B): 272,474 and 855,770 parameters. With ``project=False`` they are theirs (option A): 269,722 and
    853,018. Parameters: ``Conv_0``, ``BatchNorm_0``, ``ResNetBlock_0``, …, ``Dense_0``; each block ``Conv_0``,
    ``BatchNorm_0``, ``Conv_1``, ``BatchNorm_1`` and, where it changes the shape, ``Conv_2``, ``BatchNorm_2``.

    Attributes:
        num_classes: how many logits.
        num_blocks: the residual blocks of each stage.
        features: the channels of the first stage.
        project: whether a shortcut is a 1x1 convolution where a block changes the shape; if not, it skips positions and
            has zeros for the channels that are new.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    num_blocks: tuple[int, ...] = (3, 3, 3)
    features: int = 16
    project: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "num_classes", "features")
        self.num_blocks = _checked_stages("ResNet", self.num_blocks, "(3, 3, 3)")
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("ResNet", x)
        x = linen.relu(conv_norm(x, self.features, 3, train=train))
        for features, strides in _residual_stages(self.num_blocks, self.features):
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
    """

    num_classes: int = 1000
    _: dataclasses.KW_ONLY
    num_blocks: tuple[int, ...] = (3, 4, 6, 3)
    features: int = 64

    def __post_init__(self) -> None:
        check_sizes(self, "num_classes", "features")
        self.num_blocks = _checked_stages("BottleneckResNet", self.num_blocks, "(3, 4, 6, 3)")
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("BottleneckResNet", x)
        x = linen.relu(conv_norm(x, self.features, 7, train=train, strides=2))
        x = max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for features, strides in _residual_stages(self.num_blocks, self.features):
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


def conv_norm(x: jax.Array, features: int, size: int, *, train: bool, strides: int = 1, groups: int = 1) -> jax.Array:
    """A convolution padded by half its window, and batch norm: ``Conv_n`` and ``BatchNorm_n`` of the calling module.

    From ``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, features]``, rounded up;
    ``size`` is of the window, odd; as many ``groups`` as channels are a depthwise convolution.
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


def _residual_stages(num_blocks: Sequence[int], features: int) -> Iterator[tuple[int, int]]:
    """The channels and strides of each block: every stage but the first doubles the channels and halves the size."""
    for stage, count in enumerate(num_blocks):
        for index in range(count):
            yield features * 2**stage, 2 if stage > 0 and index == 0 else 1


def _checked_stages(model: str, num_blocks: Any, example: str) -> tuple[int, ...]:
    """``num_blocks`` as a tuple; ConfigError, which names ``model``, unless it has a positive integer or more."""
    checked = positive_ints(f"{model}: num_blocks", num_blocks, example)
    if not checked:
        raise ConfigError(f"{model}: num_blocks is empty: give the blocks of each stage, such as {example}.")
    return checked
