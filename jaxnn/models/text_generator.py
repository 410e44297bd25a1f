"""A recurrent network with an auxiliary output that predicts the character after a text."""

from __future__ import annotations

import dataclasses

import jax
from flax import linen

from jaxnn.models.reading import check_layer, last_state
from jaxnn.models.tokens import checked_tokens
from jaxnn.nn import LSTM, BatchNorm, Dense, Embed, Recurrent, positive_int, positive_ints


class TextGenerator(linen.Module):
    """Embeds tokens, reads them one by one, and gives the logits of the next by dense layers on the last state.

    Each dense layer: dense without a bias, batch norm, relu. In training it gives auxiliary logits too, straight from
    the state, which so has a gradient that does not pass through the dense layers: train it with
    ``tasks.classification(model, auxiliary_weight=0.2)``. Woolf's ``text_generator_keras`` ("Benchmarking TensorFlow on
    Cloud CPUs", 2017), a predecessor of textgenrnn. Parameters: ``Embed_0``, ``LSTM_0`` (or ``GRU_0``), ``Dense_0``,
    ``BatchNorm_0``, … for each dense layer, then ``Dense_n`` of the logits and ``auxiliary`` of the auxiliary ones;
    running statistics, at momentum 0.9, in the collection ``batch_stats``.

    Attributes:
        vocabulary_size: how many tokens there are, and logits.
        embedding_features: the width of an embedding.
        features: the width of the recurrent state.
        hidden: the units of each dense layer; may be empty.
        layer: the recurrent layer, ``LSTM`` or ``GRU`` of `jaxnn.nn`.

    Raises:
        ConfigError: sizes that are not positive integers, or no recurrent layer.
    """

    vocabulary_size: int
    _: dataclasses.KW_ONLY
    embedding_features: int = 300
    features: int = 128
    hidden: tuple[int, ...] = (512, 256)
    layer: type[Recurrent] = LSTM

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "embedding_features", "features"):
            setattr(self, name, positive_int(f"TextGenerator: {name}", getattr(self, name)))
        self.hidden = positive_ints("TextGenerator: hidden", self.hidden, "(512, 256)")
        check_layer("TextGenerator", self.layer)
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Token ids ``[batch, time]`` to logits of the next ``[batch, vocabulary_size]``.

        Args:
            tokens: ``[batch, time]`` integers below ``vocabulary_size``.
            train: whether the auxiliary logits, shaped as the others, are given too, and batch statistics are
                updated, which then needs ``mutable=["batch_stats"]``.

        Raises:
            DataError: inputs that are not integers of rank 2.
        """
        tokens = checked_tokens("TextGenerator", tokens)
        sequences = Embed(self.vocabulary_size, self.embedding_features)(tokens.T)
        x = state = last_state(sequences, self.layer, self.features)
        for width in self.hidden:
            x = Dense(width, use_bias=False)(x)
            x = linen.relu(BatchNorm(use_running_average=not train, momentum=0.9)(x))
        logits = Dense(self.vocabulary_size)(x)
        auxiliary = Dense(self.vocabulary_size, name="auxiliary")(state)
        return (logits, auxiliary) if train else logits
