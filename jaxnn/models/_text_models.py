"""Models of token sequences: a bag of embeddings, and recurrent networks."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jaxnn.models._model_inputs import check_sizes, checked_tokens
from jaxnn.nn import LSTM, BatchNorm, Bidirectional, Dense, Dropout, Embed, Recurrent, check_rate, positive_ints
from jaxnn.types import ConfigError


def _small(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    bound = 1 / shape[-1]
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class BagOfTokens(linen.Module):
    """Embeds tokens, averages them without regard to order, and gives the dense logits.

    Joulin, Grave, Bojanowski & Mikolov, "Bag of Tricks for Efficient Text Classification" (2016), known as
    fastText: a token may be a word or, for some of the order, an n-gram. Parameters: ``Embed_0``, ``Dense_0``.
    Embeddings are initialised as theirs, uniform within ±1/``features``: those of rare n-grams hardly
    change in training, and large ones would be noise.

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
        check_sizes(self, "num_classes", "vocabulary_size", "features")
        if self.embedding_features is not None:
            check_sizes(self, "embedding_features")
        _check_layer("RecurrentClassifier", self.layer)
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Token ids ``[batch, time]`` to logits ``[batch, num_classes]``.

        Of nothing but padding the state is 0.
        """
        tokens = checked_tokens("RecurrentClassifier", tokens)
        ids = tokens.T  # far cheaper than to transpose their embeddings
        if self.embedding_features is None:
            params = jax.tree.leaves(self.variables.get("params", {}))
            dtype = params[0].dtype if params else jnp.float32  # there are none yet while they are initialised
            known = (ids >= 0) & (ids < self.vocabulary_size)  # others are NaN, as in an embedding
            one_hot = jax.nn.one_hot(ids, self.vocabulary_size, dtype=dtype)
            sequences = jnp.where(known[..., None], one_hot, jnp.nan)
        else:
            sequences = Embed(self.vocabulary_size, self.embedding_features)(ids)
        seq_lengths = None
        if self.pad_id is not None:  # a token that is `pad_id` counts if another one follows
            ends = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None]
            seq_lengths = jnp.max(jnp.where(tokens == self.pad_id, 0, ends), axis=1, initial=0)
        x = _last_state(sequences, self.layer, self.features, self.bidirectional, seq_lengths)
        return Dense(self.num_classes)(Dropout(self.dropout)(x, train=train))


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
    """

    vocabulary_size: int
    _: dataclasses.KW_ONLY
    features: int = 256
    num_layers: int = 2
    embedding_features: int | None = None
    layer: type[Recurrent] = LSTM
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary_size", "features", "num_layers")
        if self.embedding_features is not None:
            check_sizes(self, "embedding_features")
        _check_layer("RecurrentLanguageModel", self.layer)
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Token ids ``[batch, time]`` to logits of each one's successor ``[batch, time, vocabulary_size]``.

        Logits depend on no later token.
        """
        tokens = checked_tokens("RecurrentLanguageModel", tokens)
        # To transpose the ids is far cheaper than to transpose their embeddings: time comes first until the logits.
        x = Embed(self.vocabulary_size, self.embedding_features or self.features)(tokens.T)
        for _ in range(self.num_layers):
            x = Dropout(self.dropout, batch_axis=1)(x, train=train)
            x = self.layer(self.features, dtype=x.dtype, time_major=True)(x).astype(x.dtype)
        x = Dropout(self.dropout, batch_axis=1)(x, train=train)
        return Dense(self.vocabulary_size)(x.swapaxes(0, 1))


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
    """

    vocabulary_size: int
    _: dataclasses.KW_ONLY
    embedding_features: int = 300
    features: int = 128
    hidden: tuple[int, ...] = (512, 256)
    layer: type[Recurrent] = LSTM

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary_size", "embedding_features", "features")
        self.hidden = positive_ints("TextGenerator: hidden", self.hidden, "(512, 256)")
        _check_layer("TextGenerator", self.layer)
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Token ids ``[batch, time]`` to logits of the next ``[batch, vocabulary_size]``.

        With ``train`` the auxiliary logits, shaped as the others, are given too.
        """
        tokens = checked_tokens("TextGenerator", tokens)
        sequences = Embed(self.vocabulary_size, self.embedding_features)(tokens.T)
        x = state = _last_state(sequences, self.layer, self.features)
        for width in self.hidden:
            x = Dense(width, use_bias=False)(x)
            x = linen.relu(BatchNorm(use_running_average=not train, momentum=0.9)(x))
        logits = Dense(self.vocabulary_size)(x)
        auxiliary = Dense(self.vocabulary_size, name="auxiliary")(state)
        return (logits, auxiliary) if train else logits


def _check_layer(model: str, layer: Any) -> None:
    """Raises ConfigError unless ``layer`` is the class of a recurrent layer; ``model`` says for whom."""
    if not isinstance(layer, type) or not issubclass(layer, Recurrent):
        raise ConfigError(f"{model}: layer must be nn.LSTM or nn.GRU, not {layer!r}.")


def _last_state(
    sequences: jax.Array,
    layer: type[Recurrent],
    features: int,
    bidirectional: bool = False,
    seq_lengths: jax.Array | None = None,
) -> jax.Array:
    """The output after each sequence's last step: ``[batch, features]``, of both directions ``2 * features``.

    ``sequences`` are ``[time, batch, inputs]``. The layer becomes ``LSTM_0``, for example, of the calling module.
    """
    make = partial(layer, features, dtype=sequences.dtype)
    reader = Bidirectional(make(), make()) if bidirectional else make()
    carry, _ = reader(sequences, seq_lengths=seq_lengths, time_major=True, return_carry=True)
    carries = carry if bidirectional else (carry,)
    # A state's last part is what the layer puts out; it may be wider than the products.
    return jnp.concatenate([jax.tree.leaves(carry)[-1] for carry in carries], axis=-1).astype(sequences.dtype)
