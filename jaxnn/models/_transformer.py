"""Encoder transformers: the pre-norm block, ViT, and a classifier of sequences."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jaxnn import nn
from jaxnn.models._model_inputs import Remat, apply_layers, check_fields, check_images, checked_tokens
from jaxnn.types import ConfigError, DataError, suggest

STDDEV = 0.02  # of initial kernels, embeddings and positions
_MESH_AXIS = "model"  # the mesh axis along which blocks are sharded
_POOLINGS = ("class_token", "mean")
_normal = linen.initializers.normal(STDDEV)


def residual_block(
    x: jax.Array,
    attend: Callable[[jax.Array], jax.Array],
    projected: int,
    hidden: int,
    *,
    train: bool,
    dropout: ArrayLike,
    activation: Callable[[jax.Array], jax.Array],
    stddev: float = STDDEV,
    norm: Callable[[], linen.Module] = nn.LayerNorm,
) -> jax.Array:
    """A pre-norm transformer block (GPT-2): attention, then two dense layers, each with a residual connection.

    ``attend`` maps queries, keys and values ``[batch, time, projected]`` to ``[batch, time, features]``. Layers are of
    the calling module: ``LayerNorm_0``, ``Dense_0`` to ``projected``, ``Dense_1``, ``LayerNorm_1``, ``Dense_2`` to
    ``hidden``, ``Dense_3``. On a mesh with an axis ``model``, the first dense layer of each pair is sharded along its
    outputs, the second along its inputs (Shoeybi et al., Megatron-LM, 2019). ``stddev`` is of the latter's kernels.
    """
    first = partial(
        nn.Dense,
        kernel_init=nn.partitioned(_normal, (None, _MESH_AXIS)),
        bias_init=nn.partitioned(linen.initializers.zeros_init(), (_MESH_AXIS,)),
    )
    init = nn.partitioned(linen.initializers.normal(stddev), (_MESH_AXIS, None))
    second = partial(nn.Dense, x.shape[-1], kernel_init=init)
    attended = attend(first(projected)(norm()(x)))  # a layer's number is that of its construction
    x = x + nn.Dropout(dropout)(second()(attended), train=train)
    activated = activation(first(hidden)(norm()(x)))
    return x + nn.Dropout(dropout)(second()(activated), train=train)


class TransformerBlock(linen.Module):
    """`residual_block` with self-attention of all positions."""

    num_heads: int
    dropout: ArrayLike = 0.0  # [] the rate before each residual addition
    hidden_features: int | None = None  # None: four times the features

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False, *, mask: jax.Array | None = None) -> jax.Array:
        """Maps ``[batch, time, features]`` to the same shape; ``mask [batch, time]``: the positions that are seen."""
        features, heads = x.shape[-1], (*x.shape[:2], 3 * self.num_heads, -1)

        def attend(projected: jax.Array) -> jax.Array:
            query, key, value = jnp.split(projected.reshape(heads), 3, axis=2)
            return nn.attention(query, key, value, mask=None if mask is None else mask[:, None, None]).reshape(x.shape)

        hidden, gelu = self.hidden_features or 4 * features, partial(linen.gelu, approximate=False)
        return residual_block(x, attend, 3 * features, hidden, train=train, dropout=self.dropout, activation=gelu)


class _Classifier(linen.Module):
    """The fields that `ViT` and `TransformerClassifier` share."""

    num_classes: int
    _: dataclasses.KW_ONLY
    num_layers: int = 6
    features: int = 192
    num_heads: int = 3
    hidden_features: int | None = None
    pooling: str = "class_token"
    dropout: ArrayLike = 0.0
    remat: Remat = False
    scan: bool = False

    def __post_init__(self) -> None:
        name, optional = type(self).__name__, ("patch_size", "max_length", "vocabulary_size")
        given = (field for field in optional if getattr(self, field, None) is not None)
        check_fields(self, "num_classes", "num_layers", "features", "num_heads", *given)
        if self.features % self.num_heads:
            raise ConfigError(f"{name}: features {self.features} must be a multiple of num_heads {self.num_heads}.")
        if self.pooling not in _POOLINGS:
            raise ConfigError(f"{name}: no pooling {self.pooling!r}: {suggest(str(self.pooling), _POOLINGS)}.")
        super().__post_init__()

    def _logits(self, x: jax.Array, max_length: int, train: bool, mask: jax.Array | None = None) -> jax.Array:
        """Logits of the vectors ``[batch, time, features]``; ``mask [batch, time]``: those that count."""
        batch, time, features = x.shape
        if self.pooling == "class_token":
            token = self.param("class_token", linen.initializers.zeros_init(), (1, 1, features))
            x = jnp.concatenate([nn.add_broadcast(jnp.zeros((batch, 1, features), x.dtype), token), x], axis=1)
            mask = None if mask is None else jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
            time, max_length = time + 1, max_length + 1
        x = nn.add_broadcast(x, self.param("positions", _normal, (1, max_length, features))[:, :time])
        x = nn.Dropout(self.dropout)(x, train=train)
        block = partial(TransformerBlock, self.num_heads, self.dropout, self.hidden_features)
        call = lambda block, x, _: (block(x, train, mask=mask), None)  # noqa: E731
        x, _ = apply_layers(call, block, self.num_layers, x, remat=self.remat, scan=self.scan)
        x = nn.LayerNorm()(x)
        if self.pooling == "class_token":
            x = x[:, 0]
        elif mask is None:
            x = x.mean(axis=1)
        else:
            total = jnp.where(mask[..., None], x, 0).sum(axis=1)
            x = total / jnp.maximum(mask.sum(axis=1, keepdims=True), 1).astype(x.dtype)
        return nn.Dense(self.num_classes, kernel_init=_normal)(x)


class ViT(_Classifier):
    """The vision transformer: linear embeddings of square patches, learned positions, blocks, and a linear head.

    Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021, arXiv:2010.11929). The defaults suit 32x32 images;
    `create` has the published sizes. Dense kernels are initialized normally with deviation 0.02. All images are of the
    size of ``init``'s: positions are not interpolated. Parameters: ``Conv_0`` of the patches, ``class_token``,
    ``positions``, ``TransformerBlock_0``, …, ``LayerNorm_0``, ``Dense_0``; each block as `GPT`'s.

    >>> model = jn.models.ViT(10)
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"))
    2693578

    Attributes:
        num_layers: number of blocks.
        features: width of the residual stream; ``hidden_features`` that of a block's hidden layer, None: four times it.
        num_heads: attention heads, which divide ``features``.
        pooling: ``"class_token"``, a learned token before the patches; or ``"mean"`` of the patches.
        patch_size: height and width of a patch, which divide those of an image.
        dropout: ``[]`` the rate after the positions and before each residual addition, 0…1; may be a tracer.
        remat: whether the backward pass computes each block again instead of storing what is within (Chen et al.,
            2016, arXiv:1604.06174); or a policy of ``jax.checkpoint_policies``.
        scan: whether blocks are a loop of one (`jax.lax.scan`), so that compile time does not grow with their number;
            parameters are those of ``TransformerBlock_0`` with a first axis of layers.
    """

    patch_size: int = 4

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]`` to logits ``[batch, num_classes]``."""
        check_images("ViT", x)
        size = self.patch_size
        if x.shape[1] % size or x.shape[2] % size:
            raise DataError(f"ViT: images of {x.shape[1]}x{x.shape[2]} are no multiple of patch_size {size}.")
        x = nn.Conv(self.features, (size, size), strides=(size, size), padding="VALID")(x)
        x = x.reshape(x.shape[0], -1, self.features)
        return self._logits(x, x.shape[1], train)


class TransformerClassifier(_Classifier):
    """A transformer encoder and a linear head for sequences of token ids or of vectors.

    The blocks of `ViT`, after Vaswani et al., "Attention Is All You Need" (2017, arXiv:1706.03762), and Devlin et al.,
    "BERT" (2019, arXiv:1810.04805). Parameters: ``Embed_0``, or ``Dense_0`` for vectors, and those of `ViT` without
    ``Conv_0``.

    >>> model = jn.models.TransformerClassifier(2, vocabulary_size=20_000, pad_id=0, num_layers=2)
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 80), "int32"))
    4828802

    Attributes:
        vocabulary_size: number of token ids; None: inputs are vectors.
        pad_id: a token that is ignored at any position; None: all count.
        max_length: maximum sequence length.
        pooling: ``"mean"`` of the positions that count, or ``"class_token"``, a learned token before the sequence.
        num_layers, features, num_heads, hidden_features, dropout, remat, scan: as `ViT`'s.
    """

    vocabulary_size: int | None = None
    pad_id: int | None = None
    max_length: int = 512
    pooling: str = "mean"

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False, *, mask: jax.Array | None = None) -> jax.Array:
        """Token ids ``[batch, time]`` or vectors ``[batch, time, channels]`` to logits ``[batch, num_classes]``.

        ``mask [batch, time]`` bool: the positions that count; the mean of none is 0. More than ``max_length`` positions
        raise `DataError`.
        """
        if self.vocabulary_size is not None:
            tokens = checked_tokens("TransformerClassifier", x)
            x = nn.Embed(self.vocabulary_size, self.features, embedding_init=_normal)(tokens)
            if self.pad_id is not None:
                mask = tokens != self.pad_id if mask is None else mask & (tokens != self.pad_id)
        elif x.ndim == 3 and jnp.issubdtype(x.dtype, jnp.floating):
            x = nn.Dense(self.features)(x)
        else:
            needed = "vectors [batch, time, channels] of floats, or a vocabulary_size for token ids"
            raise DataError(f"TransformerClassifier needs {needed}, not {x.dtype} {list(x.shape)}.")
        if (time := x.shape[1]) > self.max_length:
            raise DataError(f"TransformerClassifier: {time} positions are more than max_length, {self.max_length}.")
        return self._logits(x, self.max_length, train, mask)
