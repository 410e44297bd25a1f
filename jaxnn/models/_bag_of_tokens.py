"""A linear classifier of averaged token embeddings."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxnn.models._model_inputs import check_sizes, checked_tokens
from jaxnn.nn import Dense, Embed


def _small(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    bound = 1 / shape[-1]
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class BagOfTokens(linen.Module):
    """Embeds tokens, takes their mean whatever their order, and gives the dense logits.

    Joulin, Grave, Bojanowski & Mikolov, "Bag of Tricks for Efficient Text Classification" (2016), known as
    fastText: a token may be a word or, for some of the order, an n-gram. Parameters: ``Embed_0``, ``Dense_0``.
    Embeddings begin as theirs, uniform within ±1/``features``: those of rare n-grams hardly move: large ones are noise.

    Attributes:
        num_classes: how many logits.
        vocabulary_size: how many tokens there are.
        features: the width of an embedding.
        pad_id: a token that does not count in the mean, wherever it stands; None: all count.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    vocabulary_size: int
    features: int = 50
    pad_id: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "num_classes", "vocabulary_size", "features")
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Token ids ``[batch, time]`` to logits ``[batch, num_classes]``.

        Of nothing but padding the mean is 0.
        """
        tokens = checked_tokens("BagOfTokens", tokens)
        embedded = Embed(self.vocabulary_size, self.features, embedding_init=_small)(tokens)
        if self.pad_id is None:
            return Dense(self.num_classes)(jnp.mean(embedded, axis=1))
        counts = (tokens != self.pad_id)[..., None]
        total = jnp.sum(jnp.where(counts, embedded, 0), axis=1)
        mean = total / jnp.maximum(jnp.sum(counts, axis=1), 1).astype(total.dtype)
        return Dense(self.num_classes)(mean)
