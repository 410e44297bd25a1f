"""A classifier of token sequences by a recurrent layer."""

from __future__ import annotations

import dataclasses

import jax
from flax import linen
from jax.typing import ArrayLike

from jaxnn.models.reading import check_layer, last_state, one_hot
from jaxnn.models.tokens import checked_tokens, lengths
from jaxnn.nn import LSTM, Dense, Dropout, Embed, Recurrent, check_rate, positive_int


class RecurrentClassifier(linen.Module):
    """Embeds tokens, reads them one by one, and gives the dense logits of the state after the last.

    The defaults are those of Keras's ``imdb_lstm`` example. With one logit, ``bidirectional`` and 20,000 tokens it has
    the 2,658,945 parameters of ``imdb_bidirectional_lstm``; ``RecurrentClassifier(57, vocabulary_size=57,
    embedding_features=None, features=128)`` is ``lstm_text_generation`` for 57 characters, 102,585. Parameters:
    ``Embed_0``, ``LSTM_0`` (or ``GRU_0``, and ``LSTM_1`` for the other direction), ``Dense_0``.

    Attributes:
        num_classes: how many logits.
        vocabulary_size: how many tokens there are.
        embedding_features: the width of an embedding; None: there is none, each token is read as a vector of
            ``vocabulary_size`` with a single 1.
        features: the width of the recurrent state, of each direction.
        layer: the recurrent layer, ``LSTM`` or ``GRU`` of `jaxnn.nn`.
        bidirectional: whether a second layer reads from the end to the start (Schuster & Paliwal, 1997); the
            logits then see both of their last states.
        dropout: ``[]`` the rate before the logits, 0…1; may be a tracer.
        pad_id: a token that is not read where it fills up the end of a sequence; None: all are read. Padding in
            front is read in any case.

    Raises:
        ConfigError: sizes that are not positive integers, no recurrent layer, or a dropout rate outside 0…1.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    vocabulary_size: int
    embedding_features: int | None = 128
    features: int = 64
    layer: type[Recurrent] = LSTM
    bidirectional: bool = False
    dropout: ArrayLike = 0.0
    pad_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_classes", "vocabulary_size", "embedding_features", "features"):
            if name != "embedding_features" or self.embedding_features is not None:
                setattr(self, name, positive_int(f"RecurrentClassifier: {name}", getattr(self, name)))
        check_layer("RecurrentClassifier", self.layer)
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Token ids ``[batch, time]`` to logits ``[batch, num_classes]``.

        Args:
            tokens: ``[batch, time]`` integers below ``vocabulary_size``. Of nothing but padding the state is 0.
            train: whether dropout is active; it then needs ``rngs={"dropout": key}``.

        Raises:
            DataError: inputs that are not integers of rank 2.
        """
        tokens = checked_tokens("RecurrentClassifier", tokens)
        # To transpose the ids is far cheaper than to transpose what they stand for.
        if self.embedding_features is None:
            sequences = one_hot(self, tokens.T, self.vocabulary_size)
        else:
            sequences = Embed(self.vocabulary_size, self.embedding_features)(tokens.T)
        seq_lengths = None if self.pad_id is None else lengths(tokens, self.pad_id)
        x = last_state(sequences, self.layer, self.features, self.bidirectional, seq_lengths)
        return Dense(self.num_classes)(Dropout(self.dropout)(x, train=train))
