"""Residual networks: ResNet, WideResNet and MobileNetV2."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen
from jax import numpy as jnp
from jax.typing import ArrayLike

from jaxnn._fields import positive_ints
from jaxnn.models._model_inputs import Remat, check_fields, check_images, rematerialized
from jaxnn.nn import BatchNorm, Conv, Dense, Dropout, max_pool
from jaxnn.types import ConfigError, suggest

_STAGES: tuple[tuple[int, ...], ...] = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEMS = ("cifar", "imagenet")


class ResNetBlock(linen.Module):
    """The basic residual block: two 3x3 convolutions, each normalized, and a shortcut.

    Parameters: ``Conv_0``, ``BatchNorm_0``, ``Conv_1``, ``BatchNorm_1``, and of a projecting shortcut ``Conv_2``,
    ``BatchNorm_2``.

    >>> block = jn.models.ResNetBlock(16, strides=2)
    >>> jn.models.num_parameters(block, jax.ShapeDtypeStruct((1, 32, 32, 8), "float32"))
    3680
    """

    features: int  # output channels
    strides: int = 1  # of the first convolution and of the shortcut, along height and width
    project: bool = True  # as `ResNet`'s

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, features]``."""
        y = linen.relu(_conv_norm(x, self.features, 3, train=train, strides=self.strides))
        y = _conv_norm(y, self.features, 3, train=train)
        return _add_shortcut(self, x, y, train)


class Bottleneck(linen.Module):
    """The bottleneck block of ResNet-50 and deeper: convolutions 1x1, 3x3 and 1x1, each normalized, and a shortcut.

    Parameters: ``Conv_0`` to ``Conv_2``, ``BatchNorm_0`` to ``BatchNorm_2``, and of a projecting shortcut ``Conv_3``,
    ``BatchNorm_3``.

    >>> block = jn.models.Bottleneck(64, strides=2)
    >>> jn.models.num_parameters(block, jax.ShapeDtypeStruct((1, 56, 56, 256), "float32"))
    136448
    """

    features: int  # channels of the first two convolutions; the last has four times as many
    strides: int = 1  # of the 3x3 convolution and of the shortcut, along height and width
    project: bool = True  # as `ResNet`'s

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, 4 * features]``."""
        y = linen.relu(_conv_norm(x, self.features, 1, train=train))
        y = linen.relu(_conv_norm(y, self.features, 3, train=train, strides=self.strides))
        y = _conv_norm(y, 4 * self.features, 1, train=train)
        return _add_shortcut(self, x, y, train)


class ResNet(linen.Module):
    """A stem, stages of residual blocks, global average pooling and the logits.

    He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition" (2015). Each stage but the first halves height
    and width (odd sizes are rounded up) and doubles the channels. The defaults are the ResNet-20 for CIFAR-10 of their
    section 4.2, with 1x1 convolutions in the shortcuts that change the shape (option B): 272,474 parameters, or 269,722
    as theirs with ``project=False`` (option A). ``num_blocks=(9, 9, 9)`` is ResNet-56: 855,770 or 853,018.

    `create` has those for 224x224 images, as torchvision's: a bottleneck has its stride in the 3x3 convolution, not in
    the 1x1 before it (version 1.5). Parameters: ``Conv_0``, ``BatchNorm_0``, ``ResNetBlock_0`` or ``Bottleneck_0``, …,
    ``Dense_0``.

    >>> resnet50 = jn.models.create("resnet50")
    >>> resnet50.num_blocks, resnet50.block.__name__, resnet50.features, resnet50.stem
    ((3, 4, 6, 3), 'Bottleneck', 64, 'imagenet')

    Attributes:
        num_blocks: number of residual blocks in each stage.
        features: channels of the stem and of the first stage.
        block: `ResNetBlock`, `Bottleneck`, or a module called as ``block(features, strides, project)(x, train)``.
        stem: ``"cifar"``, a 3x3 convolution; or ``"imagenet"``, a 7x7 convolution and 3x3 max pooling, both of stride
            2, so that an image is halved five times by four stages.
        project: whether a shortcut that changes the shape is a 1x1 convolution. If not, it skips positions and pads the
            new channels with zeros.
        remat: as `ViT`'s, of each block.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    num_blocks: tuple[int, ...] = (3, 3, 3)
    features: int = 16
    block: Callable[..., Any] = ResNetBlock
    stem: str = "cifar"
    project: bool = True
    remat: Remat = False

    def __post_init__(self) -> None:
        check_fields(self, "num_classes", "features")
        self.num_blocks = positive_ints("ResNet: num_blocks", self.num_blocks, "(3, 3, 3)", nonempty=True)
        if not callable(self.block):
            raise ConfigError(f"ResNet: block must be models.ResNetBlock or models.Bottleneck, not {self.block!r}.")
        if self.stem not in _STEMS:
            raise ConfigError(f"ResNet: no stem {self.stem!r}: {suggest(str(self.stem), _STEMS)}.")
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("ResNet", x)
        if self.stem == "cifar":
            x = linen.relu(_conv_norm(x, self.features, 3, train=train))
        else:
            x = linen.relu(_conv_norm(x, self.features, 7, train=train, strides=2))
            x = max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        call = rematerialized(lambda block, x: block(x, train), self.remat)
        for stage, count in enumerate(self.num_blocks):
            for index in range(count):
                strides = 2 if stage > 0 and index == 0 else 1
                x = call(self.block(self.features * 2**stage, strides, self.project), x)
        return Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


class WideResNet(linen.Module):
    """The wide residual network WRN-``depth``-``width``: a 3x3 convolution, three stages of pre-activation blocks.

    Zagoruyko & Komodakis, "Wide Residual Networks" (2016, arXiv:1605.07146), for 32x32 images. The default is
    WRN-28-10. The second and third stages halve height and width (odd sizes are rounded up). Parameters: ``Conv_0``,
    ``WideBlock_0``, …, ``BatchNorm_0``, ``Dense_0``; each block ``BatchNorm_0``, ``Conv_0``, ``BatchNorm_1``,
    ``Conv_1``, and of a projecting shortcut ``Conv_2``.

    >>> jn.models.num_parameters(jn.models.WideResNet(10), jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"))
    36479194

    Attributes:
        depth: number of convolutions, those of shortcuts aside: 6 n + 4 for n blocks per stage.
        width: factor of the channels, which are 16, 32 and 64 times this many.
        dropout: ``[]`` the rate between the convolutions of a block, 0…1; may be a tracer; theirs is 0.3.
        remat: as `ViT`'s, of each block.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    depth: int = 28
    width: int = 10
    dropout: ArrayLike = 0.0
    remat: Remat = False

    def __post_init__(self) -> None:
        check_fields(self, "num_classes", "depth", "width")
        if self.depth < 10 or self.depth % 6 != 4:
            raise ConfigError(f"WideResNet: depth must be 6 n + 4, as 16, 28 or 40, not {self.depth}.")
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("WideResNet", x)
        x = _conv(x, 16, 3)
        call = rematerialized(lambda block, x: block(x, train), self.remat)
        for stage in range(3):
            for index in range((self.depth - 4) // 6):
                strides = 2 if stage > 0 and index == 0 else 1
                x = call(WideBlock(16 * self.width * 2**stage, strides, self.dropout), x)
        return Dense(self.num_classes)(jnp.mean(linen.relu(_norm(x, train)), axis=(1, 2)))


class WideBlock(linen.Module):
    """Twice batch norm, relu and a 3x3 convolution; added to the input, or to a 1x1 convolution of its activation."""

    features: int  # output channels
    strides: int  # of the first convolution and of the shortcut, along height and width
    dropout: ArrayLike  # [] the rate between the convolutions

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to ``[batch, height / strides, width / strides, features]``."""
        active = linen.relu(_norm(x, train))
        y = linen.relu(_norm(_conv(active, self.features, 3, self.strides), train))
        y = _conv(Dropout(self.dropout)(y, train=train), self.features, 3)
        return y + (x if x.shape == y.shape else _conv(active, self.features, 1, self.strides))


class MobileNetV2(linen.Module):
    """MobileNetV2: a 3x3 convolution, stages of inverted residual blocks, a 1x1 convolution, pooling and the logits.

    Sandler, Howard, Zhu, Zhmoginov & Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (2018), table 2.
    The image is halved five times (odd sizes are rounded up): 224x224 is usual. Parameters: ``Conv_0``,
    ``BatchNorm_0``, ``InvertedResidual_0``, …, ``Conv_1``, ``BatchNorm_1``, ``Dense_0``; each block ``Conv_0``, the
    depthwise ``Conv_1``, ``Conv_2``, and ``BatchNorm_0`` to ``BatchNorm_2``; without an expansion the depthwise
    convolution is ``Conv_0``.

    >>> jn.models.num_parameters(jn.models.MobileNetV2(), jax.ShapeDtypeStruct((1, 224, 224, 3), "float32"))
    3504872

    Attributes:
        stages: expansion, channels, number of blocks and strides of the first block of each stage.
        features: channels of the first convolution.
        last_features: channels of the last convolution.
        dropout: ``[]`` the rate before the logits, 0…1; may be a tracer; torchvision trains with 0.2.
    """

    num_classes: int = 1000
    _: dataclasses.KW_ONLY
    stages: tuple[tuple[int, ...], ...] = _STAGES
    features: int = 32
    last_features: int = 1280
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "num_classes", "features", "last_features")
        given: Any = self.stages if isinstance(self.stages, Sequence) else ()
        example = _STAGES[1]
        stages = [positive_ints(f"MobileNetV2: stages[{n}]", stage, str(example)) for n, stage in enumerate(given)]
        if not stages or any(len(stage) != len(example) for stage in stages):
            fields = "expansion, channels, number of blocks and strides"
            raise ConfigError(f"MobileNetV2: stages must hold {fields} of each, as ({example},), not {self.stages!r}.")
        self.stages = tuple(stages)
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
    """A 1x1 expansion, a depthwise 3x3 convolution and a 1x1 projection; added to an input of the same shape."""

    features: int  # channels of the output
    expansion: int  # factor of the hidden channels; 1: without the first convolution
    strides: int  # of the depthwise convolution, along height and width

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
    return _norm(_conv(x, features, size, strides, groups), train)


def _conv(x: jax.Array, features: int, size: int, strides: int = 1, groups: int = 1) -> jax.Array:
    """A convolution padded by half its odd kernel size, without a bias: ``Conv_n`` of the caller."""
    half = size // 2
    convolved: jax.Array = Conv(
        features,
        (size, size),
        strides=(strides, strides),
        padding=((half, half), (half, half)),
        feature_group_count=groups,
        use_bias=False,
        kernel_init=linen.initializers.he_normal(),
    )(x)
    return convolved


def _norm(x: jax.Array, train: bool) -> jax.Array:
    """``BatchNorm_n`` of the caller."""
    normed: jax.Array = BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)(x)
    return normed


def _add_shortcut(block: Any, x: jax.Array, y: jax.Array, train: bool) -> jax.Array:
    """``relu(x + y)``; an ``x`` of another shape is projected, or subsampled and padded with zero channels."""
    if x.shape != y.shape and block.project:
        x = _conv_norm(x, y.shape[-1], 1, train=train, strides=block.strides)
    elif x.shape != y.shape:
        x = x[:, :: block.strides, :: block.strides]
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, y.shape[-1] - x.shape[-1])])
    return linen.relu(x + y)
