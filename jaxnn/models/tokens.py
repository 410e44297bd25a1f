"""Token ids as the inputs of a model: checked, and told from the padding behind them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxnn.nn import widened
from jaxnn.types import DataError


def checked_tokens(model: str, tokens: jax.Array) -> jax.Array:
    """``tokens`` as int32 or wider; DataError unless they are integers ``[batch, time]``; ``model`` says for whom."""
    if tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer):
        return widened(tokens)
    # A data set scales uint8 to floats, taking it for pictures.
    hint = ": give ids as int32, uint8 is for pictures" if jnp.issubdtype(tokens.dtype, jnp.floating) else ""
    raise DataError(
        f"{model} needs token ids [batch, time] of integers, not {tokens.dtype} {list(tokens.shape)}{hint}."
    )


def lengths(tokens: jax.Array, pad_id: int) -> jax.Array:
    """How many tokens stand before the padding at each sequence's end: ``[batch]`` int32.

    Args:
        tokens: ``[batch, time]`` integers.
        pad_id: what pads; where another token follows it counts as a token.
    """
    ends = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None]
    return jnp.max(jnp.where(tokens == pad_id, 0, ends), axis=1, initial=0)
