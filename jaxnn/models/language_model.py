"""A recurrent network that predicts the next token."""

from __future__ import annotations

import dataclasses

import jax
from flax import linen
from jax.typing import ArrayLike

from jaxnn.models.reading import check_layer
from jaxnn.models.tokens import checked_tokens
from jaxnn.nn import LSTM, Dense, Dropout, Embed, Recurrent, check_rate, positive_int


class RecurrentLanguageModel(linen.Module):
    """Embeds tokens, reads them by recurrent layers one upon another, and gives the logits of each one's successor.

    Zaremba, Sutskever & Vinyals, "Recurrent Neural Network Regularization" (2014, arXiv:1409.2329), with dropout where
    they have it: not between the steps of a layer. Unlike theirs, each sequence starts from a state of zeros.
    ``RecurrentLanguageModel(10_000)`` is the network for the Penn Treebank of Shi et al., "Benchmarking
    State-of-the-Art Deep Learning Software Tools" (2017, arXiv:1608.07249): 6,180,624 parameters. Parameters:
    ``Embed_0``, ``LSTM_0`` (or ``GRU_0``), …, ``Dense_0``.

    Attributes:
        vocabulary_size: how many tokens there are.
        features: the width of each layer's state.
        num_layers: how many layers.
        embedding_features: the width of an embedding; None: ``features``.
        layer: the recurrent layer, ``LSTM`` or ``GRU`` of `jaxnn.nn`.
        dropout: ``[]`` the rate before each layer and before the logits, 0…1; may be a tracer.

    Raises:
        ConfigError: sizes that are not positive integers, no recurrent layer, or a dropout rate outside 0…1.
    """

    vocabulary_size: int
    _: dataclasses.KW_ONLY
    features: int = 256
    num_layers: int = 2
    embedding_features: int | None = None
    layer: type[Recurrent] = LSTM
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "features", "num_layers", "embedding_features"):
            if name != "embedding_features" or self.embedding_features is not None:
                setattr(self, name, positive_int(f"RecurrentLanguageModel: {name}", getattr(self, name)))
        check_layer("RecurrentLanguageModel", self.layer)
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Token ids ``[batch, time]`` to logits of each one's successor ``[batch, time, vocabulary_size]``.

        Args:
            tokens: ``[batch, time]`` integers below ``vocabulary_size``; logits depend on no later token.
            train: whether dropout is active; it then needs ``rngs={"dropout": key}``.

        Raises:
            DataError: inputs that are not integers of rank 2.
        """
        tokens = checked_tokens("RecurrentLanguageModel", tokens)
        # To transpose the ids is far cheaper than to transpose their embeddings: time comes first until the logits.
        x = Embed(self.vocabulary_size, self.embedding_features or self.features)(tokens.T)
        for _ in range(self.num_layers):
            x = Dropout(self.dropout, batch_axis=1)(x, train=train)
            x = self.layer(self.features, dtype=x.dtype, time_major=True)(x).astype(x.dtype)
        x = Dropout(self.dropout, batch_axis=1)(x, train=train)
        return Dense(self.vocabulary_size)(x.swapaxes(0, 1))
