"""A transformer's layers by their formulas, for networks that tests compute a second time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

type Layer = Callable[[str, jax.Array], jax.Array]  # of a name and its input


def layer_norm(x: jax.Array, scale: Any, bias: Any, epsilon: float = 1e-6) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return unit * scale[None, None] + bias[None, None]


def transformer_block(
    x: jax.Array, names: Any, norm: Layer, dense: Layer, heads: int, *, causal: bool = False, approximate: bool = False
) -> jax.Array:
    """A pre-norm block of ``[batch, time, features]`` with layers of six ``names``; GELU may be ``approximate``."""
    norm_1, projection, output, norm_2, first, last = names
    parts = jnp.split(dense(projection, norm(norm_1, x)), 3, axis=-1)
    query, key, value = (part.reshape(*x.shape[:2], heads, -1) for part in parts)
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    x = x + dense(output, attended.reshape(x.shape))
    return x + dense(last, jax.nn.gelu(dense(first, norm(norm_2, x)), approximate=approximate))
