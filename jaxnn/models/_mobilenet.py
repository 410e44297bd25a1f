"""MobileNetV2: inverted residual blocks with depthwise convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen
from jax import numpy as jnp
from jax.typing import ArrayLike

from jaxnn.models._model_inputs import check_images, check_sizes
from jaxnn.models._resnet import conv_norm
from jaxnn.nn import Dense, Dropout, check_rate, positive_ints
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
        self.stages = _checked_stages(self.stages)
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("MobileNetV2", x)
        x = linen.relu6(conv_norm(x, self.features, 3, train=train, strides=2))
        for expansion, features, num_blocks, strides in self.stages:
            for index in range(num_blocks):
                x = InvertedResidual(features, expansion, strides if index == 0 else 1)(x, train)
        x = linen.relu6(conv_norm(x, self.last_features, 1, train=train))
        x = Dropout(self.dropout)(jnp.mean(x, axis=(1, 2)), train=train)
        return Dense(self.num_classes)(x)


class InvertedResidual(linen.Module):
    """A 1x1 convolution to more channels, a depthwise 3x3 one, a 1x1 one to fewer; added to an input of that shape.

    Attributes:
        features: the channels it gives.
        expansion: how many times the input's channels the middle has; 1: the first convolution is left out.
        strides: of the depthwise convolution, height and width alike; with others than 1 nothing is added.
    """

    features: int
    expansion: int
    strides: int

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, features]``."""
        channels = x.shape[-1]
        hidden = channels * self.expansion
        y = x if self.expansion == 1 else linen.relu6(conv_norm(x, hidden, 1, train=train))
        y = linen.relu6(conv_norm(y, hidden, 3, train=train, strides=self.strides, groups=hidden))
        y = conv_norm(y, self.features, 1, train=train)
        return x + y if self.strides == 1 and channels == self.features else y


def _checked_stages(stages: Any) -> tuple[Stage, ...]:
    given = stages if isinstance(stages, Sequence) else ()
    example = "(6, 24, 2, 2)"
    checked = [positive_ints(f"MobileNetV2: stages[{n}]", stage, example) for n, stage in enumerate(given)]
    if not checked or any(len(stage) != len(_STAGES[0]) for stage in checked):
        raise ConfigError(
            "MobileNetV2: stages must hold the expansion, channels, number of blocks and strides of each stage, as "
            f"({example},), not {stages!r}."
        )
    return tuple((expansion, features, blocks, strides) for expansion, features, blocks, strides in checked)
