"""Models of token sequences: averaged embeddings and recurrent networks."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jaxnn import nn
from jaxnn._fields import positive_ints
from jaxnn.models import _generation
from jaxnn.models._model_inputs import check_fields, checked_tokens
from jaxnn.types import ConfigError


class FastText(linen.Module):
    """Averages the embeddings of all tokens, then a dense layer gives the logits: fastText.

    Joulin, Grave, Bojanowski & Mikolov, "Bag of Tricks for Efficient Text Classification" (2016). A token may be a word
    or an n-gram. As theirs, embeddings are initialized uniformly within ±1/``features``: those of rare n-grams hardly
    change in training, and large ones would be noise. Parameters: ``Embed_0``, ``Dense_0``.

    >>> model = jn.models.FastText(2, vocabulary_size=20_000)
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 80), "int32"))
    1000102

    Attributes:
        features: width of an embedding.
        pad_id: a token excluded from the mean at any position; None: all count.
    """

    num_classes: int
    _: dataclasses.KW_ONLY
    vocabulary_size: int
    features: int = 50
    pad_id: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "num_classes", "vocabulary_size", "features")
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Token ids ``[batch, time]`` to logits ``[batch, num_classes]``. The mean of padding only is 0."""
        tokens = checked_tokens("FastText", tokens)
        small = linen.initializers.variance_scaling(1 / (3 * self.features), "fan_out", "uniform")
        embed = nn.Embed(self.vocabulary_size, self.features, embedding_init=small)
        mean = embed.mean(tokens, where=None if self.pad_id is None else tokens != self.pad_id)
        return nn.Dense(self.num_classes)(mean)


class RecurrentClassifier(linen.Module):
    """An embedding, a recurrent layer, and dense logits of its last state.

    The defaults are those of Keras's ``imdb_lstm`` example; the example below is ``imdb_bidirectional_lstm``.
    ``RecurrentClassifier(57, vocabulary_size=57, embedding_features=None, features=128)`` is ``lstm_text_generation``
    for 57 characters, 102,585 parameters. Parameters: ``Embed_0``, ``LSTM_0`` (or ``GRU_0``, and ``LSTM_1`` for the
    other direction), ``Dense_0``.

    >>> model = jn.models.RecurrentClassifier(1, vocabulary_size=20_000, bidirectional=True)
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 100), "int32"))
    2658945

    Attributes:
        embedding_features: width of an embedding; None: one-hot vectors of ``vocabulary_size`` instead.
        features: width of the recurrent state, per direction.
        bidirectional: whether a second layer runs from end to start (Schuster & Paliwal, 1997); the logits use both
            last states.
        dropout: ``[]`` the rate before the logits, 0…1; may be a tracer.
        pad_id: a token that is skipped at the end of a sequence; None: none is. Padding at the start is never skipped.
            Numbers of tokens before padding, ``lengths [batch]`` of a call, replace it.
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
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False, *, lengths: jax.Array | None = None) -> jax.Array:
        """Token ids ``[batch, time]`` to logits ``[batch, num_classes]``. The state of padding only is 0."""
        tokens = checked_tokens("RecurrentClassifier", tokens)
        ids = tokens.T  # far cheaper than transposing embeddings
        if self.embedding_features is None:
            params = jax.tree.leaves(self.variables.get("params", {}))
            dtype = params[0].dtype if params else jnp.float32  # none yet in `init`
            known = (ids >= 0) & (ids < self.vocabulary_size)  # other ids give NaN, as in an embedding
            one_hot = jax.nn.one_hot(ids, self.vocabulary_size, dtype=dtype)
            sequences = jnp.where(known[..., None], one_hot, jnp.nan)
        else:
            sequences = nn.Embed(self.vocabulary_size, self.embedding_features)(ids)
        if lengths is None and self.pad_id is not None:  # up to the last token that is not padding
            ends = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None]
            lengths = jnp.max(jnp.where(tokens == self.pad_id, 0, ends), axis=1, initial=0)
        x = _last_state(sequences, self.layer, self.features, self.bidirectional, lengths)
        return nn.Dense(self.num_classes)(nn.Dropout(self.dropout)(x, train=train))


class RecurrentLanguageModel(linen.Module):
    """An embedding, stacked recurrent layers, and logits of each token's successor.

    Zaremba, Sutskever & Vinyals, "Recurrent Neural Network Regularization" (2014, arXiv:1409.2329), with their dropout:
    not between the steps of a layer. Unlike theirs, each sequence starts from a state of zeros. The example is the Penn
    Treebank network of Shi et al., "Benchmarking State-of-the-Art Deep Learning Software Tools" (2017,
    arXiv:1608.07249). Parameters: ``Embed_0``, ``LSTM_0`` (or ``GRU_0``), …, ``Dense_0``.

    >>> model = jn.models.RecurrentLanguageModel(10_000)
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 32), "int32"))
    6180624

    Attributes:
        features: width of each layer's state.
        num_layers: number of recurrent layers.
        embedding_features: width of an embedding; None: ``features``.
        dropout: ``[]`` the rate before each layer and before the logits, 0…1; may be a tracer.
    """

    vocabulary_size: int
    _: dataclasses.KW_ONLY
    features: int = 256
    num_layers: int = 2
    embedding_features: int | None = None
    layer: type[nn.Recurrent] = nn.LSTM
    dropout: ArrayLike = 0.0

    generate, stream = linen.nowrap(_generation.generate), linen.nowrap(_generation.stream)

    def __post_init__(self) -> None:
        _check_recurrent(self, "vocabulary_size", "features", "num_layers")
        super().__post_init__()

    def init_cache(self, batch_size: int, size: int, dtype: Any = jnp.float32) -> Any:
        """Returns the states before the first token, zeros, of each layer; ``size`` and ``dtype`` do not matter."""
        make: Any = self.layer.cell_type
        cell = make(self.features, parent=None)
        return tuple(cell.initialize_carry(jax.random.key(0), (batch_size, 1)) for _ in range(self.num_layers))

    @linen.compact
    def __call__(
        self, tokens: jax.Array, train: bool = False, *, cache: Any = None, lengths: jax.Array | None = None
    ) -> Any:
        """Token ids ``[batch, time]`` to logits of each one's successor ``[batch, time, vocabulary_size]``.

        Logits depend on no later token. With the ``cache`` of the tokens before, of `init_cache` or of another call,
        returns the logits after the last token only, ``[batch, vocabulary_size]``, and the cache after it; ``lengths
        [batch]`` are then the numbers of tokens that are not padding.
        """
        tokens = checked_tokens("RecurrentLanguageModel", tokens)
        # Time comes first until the logits: transposing ids is far cheaper than transposing embeddings.
        x = nn.Embed(self.vocabulary_size, self.embedding_features or self.features)(tokens.T)
        states: list[Any] = []
        for index in range(self.num_layers):
            x = nn.Dropout(self.dropout, batch_axis=1)(x, train=train)
            given = {} if cache is None else {"initial_carry": cache[index], "seq_lengths": lengths}
            layer = self.layer(self.features, dtype=x.dtype, time_major=True, return_carry=True)
            state, outputs = layer(x, **given)
            states.append(state)
            x = outputs.astype(x.dtype)
        if cache is not None:  # the last part of a state is the output
            x = jax.tree.leaves(states[-1])[-1].astype(x.dtype)[None]
        x = nn.Dropout(self.dropout, batch_axis=1)(x, train=train)
        logits = nn.Dense(self.vocabulary_size)(x.swapaxes(0, 1))
        return logits if cache is None else (logits[:, 0], tuple(states))


class TextGenRNN(linen.Module):
    """An embedding, a recurrent layer, and dense layers from its last state to the logits of the next token.

    Each dense layer: dense without a bias, batch norm, relu. In training there are auxiliary logits too, straight from
    the state, for a gradient that skips the dense layers: train with ``tasks.classification(model,
    auxiliary_weight=0.2)``. Woolf's ``text_generator_keras`` ("Benchmarking TensorFlow on Cloud CPUs", 2017), a
    predecessor of textgenrnn. Parameters: ``Embed_0``, ``LSTM_0`` (or ``GRU_0``), ``Dense_0``, ``BatchNorm_0``, … for
    each dense layer, ``Dense_n`` of the logits and ``auxiliary`` of the auxiliary ones.

    >>> model = jn.models.TextGenRNN(57)
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 40), "int32"))
    456894

    Attributes:
        embedding_features: width of an embedding.
        features: width of the recurrent state.
        hidden: units of each dense layer; may be empty.
    """

    vocabulary_size: int
    _: dataclasses.KW_ONLY
    embedding_features: int = 300
    features: int = 128
    hidden: tuple[int, ...] = (512, 256)
    layer: type[nn.Recurrent] = nn.LSTM

    generate, stream = linen.nowrap(_generation.generate), linen.nowrap(_generation.stream)

    def __post_init__(self) -> None:
        _check_recurrent(self, "vocabulary_size", "embedding_features", "features")
        self.hidden = positive_ints("TextGenRNN: hidden", self.hidden, "(512, 256)")
        super().__post_init__()

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False, *, lengths: jax.Array | None = None) -> Any:
        """Token ids ``[batch, time]`` to logits of the next ``[batch, vocabulary_size]``.

        With ``train`` also returns the auxiliary logits, of the same shape. ``lengths [batch]``: tokens before padding.
        """
        tokens = checked_tokens("TextGenRNN", tokens)
        sequences = nn.Embed(self.vocabulary_size, self.embedding_features)(tokens.T)
        x = state = _last_state(sequences, self.layer, self.features, False, lengths)
        for width in self.hidden:
            x = nn.Dense(width, use_bias=False)(x)
            x = linen.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        logits = nn.Dense(self.vocabulary_size)(x)
        auxiliary = nn.Dense(self.vocabulary_size, name="auxiliary")(state)
        return (logits, auxiliary) if train else logits


def _check_recurrent(model: Any, *sizes: str) -> None:
    """Raises ConfigError unless ``sizes`` and embeddings are positive and ``layer`` is a recurrent layer."""
    check_fields(model, *sizes, *(() if model.embedding_features is None else ("embedding_features",)))
    if not isinstance(model.layer, type) or not issubclass(model.layer, nn.Recurrent):
        raise ConfigError(f"{type(model).__name__}: layer must be nn.LSTM or nn.GRU, not {model.layer!r}.")


def _last_state(
    sequences: jax.Array, layer: type[nn.Recurrent], features: int, bidirectional: bool, lengths: jax.Array | None
) -> jax.Array:
    """Returns the last output of each sequence: ``[batch, features]``, or ``2 * features`` of both directions.

    ``sequences`` are ``[time, batch, inputs]``. The layer becomes ``LSTM_0``, for example, of the calling module.
    """
    make = partial(layer, features, dtype=sequences.dtype)
    rnn = nn.Bidirectional(make(), make()) if bidirectional else make()
    carry, _ = rnn(sequences, seq_lengths=lengths, time_major=True, return_carry=True)
    carries = carry if bidirectional else (carry,)
    # The last part of a state is the output; its dtype may be wider than the products'.
    return jnp.concatenate([jax.tree.leaves(carry)[-1] for carry in carries], axis=-1).astype(sequences.dtype)
