"""Feedforward networks: multilayer perceptrons, one of them for tables, and a convolutional network."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.typing import ArrayLike

from jaxnn._fields import check_rate, positive_ints
from jaxnn.models._model_inputs import check_fields, check_images
from jaxnn.nn import BatchNorm, Conv, Dense, Dropout, Embed, max_pool
from jaxnn.types import ConfigError, DataError, check_int, suggest

_PADDINGS = ("SAME", "VALID")
type Pooling = Callable[[jax.Array, tuple[int, int], tuple[int, int]], jax.Array]


class MLP(linen.Module):
    """A multilayer perceptron on flattened inputs, with dropout after each activation.

    Parameters: ``Dense_0``, ``Dense_1``, ….

    >>> model = jn.models.MLP((512, 512, 10))  # two hidden layers, 10 outputs
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 28, 28, 1), "float32"))
    669706

    Attributes:
        features: units of each layer, outputs last.
        activation: an elementwise function, after each layer but the last.
        dropout: ``[]`` the rate after each activation, 0…1; may be a tracer.
    """

    features: tuple[int, ...]
    _: dataclasses.KW_ONLY
    activation: Callable[[jax.Array], jax.Array] = linen.relu
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        self.features = positive_ints("MLP: features", self.features, "(512, 10)", nonempty=True)
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, ...]``, flattened to ``[batch, -1]``, to ``[batch, features[-1]]``."""
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        *hidden, outputs = self.features
        for width in hidden:
            x = self.activation(Dense(width)(x))
            x = Dropout(self.dropout)(x, train=train)
        return Dense(outputs)(x)


class TableMLP(linen.Module):
    """A multilayer perceptron on numbers and embedded categories, as `jaxnn.data.table` and `standardize` give them.

    With ``frequencies``, each number ``x`` is embedded too, ``relu(w @ [sin(2 pi c x), cos(2 pi c x)] + b)`` with its
    own learnt ``c``, ``w`` and ``b``: PLR of Gorishniy, Rubachev & Babenko, "On Embeddings for Numerical Features in
    Tabular Deep Learning" (2022, arXiv:2203.05556). Parameters: ``Embed_0``, the rows of all columns; ``frequencies``
    and ``Einsum_0``; ``MLP_0``.

    >>> model = jn.models.TableMLP((8, 2), num_categories=(4, 3), embedding_features=5)
    >>> inputs = {"numbers": np.zeros((1, 6), np.float32), "categories": np.zeros((1, 2), np.int32)}
    >>> jn.models.num_parameters(model, inputs)  # 7 * 5, (6 + 2 * 5) * 8 + 8, 8 * 2 + 2
    189

    Attributes:
        features: units of each layer, outputs last.
        num_categories: the number of ids of each categorical column, ``splits.train.columns.num_categories``.
        embedding_features: width of the embedding of a category, and of a number.
        frequencies: size of each ``c``; 0: numbers are not embedded.
        frequency_scale: ``[]`` the deviation of the initial ``c``, worth a sweep from 0.01 to 10; may be a tracer.
        dropout: ``[]`` the rate after each activation of the perceptron; may be a tracer.
    """

    features: tuple[int, ...]
    _: dataclasses.KW_ONLY
    num_categories: tuple[int, ...] = ()
    embedding_features: int = 16
    frequencies: int = 0
    frequency_scale: ArrayLike = 0.1
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        self.num_categories = positive_ints("TableMLP: num_categories", self.num_categories, "(4, 3)")
        check_fields(self, "embedding_features")
        check_int("TableMLP: frequencies", self.frequencies, 0)
        super().__post_init__()

    @linen.compact
    def __call__(self, inputs: Mapping[str, jax.Array], train: bool = False) -> jax.Array:
        """``numbers`` and ``categories [batch, columns]``, of which one may lack, to ``[batch, features[-1]]``."""
        if not isinstance(inputs, Mapping):
            raise DataError("TableMLP takes the dicts of jn.data.table, not an array: use jn.models.MLP.")
        x, ids = inputs.get("numbers"), inputs.get("categories")
        columns = 0 if ids is None else ids.shape[1]
        if columns != len(self.num_categories):
            raise DataError(
                f"the inputs have {columns} columns of categories, and TableMLP's num_categories are of "
                f"{len(self.num_categories)}: give num_categories=splits.train.columns.num_categories."
            )
        if x is not None and self.frequencies:
            init, columns = linen.initializers, x.shape[1]
            c = self.param("frequencies", init.normal(self.frequency_scale), (columns, self.frequencies))
            wide = jnp.promote_types(x.dtype, jnp.float32)
            angles = 2 * math.pi * c.astype(wide)[None] * x.astype(wide)[..., None]
            waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(x.dtype)
            x = linen.relu(_DenseOfColumns(self.embedding_features, name="Einsum_0")(waves))
        if ids is not None:
            first = np.cumsum([0, *self.num_categories[:-1]], dtype=np.int32)
            ids = Embed(sum(self.num_categories), self.embedding_features)(ids + first[None])
        parts = [part.reshape(part.shape[0], math.prod(part.shape[1:])) for part in (x, ids) if part is not None]
        return MLP(self.features, dropout=self.dropout)(jnp.concatenate(parts, axis=1), train)


class _DenseOfColumns(linen.Module):
    """A dense layer for each column: ``[batch, columns, k]`` to ``[batch, columns, features]``."""

    features: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init, (_, columns, k) = linen.initializers, x.shape
        kernel = self.param("kernel", init.lecun_normal(batch_axis=0), (columns, k, self.features))
        bias = self.param("bias", init.zeros_init(), (columns, self.features))
        # XLA:CPU sums batched products of bfloat16 in it, and loses up to half of a kernel's gradient.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        product = jnp.einsum("bnk,nkd->bnd", x, kernel.astype(x.dtype), preferred_element_type=wide)
        return (product + bias.astype(wide)[None]).astype(x.dtype)


class CNN(linen.Module):
    """Blocks of convolutions and pooling, then dense layers and the logits.

    Each block: convolution, optional batch norm, and activation for each of its channel counts; then pooling and
    dropout. The result is flattened; each dense layer is followed by activation and dropout. The defaults suit 28x28x1
    and 32x32x3; images too small for the blocks raise `ConfigError`. Parameters: ``Conv_0``, …, ``Dense_0``, …, and
    ``BatchNorm_0``, … with running statistics in ``batch_stats``.

    Known networks: Keras's ``mnist_cnn`` (example); its ``cifar10_cnn``, ``CNN(10, blocks=((32, 32), (64, 64)),
    padding=("SAME", "VALID"), dense=(512,), dropout=0.25, dense_dropout=0.5)``, 1,250,858 parameters; AlexNet-R of Shi
    et al., "Benchmarking State-of-the-Art Deep Learning Software Tools" (2017, arXiv:1608.07249), ``CNN(10,
    blocks=((32,), (32,), (64,)), kernel_size=(5, 5), pool=(3, 3), pool_strides=(2, 2), pooling=(max_pool, max_pool,
    avg_pool), dense=())``, 85,098.

    >>> model = jn.models.CNN(10, blocks=((32, 64),), padding="VALID", dropout=0.25, dense_dropout=0.5)
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 28, 28, 1), "float32"))
    1199882

    Attributes:
        blocks: the channels of each convolution of each block.
        kernel_size: height and width of the convolutions' kernels.
        pool: height and width of the pooling window; a remainder is dropped.
        pool_strides: strides of the pooling; None: its window, which is much faster on CPU.
        pooling: `jaxnn.nn.max_pool`, `jaxnn.nn.avg_pool` or a function with the same call; or a tuple of one per block.
        padding: of the convolutions: ``"SAME"`` keeps height and width, ``"VALID"`` reduces them by the kernel less
            one; or a tuple of one per convolution of a block.
        dense: units of the dense layers before the logits; may be empty.
        activation: an elementwise function.
        dropout: ``[]`` the rate after each pooling and each dense activation, 0…1; may be a tracer.
        dense_dropout: ``[]`` the rate after each dense activation; None: ``dropout``.
        batch_norm: whether each convolution is followed by batch norm (Ioffe & Szegedy, 2015), and has no bias.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    blocks: tuple[tuple[int, ...], ...] = ((32,), (64,))
    kernel_size: tuple[int, int] = (3, 3)
    pool: tuple[int, int] = (2, 2)
    pool_strides: tuple[int, int] | None = None
    pooling: Pooling | tuple[Pooling, ...] = max_pool
    padding: str | tuple[str, ...] = "SAME"
    dense: tuple[int, ...] = (128,)
    activation: Callable[[jax.Array], jax.Array] = linen.relu
    dropout: ArrayLike = 0.0
    dense_dropout: ArrayLike | None = None
    batch_norm: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "num_classes")
        blocks: Any = self.blocks if isinstance(self.blocks, Sequence) else ()
        blocks = tuple(positive_ints(f"CNN: blocks[{n}]", block, "(32,)") for n, block in enumerate(blocks))
        if not blocks or () in blocks:
            raise ConfigError(
                f"CNN: blocks must hold a tuple of channel counts per block, as ((32,), (64,)), not {self.blocks!r}."
            )
        self.blocks = blocks
        self.kernel_size = _pair("CNN: kernel_size", self.kernel_size)
        self.pool = _pair("CNN: pool", self.pool)
        self.pool_strides = None if self.pool_strides is None else _pair("CNN: pool_strides", self.pool_strides)
        self.pooling = tuple(self.pooling) if isinstance(self.pooling, list) else self.pooling
        poolings = _for_each(self.pooling, len(blocks))
        if len(poolings) != len(blocks) or not all(map(callable, poolings)):
            raise ConfigError(
                "CNN: pooling must be nn.max_pool, nn.avg_pool or a function like them, or a tuple of one for each of "
                f"the {len(blocks)} blocks, not {self.pooling!r}."
            )
        self.padding = tuple(self.padding) if isinstance(self.padding, list) else self.padding
        for name in _for_each(self.padding, 1):
            if name not in _PADDINGS:
                raise ConfigError(f"CNN: no padding {name!r}: {suggest(name, _PADDINGS)}.")
        for number, block in enumerate(blocks):
            if len(_for_each(self.padding, len(block))) != len(block):
                raise ConfigError(
                    f"CNN: padding is for {len(self.padding)} convolutions, but blocks[{number}] has {len(block)}: "
                    "pass one name per convolution of a block, or one for all."
                )
        self.dense = positive_ints("CNN: dense", self.dense, "(128,)")
        check_rate(0.0 if self.dense_dropout is None else self.dense_dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("CNN", x)
        height, width = x.shape[1:3]
        count = len(self.blocks)
        use_bias = not self.batch_norm  # the norm would subtract it
        for number, (block, pooling) in enumerate(zip(self.blocks, _for_each(self.pooling, count), strict=True), 1):
            for channels, padding in zip(block, _for_each(self.padding, len(block)), strict=True):
                x = Conv(channels, self.kernel_size, padding=padding, use_bias=use_bias)(x)
                if self.batch_norm:
                    x = BatchNorm(use_running_average=not train, momentum=0.9)(x)
                x = self.activation(x)
            x = pooling(x, self.pool, self.pool_strides or self.pool)
            if 0 in x.shape[1:3]:
                raise ConfigError(
                    f"CNN: images of {height}x{width} are too small: nothing is left after block {number} of {count}; "
                    "use fewer blocks or smaller windows."
                )
            x = Dropout(self.dropout)(x, train=train)
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        for units in self.dense:
            x = self.activation(Dense(units)(x))
            x = Dropout(self.dropout if self.dense_dropout is None else self.dense_dropout)(x, train=train)
        return Dense(self.num_classes)(x)


def _for_each[T](given: T | tuple[T, ...], count: int) -> tuple[T, ...]:
    return given if isinstance(given, tuple) else (given,) * count


def _pair(name: str, values: tuple[int, int]) -> tuple[int, int]:
    checked = positive_ints(name, values, "(3, 3)")
    if len(checked) != 2:
        raise ConfigError(f"{name} must be two integers, height and width, not {values!r}.")
    return checked[0], checked[1]
