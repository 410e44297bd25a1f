"""A transformer that predicts the next token."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
from flax import linen
from jax import numpy as jnp
from jax.typing import ArrayLike

from jaxnn.models._model_inputs import check_sizes, checked_tokens
from jaxnn.nn import Dense, Dropout, Embed, LayerNorm, attention, check_rate, partitioned
from jaxnn.types import ConfigError, DataError

_STDDEV = 0.02
MODEL = "model"
"""The mesh axis that layers are split over."""


class GPT(linen.Module):
    """Token and position embeddings, pre-norm transformer blocks with causal attention, and the logits.

    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), known as GPT-2, and its
    initialisation: normal of 0.02, divided by ``sqrt(2 * num_layers)`` where a block adds to the residual
    stream. Unlike it, the logits have their own kernel and a bias, and attention weights are not dropped.
    The default is nanoGPT's size for characters on a CPU (Karpathy, 2022). Parameters: ``Embed_0`` of tokens,
    ``Embed_1`` of positions, ``Block_0``, …, ``LayerNorm_0``, ``Dense_0``; each block ``LayerNorm_0``,
    ``Dense_0`` to queries, keys and values in this order, ``Dense_1``, ``LayerNorm_1``, ``Dense_2``, ``Dense_3``.
    On a mesh with an axis ``model`` each block's layers are split over it: the first and third by what they give, the
    second and fourth by what they take (Shoeybi et al., Megatron-LM, 2019); parts of the first, which is queries, keys
    and values in one, are exchanged before attention. So ``init`` alone gives these parameters in
    Flax's boxes with the names of their axes; ``flax.linen.unbox`` takes them out, as jaxnn's own steps do.

    Attributes:
        vocabulary_size: how many tokens there are.
        num_layers: the blocks.
        features: the width of the residual stream; between the two layers after attention it is four times that.
        num_heads: heads of attention; they share ``features`` evenly.
        max_length: the longest sequence.
        dropout: ``[]`` the rate after the embeddings and before each addition to the stream, 0…1; may be a tracer.
    """

    vocabulary_size: int
    _: dataclasses.KW_ONLY
    num_layers: int = 4
    features: int = 128
    num_heads: int = 4
    max_length: int = 64
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary_size", "num_layers", "features", "num_heads", "max_length")
        if self.features % self.num_heads:
            raise ConfigError(f"GPT: {self.features} features cannot be shared by {self.num_heads} heads evenly.")
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Token ids ``[batch, time]`` to logits of each one's successor ``[batch, time, vocabulary_size]``.

        Logits depend on no later token. More than ``max_length`` tokens raise `DataError`.
        """
        tokens = checked_tokens("GPT", tokens)
        time = tokens.shape[1]
        if time > self.max_length:
            raise DataError(f"GPT: sequences of {time} tokens are longer than max_length, {self.max_length}.")
        init = linen.initializers.normal(_STDDEV)
        x = Embed(self.vocabulary_size, self.features, embedding_init=init)(tokens)
        x = x + Embed(self.max_length, self.features, embedding_init=init)(jnp.arange(time))[None]
        x = Dropout(self.dropout)(x, train=train)
        for _ in range(self.num_layers):
            x = Block(self.num_heads, _STDDEV / (2 * self.num_layers) ** 0.5, self.dropout)(x, train)
        return Dense(self.vocabulary_size, kernel_init=init)(LayerNorm()(x))


class Block(linen.Module):
    """Adds to its input causal self-attention, then two dense layers, each of the normalised sum so far.

    Attributes:
        num_heads: heads of attention.
        stddev: of the initial kernels of the two layers that add to the input.
        dropout: ``[]`` the rate before each addition.
    """

    num_heads: int
    stddev: float
    dropout: ArrayLike

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, time, features]`` to the same."""
        batch, time, features = x.shape
        by_output, by_input = (None, MODEL), (MODEL, None)
        dense = partial(
            Dense,
            kernel_init=partitioned(linen.initializers.normal(_STDDEV), by_output),
            bias_init=partitioned(linen.initializers.zeros_init(), (MODEL,)),
        )
        added = partial(Dense, features, kernel_init=partitioned(linen.initializers.normal(self.stddev), by_input))
        heads = (batch, time, self.num_heads, features // self.num_heads)
        projected = jnp.split(dense(3 * features)(LayerNorm()(x)), 3, axis=-1)
        query, key, value = (part.reshape(heads) for part in projected)
        attended = attention(query, key, value, causal=True)
        x = x + Dropout(self.dropout)(added()(attended.reshape(x.shape)), train=train)
        hidden = linen.gelu(dense(4 * features)(LayerNorm()(x)))
        return x + Dropout(self.dropout)(added()(hidden), train=train)
