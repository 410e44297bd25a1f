"""What attention is asked for: arguments checked, batch axes made one, masks and lengths combined."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnn.types import ConfigError


class Asked(NamedTuple):
    """What is asked for, its batch axes made one.

    Attributes:
        query: ``[batch, T, heads, head_dim]``.
        key: ``[batch, S, key_heads, head_dim]``.
        value: as ``key``.
        mask: ``[batch | 1, heads | 1, T | 1, S | 1]`` bool, or None.
        bias: likewise, floats.
        lengths: ``[batch]`` int32, of the keys, or None.
        causal: whether query ``t`` sees keys ``0…t`` only.
        scale: of the scores.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array | None
    bias: jax.Array | None
    lengths: jax.Array | None
    causal: bool
    scale: float | jax.Array


def asked_for(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    causal: bool,
    lengths: ArrayLike | None,
    mask: jax.Array | None,
    bias: jax.Array | None,
    scale: float | jax.Array | None,
) -> Asked:
    """The arguments of `attention.attention`, checked.

    Raises:
        ConfigError: shapes or dtypes that do not fit.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    _check(query, key, value)
    if scale is not None and jnp.ndim(scale):
        raise ConfigError(
            f"attention: scale must be one number, not of shape {list(jnp.shape(scale))}: multiply the query by one "
            "for each head."
        )
    batch = query.shape[:-3]
    scores = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    return Asked(
        query=query.reshape(-1, *query.shape[-3:]),
        key=key.reshape(-1, *key.shape[-3:]),
        value=value.reshape(-1, *value.shape[-3:]),
        mask=_broad("mask", mask, scores, "bool"),
        bias=_broad("bias", bias, scores, "floating"),
        lengths=None if lengths is None else checked_counts("lengths", lengths, batch),
        causal=causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )


def visible_keys(asked: Asked, causal: bool) -> jax.Array | None:
    """``[batch | 1, heads | 1, T | 1, S]`` bool: which keys a query sees; None: all."""
    num_queries, num_keys = asked.query.shape[1], asked.key.shape[1]
    parts = []
    if asked.mask is not None:
        parts.append(jnp.broadcast_to(asked.mask, (*asked.mask.shape[:3], num_keys)))
    if asked.lengths is not None:
        parts.append(positions_below(asked.lengths, num_keys)[:, None, None, :])
    if causal:
        parts.append(jnp.tri(num_queries, num_keys, dtype=bool)[None, None])
    return functools.reduce(jnp.logical_and, parts) if parts else None


def blank_hidden(asked: Asked, query_counts: jax.Array | None) -> Asked:
    """Zeros for keys and values that mask or lengths hide from all queries, and for queries beyond ``query_counts``.

    Weights of 0 are not enough: 0 times NaN or infinity is NaN, in the values' sum and in gradients.
    """

    def blank(array: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(seen[:, :, None, None], array, 0)

    if query_counts is not None:
        asked = asked._replace(query=blank(asked.query, positions_below(query_counts, asked.query.shape[1])))
    if (visible := visible_keys(asked, causal=False)) is None:
        return asked
    seen = visible.any((1, 2))
    return asked._replace(key=blank(asked.key, seen), value=blank(asked.value, seen))


def positions_below(counts: jax.Array, size: int) -> jax.Array:
    """``[batch, size]`` bool: the first ``counts [batch]`` of ``size`` positions."""
    return jnp.arange(size)[None] < counts[:, None]


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape} and value {value.shape}"
    fits = query.ndim == key.ndim >= 3 and key.shape == value.shape
    fits = fits and query.shape[:-3] == key.shape[:-3] and query.shape[-1] == key.shape[-1]
    if not fits or 0 in (*query.shape[-3:], *key.shape[-3:]) or query.shape[-2] % key.shape[-2]:
        raise ConfigError(
            "attention needs query [*batch, T, heads, head_dim] and key and value [*batch, S, key_heads, head_dim], "
            f"heads a multiple of key_heads and nothing empty but the batch, not {shapes}."
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ConfigError(
            "attention needs query, key and value of one floating dtype, "
            f"not {query.dtype}, {key.dtype} and {value.dtype}: cast them."
        )


def _broad(name: str, array: jax.Array | None, scores: tuple[int, ...], kind: str) -> jax.Array | None:
    """``array`` with one batch axis, ``[batch | 1, heads | 1, T | 1, S | 1]``."""
    if array is None:
        return None
    if not jnp.issubdtype(array.dtype, jnp.bool_ if kind == "bool" else jnp.floating):
        raise ConfigError(f"attention: {name} must be {kind}, not {array.dtype}.")
    shape = (1,) * (len(scores) - array.ndim) + array.shape
    if len(shape) > len(scores) or any(has not in (1, full) for has, full in zip(shape, scores, strict=True)):
        raise ConfigError(
            f"attention: {name} of shape {array.shape} does not broadcast to [*batch, heads, T, S], here {scores}."
        )
    batch = () if set(shape[:-3]) <= {1} else scores[:-3]
    return jnp.broadcast_to(array.reshape(shape), (*(batch or shape[:-3]), *shape[-3:])).reshape(-1, *shape[-3:])


def checked_counts(name: str, counts: ArrayLike, batch: tuple[int, ...]) -> jax.Array:
    """``counts [*batch]`` as ``[batch]`` int32.

    Raises:
        ConfigError: they are no integers or not one an example.
    """
    array = jnp.asarray(counts)
    if array.shape != batch or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ConfigError(
            f"attention: {name} must be integers of shape {batch}, one an example, not {array.dtype} {array.shape}."
        )
    return array.reshape(-1).astype(jnp.int32)
