"""Models of token sequences: a bag of embeddings, recurrent networks, and a transformer."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jaxnn import nn
from jaxnn.models._model_inputs import check_sizes, checked_tokens
from jaxnn.types import ConfigError, DataError

_STDDEV = 0.02  # of GPT's initial kernels and embeddings
_MESH_AXIS = "model"  # that GPT's layers are sharded along


def _small(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    bound = 1 / shape[-1]
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class FastText(linen.Module):
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
        tokens = checked_tokens("FastText", tokens)
        embedded = nn.Embed(self.vocabulary_size, self.features, embedding_init=_small)(tokens)
        if self.pad_id is None:
            return nn.Dense(self.num_classes)(jnp.mean(embedded, axis=1))
        counts = (tokens != self.pad_id)[..., None]
        total = jnp.sum(jnp.where(counts, embedded, 0), axis=1)
        mean = total / jnp.maximum(jnp.sum(counts, axis=1), 1).astype(total.dtype)
        return nn.Dense(self.num_classes)(mean)


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
    layer: type[nn.Recurrent] = nn.LSTM
    bidirectional: bool = False
    dropout: ArrayLike = 0.0
    pad_id: int | None = None

    def __post_init__(self) -> None:
        _check_recurrent(self, "num_classes", "vocabulary_size", "features")
        nn.check_rate(self.dropout)
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
            sequences = nn.Embed(self.vocabulary_size, self.embedding_features)(ids)
        seq_lengths = None
        if self.pad_id is not None:  # a token that is `pad_id` counts if another one follows
            ends = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None]
            seq_lengths = jnp.max(jnp.where(tokens == self.pad_id, 0, ends), axis=1, initial=0)
        x = _last_state(sequences, self.layer, self.features, self.bidirectional, seq_lengths)
        return nn.Dense(self.num_classes)(nn.Dropout(self.dropout)(x, train=train))


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
    layer: type[nn.Recurrent] = nn.LSTM
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        _check_recurrent(self, "vocabulary_size", "features", "num_layers")
        nn.check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Token ids ``[batch, time]`` to logits of each one's successor ``[batch, time, vocabulary_size]``.

        Logits depend on no later token.
        """
        tokens = checked_tokens("RecurrentLanguageModel", tokens)
        # To transpose the ids is far cheaper than to transpose their embeddings: time comes first until the logits.
        x = nn.Embed(self.vocabulary_size, self.embedding_features or self.features)(tokens.T)
        for _ in range(self.num_layers):
            x = nn.Dropout(self.dropout, batch_axis=1)(x, train=train)
            x = self.layer(self.features, dtype=x.dtype, time_major=True)(x).astype(x.dtype)
        x = nn.Dropout(self.dropout, batch_axis=1)(x, train=train)
        return nn.Dense(self.vocabulary_size)(x.swapaxes(0, 1))


class TextGenRNN(linen.Module):
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
    layer: type[nn.Recurrent] = nn.LSTM

    def __post_init__(self) -> None:
        _check_recurrent(self, "vocabulary_size", "embedding_features", "features")
        self.hidden = nn.positive_ints("TextGenRNN: hidden", self.hidden, "(512, 256)")
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Token ids ``[batch, time]`` to logits of the next ``[batch, vocabulary_size]``.

        With ``train`` the auxiliary logits, shaped as the others, are given too.
        """
        tokens = checked_tokens("TextGenRNN", tokens)
        sequences = nn.Embed(self.vocabulary_size, self.embedding_features)(tokens.T)
        x = state = _last_state(sequences, self.layer, self.features)
        for width in self.hidden:
            x = nn.Dense(width, use_bias=False)(x)
            x = linen.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        logits = nn.Dense(self.vocabulary_size)(x)
        auxiliary = nn.Dense(self.vocabulary_size, name="auxiliary")(state)
        return (logits, auxiliary) if train else logits


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
        nn.check_rate(self.dropout)
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
        x = nn.Embed(self.vocabulary_size, self.features, embedding_init=init)(tokens)
        x = x + nn.Embed(self.max_length, self.features, embedding_init=init)(jnp.arange(time))[None]
        x = nn.Dropout(self.dropout)(x, train=train)
        for _ in range(self.num_layers):
            x = Block(self.num_heads, _STDDEV / (2 * self.num_layers) ** 0.5, self.dropout)(x, train)
        return nn.Dense(self.vocabulary_size, kernel_init=init)(nn.LayerNorm()(x))


class Block(linen.Module):
    """Adds to its input causal self-attention, then two dense layers, each of the normalised sum so far."""

    num_heads: int
    stddev: float  # of the initial kernels of the two layers that add to the input
    dropout: ArrayLike  # [] the rate before each addition

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, time, features]`` to the same."""
        batch, time, features = x.shape
        by_output, by_input = (None, _MESH_AXIS), (_MESH_AXIS, None)
        dense = partial(
            nn.Dense,
            kernel_init=nn.partitioned(linen.initializers.normal(_STDDEV), by_output),
            bias_init=nn.partitioned(linen.initializers.zeros_init(), (_MESH_AXIS,)),
        )
        added = partial(
            nn.Dense, features, kernel_init=nn.partitioned(linen.initializers.normal(self.stddev), by_input)
        )
        heads = (batch, time, self.num_heads, features // self.num_heads)
        projected = jnp.split(dense(3 * features)(nn.LayerNorm()(x)), 3, axis=-1)
        query, key, value = (part.reshape(heads) for part in projected)
        attended = nn.attention(query, key, value, causal=True)
        x = x + nn.Dropout(self.dropout)(added()(attended.reshape(x.shape)), train=train)
        hidden = linen.gelu(dense(4 * features)(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.dropout)(added()(hidden), train=train)


def _check_recurrent(model: Any, *sizes: str) -> None:
    """Raises ConfigError unless ``model`` has positive ``sizes`` and embeddings, and the class of a recurrent layer."""
    check_sizes(model, *sizes, *(() if model.embedding_features is None else ("embedding_features",)))
    if not isinstance(model.layer, type) or not issubclass(model.layer, nn.Recurrent):
        raise ConfigError(f"{type(model).__name__}: layer must be nn.LSTM or nn.GRU, not {model.layer!r}.")


def _last_state(
    sequences: jax.Array,
    layer: type[nn.Recurrent],
    features: int,
    bidirectional: bool = False,
    seq_lengths: jax.Array | None = None,
) -> jax.Array:
    """The output after each sequence's last step: ``[batch, features]``, of both directions ``2 * features``.

    ``sequences`` are ``[time, batch, inputs]``. The layer becomes ``LSTM_0``, for example, of the calling module.
    """
    make = partial(layer, features, dtype=sequences.dtype)
    reader = nn.Bidirectional(make(), make()) if bidirectional else make()
    carry, _ = reader(sequences, seq_lengths=seq_lengths, time_major=True, return_carry=True)
    carries = carry if bidirectional else (carry,)
    # A state's last part is what the layer puts out; it may be wider than the products.
    return jnp.concatenate([jax.tree.leaves(carry)[-1] for carry in carries], axis=-1).astype(sequences.dtype)
