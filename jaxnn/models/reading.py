"""How a recurrent model reads tokens: as vectors with a single 1, to the state after the last."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxnn.nn import Bidirectional, Recurrent
from jaxnn.types import ConfigError


def check_layer(model: str, layer: Any) -> None:
    """Raises ConfigError unless ``layer`` is the class of a recurrent layer; ``model`` says for whom."""
    if not isinstance(layer, type) or not issubclass(layer, Recurrent):
        raise ConfigError(f"{model}: layer must be nn.LSTM or nn.GRU, not {layer!r}.")


def one_hot(module: linen.Module, tokens: jax.Array, vocabulary_size: int) -> jax.Array:
    """Tokens ``[...]`` as vectors ``[..., vocabulary_size]`` with a single 1, in the dtype of ``module``'s parameters.

    A token outside the vocabulary is NaN, as it is in an embedding.
    """
    params = jax.tree.leaves(module.variables.get("params", {}))
    dtype = params[0].dtype if params else jnp.float32  # there are none yet where they are made
    known = (tokens >= 0) & (tokens < vocabulary_size)
    return jnp.where(known[..., None], jax.nn.one_hot(tokens, vocabulary_size, dtype=dtype), jnp.nan)


def last_state(
    sequences: jax.Array,
    layer: type[Recurrent],
    features: int,
    bidirectional: bool = False,
    seq_lengths: jax.Array | None = None,
) -> jax.Array:
    """What the layer puts out after each sequence's last step; it becomes ``LSTM_0``, say, of the calling module.

    Args:
        sequences: ``[time, batch, inputs]`` floats.
        layer: ``LSTM`` or ``GRU`` of `jaxnn.nn`.
        features: the width of its state.
        bidirectional: whether another one reads from the end to the start.
        seq_lengths: ``[batch]`` integers; None: all are whole.

    Returns:
        ``[batch, features]`` or, of both directions, ``[batch, 2 * features]``; of the dtype of ``sequences``.
    """
    make = partial(layer, features, dtype=sequences.dtype)
    reader = Bidirectional(make(), make()) if bidirectional else make()
    carry, _ = reader(sequences, seq_lengths=seq_lengths, time_major=True, return_carry=True)
    carries = carry if bidirectional else (carry,)
    # A state's last part is what the layer puts out; it may be wider than the products.
    return jnp.concatenate([jax.tree.leaves(carry)[-1] for carry in carries], axis=-1).astype(sequences.dtype)
