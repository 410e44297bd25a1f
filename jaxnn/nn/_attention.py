"""Dot-product attention, by what is fastest for the shapes and the device."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnn.nn._layer_arguments import choose, platform, scope
from jaxnn.nn._memory_efficient_attention import BLOCK, memory_efficient_attention
from jaxnn.types import ConfigError

_MAX_SCORES_BYTES = 2**23  # of scores: with more, in several blocks, blocks were measured to be faster on CPU too


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    lengths: ArrayLike | None = None,
    query_lengths: ArrayLike | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    implementation: str | Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """``softmax(query @ key * scale + bias) @ value``, as `jax.nn.dot_product_attention`.

    Vaswani et al., Attention Is All You Need, 2017 (arXiv:1706.03762). A query that sees no key, or that is beyond
    its length, gives zeros and has no gradient, in every implementation. The contents of queries beyond their length,
    and of keys and values that ``lengths`` or ``mask`` hide from all queries, do not matter, be they NaN.

    Implementations: ``"math"`` holds all scores; ``"memory_efficient"`` never does, takes no bias; both compute in float32 or
    wider. ``"xla"`` is JAX's own, whose softmax is float32 for float64 too; ``"cudnn"`` is JAX's on an NVIDIA GPU in
    half precision, without forward mode. A function is called as ``jax.nn.dot_product_attention(query, key, value,
    bias, mask, scale=…, is_causal=…)``, lengths being part of the mask.

    Args:
        query: ``[*batch, T, heads, head_dim]`` floats.
        key: ``[*batch, S, key_heads, head_dim]``; ``heads`` is a multiple of ``key_heads`` (grouped queries).
        value: as ``key``.
        causal: whether query ``t`` sees keys ``0…t`` only.
        lengths: ``[*batch]`` integers: how many keys are no padding.
        query_lengths: ``[*batch]`` integers: how many queries are no padding.
        mask: bool, broadcastable to ``[*batch, heads, T, S]``: True where a query sees a key.
        bias: floats, broadcastable likewise; added to the scores. Minus infinity hides a key, but not all of them from
            a query: that is for ``mask`` and ``lengths``. The lowest finite number on all keys makes them equal, as in
            `jax.nn.dot_product_attention`: the query sees their mean. Together with a mask, ``"xla"`` and ``"cudnn"``
            then count hidden keys too.
        scale: of the scores; ``head_dim ** -0.5`` where not given.
        implementation: one of the names above, a function, or None: what is fastest here.

    Returns:
        ``[*batch, T, heads, head_dim]``, of the dtype of ``query``.

    Raises:
        ConfigError: shapes or dtypes that do not fit, or an implementation that cannot do what is asked.
    """
    asked = _checked(_Asked(query, key, value, mask, bias, lengths, query_lengths, causal, scale))
    if not callable(implementation):
        implementation = choose("attention", implementation, _obstacles(asked, implementation))
    with scope("attention", implementation):
        if callable(implementation):
            out = _by_function(asked, implementation)
        else:
            out = _COMPUTED[implementation](asked)
        if asked.query_lengths is not None:
            out = jnp.where(_positions_below(asked.query_lengths, out.shape[1])[:, :, None, None], out, 0)
    return out.reshape(query.shape)


class _Asked(NamedTuple):
    """The arguments; `_checked` merges their batch axes into one and zeroes what no query sees."""

    query: jax.Array  # [batch, T, heads, head_dim]
    key: jax.Array  # [batch, S, key_heads, head_dim], as `value`
    value: jax.Array
    mask: jax.Array | None  # [batch | 1, heads | 1, T | 1, S | 1], as `bias`
    bias: jax.Array | None
    lengths: Any  # [batch] int32 or None, as `query_lengths`
    query_lengths: Any
    causal: bool
    scale: Any


def _checked(asked: _Asked) -> _Asked:
    query, key, value = (jnp.asarray(array) for array in asked[:3])
    fits = query.ndim == key.ndim >= 3 and key.shape == value.shape
    fits = fits and query.shape[:-3] == key.shape[:-3] and query.shape[-1] == key.shape[-1]
    if not fits or 0 in (*query.shape[-3:], *key.shape[-3:]) or query.shape[-2] % key.shape[-2]:
        raise ConfigError(
            "attention needs query [*batch, T, heads, head_dim] and key and value [*batch, S, key_heads, head_dim], "
            "heads a multiple of key_heads and nothing empty but the batch, not "
            f"query {query.shape}, key {key.shape} and value {value.shape}."
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ConfigError(
            "attention needs query, key and value of one floating dtype, "
            f"not {query.dtype}, {key.dtype} and {value.dtype}: cast them."
        )
    if asked.scale is not None and jnp.ndim(asked.scale):
        raise ConfigError(
            f"attention: scale must be one number, not of shape {list(jnp.shape(asked.scale))}: multiply the query by "
            "one for each head."
        )
    batch = query.shape[:-3]
    scores = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    query, key, value = (array.reshape(-1, *array.shape[-3:]) for array in (query, key, value))
    mask, bias = _broad("mask", asked.mask, scores, jnp.bool_), _broad("bias", asked.bias, scores, jnp.floating)
    lengths = _checked_counts("lengths", asked.lengths, batch)
    counts = _checked_counts("query_lengths", asked.query_lengths, batch)
    scale = query.shape[-1] ** -0.5 if asked.scale is None else asked.scale
    asked = _Asked(query, key, value, mask, bias, lengths, counts, asked.causal, scale)
    # Weights of 0 are not enough: 0 times NaN or infinity is NaN, in the values' sum and in gradients.
    if counts is not None:
        query = jnp.where(_positions_below(counts, query.shape[1])[:, :, None, None], query, 0)
    if (visible := _visible_keys(asked, causal=False)) is not None:
        seen = visible.any((1, 2))[:, :, None, None]
        key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)
    return asked._replace(query=query, key=key, value=value)


def _broad(name: str, array: jax.Array | None, scores: tuple[int, ...], kind: Any) -> jax.Array | None:
    """``array`` with one batch axis, ``[batch | 1, heads | 1, T | 1, S | 1]``."""
    if array is None:
        return None
    if not jnp.issubdtype(array.dtype, kind):
        raise ConfigError(f"attention: {name} must be {kind.__name__.rstrip('_')}, not {array.dtype}.")
    shape = (1,) * (len(scores) - array.ndim) + array.shape
    if len(shape) > len(scores) or any(has not in (1, full) for has, full in zip(shape, scores, strict=True)):
        raise ConfigError(
            f"attention: {name} of shape {array.shape} does not broadcast to [*batch, heads, T, S], here {scores}."
        )
    batch = () if set(shape[:-3]) <= {1} else scores[:-3]
    return jnp.broadcast_to(array.reshape(shape), (*(batch or shape[:-3]), *shape[-3:])).reshape(-1, *shape[-3:])


def _checked_counts(name: str, counts: ArrayLike | None, batch: tuple[int, ...]) -> jax.Array | None:
    """``counts [*batch]`` as ``[batch]`` int32."""
    if counts is None:
        return None
    array = jnp.asarray(counts)
    if array.shape != batch or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ConfigError(
            f"attention: {name} must be integers of shape {batch}, one an example, not {array.dtype} {array.shape}."
        )
    return array.reshape(-1).astype(jnp.int32)


def _positions_below(counts: jax.Array, size: int) -> jax.Array:
    """``[batch, size]`` bool: the first ``counts [batch]`` of ``size`` positions."""
    return jnp.arange(size)[None] < counts[:, None]


def _visible_keys(asked: _Asked, causal: bool) -> jax.Array | None:
    """``[batch | 1, heads | 1, T | 1, S]`` bool: which keys a query sees; None: all."""
    num_queries, num_keys = asked.query.shape[1], asked.key.shape[1]
    parts = []
    if asked.mask is not None:
        parts.append(jnp.broadcast_to(asked.mask, (*asked.mask.shape[:3], num_keys)))
    if asked.lengths is not None:
        parts.append(_positions_below(asked.lengths, num_keys)[:, None, None, :])
    if causal:
        parts.append(jnp.tri(num_queries, num_keys, dtype=bool)[None, None])
    return reduce(jnp.logical_and, parts) if parts else None


def _math(asked: _Asked) -> jax.Array:
    query, key, value = _heads_first(asked)
    scores = query @ key.mT * jnp.asarray(asked.scale, query.dtype)
    if asked.bias is not None:
        scores = scores + asked.bias.astype(scores.dtype)
    visible = _visible_keys(asked, causal=asked.causal)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    highest = jax.lax.stop_gradient(scores).max(-1, keepdims=True)
    # Of a query that sees nothing all weights are 0.
    weights = jnp.exp(scores - jnp.where(highest > -jnp.inf, highest, 0))
    total = weights.sum(-1, keepdims=True)
    # Dividing [T, head_dim] and not [T, S] is a pass over the scores less.
    out = weights @ value / jnp.where(total > 0, total, 1)
    return out.swapaxes(1, 2).astype(asked.query.dtype)


def _memory_efficient(asked: _Asked) -> jax.Array:
    query, key, value = _heads_first(asked)
    query = query * jnp.asarray(asked.scale, query.dtype)
    out = memory_efficient_attention(query, key, value, _visible_keys(asked, causal=False), causal=asked.causal)
    return out.swapaxes(1, 2).astype(asked.query.dtype)


def _xla(asked: _Asked) -> jax.Array:
    return _by_function(asked, partial(jax.nn.dot_product_attention, implementation="xla"))


def _cudnn(asked: _Asked) -> jax.Array:
    scores = (asked.query.shape[1], asked.key.shape[1])
    mask, bias = (
        None if array is None else jnp.broadcast_to(array, array.shape[:2] + scores)
        for array in (asked.mask, asked.bias)
    )
    # What cuDNN makes of no keys at all is not documented: let it see one, the result is set to 0 afterwards.
    lengths = None if asked.lengths is None else jnp.maximum(asked.lengths, 1)
    compute = partial(jax.nn.dot_product_attention, implementation="cudnn", key_value_seq_lengths=lengths)
    return _by_function(asked, compute, bias=bias, mask=mask)


def _by_function(asked: _Asked, compute: Callable[..., jax.Array], **options: Any) -> jax.Array:
    options = options or {"bias": asked.bias, "mask": _visible_keys(asked, causal=False)}
    # A number of NumPy is none that JAX can write into cuDNN's configuration.
    scale = float(asked.scale) if isinstance(asked.scale, numbers.Real) else asked.scale
    out = compute(asked.query, asked.key, asked.value, scale=scale, is_causal=asked.causal, **options)
    if (visible := _visible_keys(asked, causal=asked.causal and asked.mask is not None)) is None:
        return out
    # JAX gives a query that sees nothing the mean of all values.
    return jnp.where(visible.any(-1, keepdims=True).swapaxes(1, 2), out, 0)


_COMPUTED = {"math": _math, "memory_efficient": _memory_efficient, "xla": _xla, "cudnn": _cudnn}


def _heads_first(asked: _Asked) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value ``[batch, heads, time, head_dim]``, equally many heads, float32 or wider."""
    groups = asked.query.shape[2] // asked.key.shape[2]
    dtype = jnp.promote_types(asked.query.dtype, jnp.float32)
    key, value = (jnp.repeat(array, groups, 2) if groups > 1 else array for array in (asked.key, asked.value))
    query, key, value = (array.swapaxes(1, 2).astype(dtype) for array in (asked.query, key, value))
    return query, key, value


def _obstacles(asked: _Asked, given: str | None) -> dict[str, str | None]:
    batch, num_queries, heads, _ = asked.query.shape
    num_keys, size = asked.key.shape[1], jnp.promote_types(asked.query.dtype, jnp.float32).itemsize
    # A symbolic size (`jax.export`) is not known: it counts as 1.
    known = math.prod(axis for axis in (batch, heads, num_queries, num_keys, size) if isinstance(axis, int))
    large = known > _MAX_SCORES_BYTES and max(num_queries, num_keys) > BLOCK
    bias_obstacle = None if asked.bias is None else "it takes no bias"
    # Only a preference: asked for by name, all scores are held however many they are.
    size_obstacle = "the scores are large" if large and given is None and bias_obstacle is None else None
    return {"math": size_obstacle, "memory_efficient": bias_obstacle, "cudnn": _cudnn_obstacle(asked)}


def _cudnn_obstacle(asked: _Asked) -> str | None:
    """What `jax.nn.dot_product_attention` would raise for; its checks are in jax/_src/cudnn."""
    if _compute_capability() < 8:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    num_queries, num_keys, head_dim = asked.query.shape[1], asked.key.shape[1], asked.query.shape[3]
    masked, odd = not (asked.mask is asked.bias is None), num_queries % 2 or num_keys % 2
    reasons = {
        f"it takes bfloat16 and float16, not {asked.query.dtype}": asked.query.dtype.itemsize != 2,
        f"head_dim must be a multiple of 8 up to 128, not {head_dim}": head_dim > 128 or head_dim % 8,
        "scale must be a plain number, not an array": not isinstance(asked.scale, numbers.Real),
        f"with a mask or bias it takes even lengths, not {num_queries} and {num_keys}": masked and odd,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _compute_capability() -> float:
    """That of the NVIDIA GPU that computes here; 0 where none does."""
    if platform() != "gpu":
        return 0.0
    device = jax.local_devices(backend="gpu")[0]
    return float(device.compute_capability) if "cuda" in device.client.platform_version else 0.0
