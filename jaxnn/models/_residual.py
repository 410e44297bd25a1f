"""Residual networks: ResNet for small images and for photographs, and MobileNetV2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from flax import linen
from jax import numpy as jnp
from jax.typing import ArrayLike

from jaxnn.models._model_inputs import check_images, check_sizes
from jaxnn.nn import BatchNorm, Conv, Dense, Dropout, check_rate, max_pool, positive_ints
from jaxnn.types import ConfigError

type Stage = tuple[int, int, int, int]

_STAGES: tuple[Stage, ...] = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
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
        self.num_blocks = positive_ints("ResNet: num_blocks", self.num_blocks, "(3, 3, 3)", nonempty=True)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("ResNet", x)
        x = linen.relu(_conv_norm(x, self.features, 3, train=train))
        return _stages_and_logits(self, partial(ResNetBlock, project=self.project), x, train)


class ResNetBlock(linen.Module):
    """``relu(norm(conv(relu(norm(conv(x))))) + x)``; ``x`` is made to fit where the shape changes."""

    features: int  # channels
    strides: int  # along height and width, of the first convolution and of the shortcut
    project: bool  # whether `x` is made to fit by a 1x1 convolution, or by skipping positions and padding with zeros

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, features]``."""
        y = linen.relu(_conv_norm(x, self.features, 3, train=train, strides=self.strides))
        y = _conv_norm(y, self.features, 3, train=train)
        if x.shape != y.shape and self.project:
            x = _conv_norm(x, self.features, 1, train=train, strides=self.strides)
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
        self.num_blocks = positive_ints("BottleneckResNet: num_blocks", self.num_blocks, "(3, 4, 6, 3)", nonempty=True)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("BottleneckResNet", x)
        x = linen.relu(_conv_norm(x, self.features, 7, train=train, strides=2))
        x = max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        return _stages_and_logits(self, Bottleneck, x, train)


class Bottleneck(linen.Module):
    """Convolutions 1x1, 3x3 and 1x1, each normalised, added to the input; that is projected where the shape changes."""

    features: int  # channels of the first two convolutions; the last has four times as many
    strides: int  # along height and width, of the 3x3 convolution and of the projection

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, 4 * features]``."""
        y = linen.relu(_conv_norm(x, self.features, 1, train=train))
        y = linen.relu(_conv_norm(y, self.features, 3, train=train, strides=self.strides))
        y = _conv_norm(y, _WIDENING * self.features, 1, train=train)
        if x.shape != y.shape:
            x = _conv_norm(x, _WIDENING * self.features, 1, train=train, strides=self.strides)
        return linen.relu(x + y)


class MobileNetV2(linen.Module):
    """A 3x3 convolution, stages of inverted residual blocks, a 1x1 convolution, the mean and the logits.

    Sandler, Howard, Zhu, Zhmoginov & Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (2018), table 2.
    The image is halved five times, upwards: 224x224 is usual. ``MobileNetV2()`` has torchvision's 3,504,872 parameters.
    Parameters: ``Conv_0``, ``BatchNorm_0``, ``InvertedResidual_0``, …, ``Conv_1``, ``BatchNorm_1``, ``Dense_0``; each
    block ``Conv_0``, the depthwise ``Conv_1``, ``Conv_2``, and ``BatchNorm_0`` to ``BatchNorm_2`` (with an expansion
    of 1 the depthwise one is the first, ``Conv_0``).

    Attributes:
        num_classes: how many logits.
        stages: of each its expansion, channels, number of blocks, and the strides of the first of them.
        features: the channels of the first convolution.
        last_features: the channels of the last convolution.
        dropout: ``[]`` the rate before the logits, 0…1; may be a tracer; torchvision trains with 0.2.
    """

    num_classes: int = 1000
    _: dataclasses.KW_ONLY
    stages: tuple[Stage, ...] = _STAGES
    features: int = 32
    last_features: int = 1280
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "num_classes", "features", "last_features")
        given: Any = self.stages if isinstance(self.stages, Sequence) else ()
        example = _STAGES[1]
        stages = [positive_ints(f"MobileNetV2: stages[{n}]", stage, str(example)) for n, stage in enumerate(given)]
        if not stages or any(len(stage) != len(example) for stage in stages):
            raise ConfigError(
                "MobileNetV2: stages must hold the expansion, channels, number of blocks and strides of each stage, as "
                f"({example},), not {self.stages!r}."
            )
        self.stages = tuple((expansion, features, blocks, strides) for expansion, features, blocks, strides in stages)
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("MobileNetV2", x)
        x = linen.relu6(_conv_norm(x, self.features, 3, train=train, strides=2))
        for expansion, features, num_blocks, strides in self.stages:
            for index in range(num_blocks):
                x = InvertedResidual(features, expansion, strides if index == 0 else 1)(x, train)
        x = linen.relu6(_conv_norm(x, self.last_features, 1, train=train))
        x = Dropout(self.dropout)(jnp.mean(x, axis=(1, 2)), train=train)
        return Dense(self.num_classes)(x)


class InvertedResidual(linen.Module):
    """A 1x1 convolution to more channels, a depthwise 3x3 one, a 1x1 one to fewer; added to an input of that shape."""

    features: int  # channels of the output
    expansion: int  # how many times the input's channels the middle has; 1: the first convolution is left out
    strides: int  # along height and width, of the depthwise convolution; with others than 1 nothing is added

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, features]``."""
        channels = x.shape[-1]
        hidden = channels * self.expansion
        y = x if self.expansion == 1 else linen.relu6(_conv_norm(x, hidden, 1, train=train))
        y = linen.relu6(_conv_norm(y, hidden, 3, train=train, strides=self.strides, groups=hidden))
        y = _conv_norm(y, self.features, 1, train=train)
        return x + y if self.strides == 1 and channels == self.features else y


def _conv_norm(x: jax.Array, features: int, size: int, *, train: bool, strides: int = 1, groups: int = 1) -> jax.Array:
    """A convolution padded by half its odd window, and batch norm: ``Conv_n``, ``BatchNorm_n`` of the caller."""
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


def _stages_and_logits(model: Any, block: Callable[..., linen.Module], x: jax.Array, train: bool) -> jax.Array:
    """The residual blocks and the logits: every stage but the first doubles the channels and halves the size."""
    for stage, count in enumerate(model.num_blocks):
        for index in range(count):
            x = block(model.features * 2**stage, 2 if stage > 0 and index == 0 else 1)(x, train)
    return Dense(model.num_classes)(jnp.mean(x, axis=(1, 2)))
