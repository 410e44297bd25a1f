"""Dot-product attention, by the implementation that is fastest for the shapes and the device."""

import functools
import math
import numbers
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnn._batch_context import map_rows, shard_rows, sharding_obstacle
from jaxnn._compat import compute_capability
from jaxnn.kernels._choice import Size, choose, scope
from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._memory_efficient_attention import BLOCK, memory_efficient_attention
from jaxnn.kernels._package import native_call, native_package, package_obstacle
from jaxnn.types import ConfigError

_ON_GPU = "cudnn", "xla", "math", "memory_efficient"
_PREFERRED = {"cpu": ("native", "math", "memory_efficient"), "gpu": _ON_GPU, "other": ("xla",)}
_FEW_HEADS, _FEW_SCORES = 4, 2**14
_CACHED_SCORES_BYTES = 2**25  # of a card's cache, such as an H200's
_MAX_SCORES_BYTES = 2**23  # beyond, with several blocks, "memory_efficient" is measured to be faster on CPU too


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
    """Multi-head attention, ``softmax(query @ key * scale + bias) @ value``, as `jax.nn.dot_product_attention`.

    Vaswani et al., Attention Is All You Need, 2017 (arXiv:1706.03762). In every implementation, a query that sees no
    key, or that is padding, gives zeros and has no gradient; NaN in padding queries, or in keys and values that
    ``lengths`` or ``mask`` hide from all queries, has no effect.

    ``"native"`` is a kernel of the package of ``make native``, for float32 on a CPU, without mask and bias. ``"math"``
    materializes all scores; ``"memory_efficient"`` never does and takes no bias; both compute in float32 or wider.
    ``"xla"`` is JAX's own, with a float32 softmax for float64 too; ``"cudnn"`` is JAX's on an NVIDIA GPU in half
    precision, without forward mode. A function is called as ``jax.nn.dot_product_attention(query, key, value, bias,
    mask, scale=…, is_causal=…)``; the mask includes lengths.

    >>> query = key = value = jnp.ones((2, 8, 4, 16))  # [batch, time, heads, head_dim]
    >>> jn.nn.attention(query, key, value, causal=True).shape
    (2, 8, 4, 16)

    Args:
        query: ``[*batch, T, heads, head_dim]`` floats.
        key: ``[*batch, S, key_heads, head_dim]``; ``heads`` is a multiple of ``key_heads`` (grouped queries).
        value: as ``key``.
        causal: whether query ``t`` sees keys ``0…t`` only.
        lengths: ``[*batch]`` integers: the number of keys that are not padding.
        query_lengths: ``[*batch]`` integers: the number of queries that are not padding.
        mask: bool, broadcastable to ``[*batch, heads, T, S]``: True if the query sees the key.
        bias: floats, broadcastable likewise; added to the scores. Minus infinity hides a key, but not all keys of a
            query: use ``mask`` or ``lengths`` for that. With the lowest finite number for all keys, the query sees
            their mean, as in `jax.nn.dot_product_attention`; together with a mask, ``"xla"`` and ``"cudnn"`` then
            include hidden keys.
        scale: of the scores; default ``head_dim ** -0.5``.
        implementation: a name above, a function, or None for the fastest.

    Returns:
        ``[*batch, T, heads, head_dim]``, of the dtype of ``query``.
    """
    args = _checked(_Arguments(query, key, value, mask, bias, lengths, query_lengths, causal, scale))
    if not callable(implementation):
        implementation = choose("attention", implementation, _obstacles(args, implementation), _PREFERRED, _size(args))
    with scope("attention", implementation):
        # Sharded along other axes, cuDNN's kernels cannot be compiled.
        args = _Arguments._make((*shard_rows(args[:3]), *args[3:]))
        if callable(implementation):
            out = _by_function(args, implementation)
        else:
            out = _IMPLEMENTATIONS[implementation](args)
        out = shard_rows(out)
        if args.query_lengths is not None:
            out = jnp.where(_positions_below(args.query_lengths, out.shape[1])[:, :, None, None], out, 0)
    return out.reshape(query.shape)


class _Arguments(NamedTuple):
    """The arguments; `_checked` merges their batch axes into one and sets keys and values that no query sees to 0."""

    query: jax.Array  # [batch, T, heads, head_dim]
    key: jax.Array  # [batch, S, key_heads, head_dim], as `value`
    value: jax.Array
    mask: jax.Array | None  # [batch | 1, heads | 1, T | 1, S | 1], as `bias`
    bias: jax.Array | None
    lengths: Any  # [batch] int32 or None, as `query_lengths`
    query_lengths: Any
    causal: bool
    scale: Any


def _checked(args: _Arguments) -> _Arguments:
    query, key, value = (jnp.asarray(array) for array in args[:3])
    fits = query.ndim == key.ndim >= 3 and key.shape == value.shape
    fits = fits and query.shape[:-3] == key.shape[:-3] and query.shape[-1] == key.shape[-1]
    if not fits or 0 in (*query.shape[-3:], *key.shape[-3:]) or query.shape[-2] % key.shape[-2]:
        raise ConfigError(
            "attention needs query [*batch, T, heads, head_dim] and key and value [*batch, S, key_heads, head_dim], "
            "heads a multiple of key_heads and no empty axis except the batch, not "
            f"query {query.shape}, key {key.shape} and value {value.shape}."
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ConfigError(f"attention needs query, key and value of one floating dtype, not {dtypes}: cast them.")
    if args.scale is not None and jnp.ndim(args.scale):
        shape = list(jnp.shape(args.scale))
        raise ConfigError(f"attention: scale must be one number, not of shape {shape}: multiply the query instead.")
    batch = query.shape[:-3]
    scores = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    query, key, value = (array.reshape(-1, *array.shape[-3:]) for array in (query, key, value))
    mask, bias = _broad("mask", args.mask, scores, jnp.bool_), _broad("bias", args.bias, scores, jnp.floating)
    lengths = _checked_counts("lengths", args.lengths, batch)
    counts = _checked_counts("query_lengths", args.query_lengths, batch)
    scale = query.shape[-1] ** -0.5 if args.scale is None else args.scale
    args = _Arguments(query, key, value, mask, bias, lengths, counts, args.causal, scale)
    # Weights of 0 are not enough: 0 times NaN or infinity is NaN, in outputs and in gradients.
    if counts is not None:
        query = jnp.where(_positions_below(counts, query.shape[1])[:, :, None, None], query, 0)
    if (visible := _visible_keys(args, causal=False)) is not None:
        seen = visible.any((1, 2))[:, :, None, None]
        key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)
    return args._replace(query=query, key=key, value=value)


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
        raise ConfigError(f"attention: {name} must be integers of shape {batch}, not {array.dtype} {array.shape}.")
    return array.reshape(-1).astype(jnp.int32)


def _positions_below(counts: jax.Array, size: int) -> jax.Array:
    """``[batch, size]`` bool: the first ``counts [batch]`` of ``size`` positions."""
    return jnp.arange(size)[None] < counts[:, None]


def _visible_keys(args: _Arguments, causal: bool) -> jax.Array | None:
    """``[batch | 1, heads | 1, T | 1, S]`` bool: the keys that a query sees; None: all."""
    num_queries, num_keys = args.query.shape[1], args.key.shape[1]
    parts = []
    if args.mask is not None:
        parts.append(jnp.broadcast_to(args.mask, (*args.mask.shape[:3], num_keys)))
    if args.lengths is not None:
        parts.append(_positions_below(args.lengths, num_keys)[:, None, None, :])
    if causal:
        parts.append(jnp.tri(num_queries, num_keys, dtype=bool)[None, None])
    return reduce(jnp.logical_and, parts) if parts else None


def _math(args: _Arguments) -> jax.Array:
    query, key, value = _heads_first(args)
    weights, total = _weights(args, query, key)
    # To divide [T, head_dim] and not [T, S] saves a pass over the scores.
    return (weights @ value / total).swapaxes(1, 2).astype(args.query.dtype)


def _weights(args: _Arguments, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights ``[batch, heads, T, S]`` of `_heads_first`'s query and key, and what to divide by: their sums, or 1."""
    scores = query @ key.mT * jnp.asarray(args.scale, query.dtype)
    if args.bias is not None:
        scores = scores + args.bias.astype(scores.dtype)
    visible = _visible_keys(args, causal=args.causal)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    highest = jax.lax.stop_gradient(scores).max(-1, keepdims=True)
    # All weights of a query that sees nothing are 0.
    weights = jnp.exp(scores - jnp.where(highest > -jnp.inf, highest, 0))
    total = weights.sum(-1, keepdims=True)
    return weights, jnp.where(total > 0, total, 1)


def _memory_efficient(args: _Arguments) -> jax.Array:
    query, key, value = _heads_first(args)
    query = query * jnp.asarray(args.scale, query.dtype)
    out = memory_efficient_attention(query, key, value, _visible_keys(args, causal=False), causal=args.causal)
    return out.swapaxes(1, 2).astype(args.query.dtype)


def _xla(args: _Arguments) -> jax.Array:
    def compute(*arrays: Any, is_causal: bool, **options: Any) -> Any:
        return jax.nn.dot_product_attention(*arrays, implementation="xla", **options)

    # JAX's own causal mask is a choice between bools, which ONNX Runtime does not have.
    return _by_function(args, compute, bias=args.bias, mask=_visible_keys(args, causal=args.causal))


def _cudnn(args: _Arguments) -> jax.Array:
    batch, num_queries, heads, _ = args.query.shape
    scores = (batch, heads, num_queries, args.key.shape[1])
    # Of all heads and rows, which JAX needs under vmap; XLA's implementation has scores of this size too.
    mask, bias = (None if array is None else jnp.broadcast_to(array, scores) for array in (args.mask, args.bias))
    # cuDNN does not document the case of no keys: it gets one, and the result is set to 0 afterwards.
    lengths = None if args.lengths is None else jnp.maximum(args.lengths, 1)

    def compute(query: Any, key: Any, value: Any, bias: Any, mask: Any, **options: Any) -> jax.Array:
        def run(query: Any, key: Any, value: Any, bias: Any, mask: Any, lengths: Any) -> jax.Array:
            given = {"bias": bias, "mask": mask, "key_value_seq_lengths": lengths, "implementation": "cudnn"}
            return jax.nn.dot_product_attention(query, key, value, **given, **options)  # type: ignore[no-any-return]

        # JAX cannot partition it within `jax.shard_map`, as over the members of a sweep.
        within = not jax.sharding.get_abstract_mesh().empty
        mapped = map_rows(run, batch, (0,) * 6, 0) if within else run
        return mapped(query, key, value, bias, mask, lengths)

    return _by_function(args, compute, bias=bias, mask=mask)


def _by_function(args: _Arguments, compute: Callable[..., jax.Array], **options: Any) -> jax.Array:
    options = options or {"bias": args.bias, "mask": _visible_keys(args, causal=False)}
    # JAX cannot write a NumPy number into cuDNN's configuration.
    scale = float(args.scale) if isinstance(args.scale, numbers.Real) else args.scale
    out = compute(args.query, args.key, args.value, scale=scale, is_causal=args.causal, **options)
    if (visible := _visible_keys(args, causal=args.causal and args.mask is not None)) is None:
        return out
    # JAX gives a query that sees nothing the mean of all values.
    return jnp.where(visible.any(-1, keepdims=True).swapaxes(1, 2), out, 0)


def _native(args: _Arguments) -> jax.Array:
    batch, num_keys = args.key.shape[:2]
    lengths = jnp.full(batch, num_keys, jnp.int32) if args.lengths is None else args.lengths
    run = map_rows(functools.partial(_of_scaled.compute, causal=args.causal), batch, (0,) * 4, 0)
    out: jax.Array = run(args.query * jnp.asarray(args.scale, args.query.dtype), args.key, args.value, lengths)
    return out


def _by_xla(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, *, causal: bool) -> jax.Array:
    args = _Arguments(query, key, value, None, None, lengths, None, causal, 1.0)
    query, key, value = _heads_first(args)
    weights, total = _weights(args, query, key)
    # Divided first, so that the gradient needs no product with the values.
    return (weights / total @ value).swapaxes(1, 2)


def _forward(*arrays: jax.Array, causal: bool) -> Any:
    batch, num_queries, heads, _ = shape = arrays[0].shape
    output, log_sums = native_call("jaxnn_attention", [shape, (batch, heads, num_queries)], *arrays, causal=causal)
    return output, (output, log_sums)


def _backward(operands: Any, kept: Any, cotangent: jax.Array, *, causal: bool) -> Any:
    shapes = [array.shape for array in operands[:3]]
    return *native_call("jaxnn_attention_backward", shapes, *operands, *kept, cotangent, causal=causal), None


def _unfit(query: Any, key: Any, value: Any, lengths: Any, *, causal: bool) -> str | None:
    if not native_package().has_attention():
        return "this CPU lacks AVX2"
    if query.dtype != jnp.float32:
        return f"it computes in float32, not in {query.dtype}"
    return sharding_obstacle(len(query))


def _slower(query: Any, key: Any, value: Any, lengths: Any, *, causal: bool) -> str | None:
    batch, num_queries, heads, _ = query.shape
    few = batch * heads < _FEW_HEADS or batch * heads * num_queries * key.shape[1] < _FEW_SCORES
    return "there are few heads or scores, for which it is not faster" if few else None


# Of the scaled ``query [batch, T, heads, head_dim]``, ``key``, ``value`` and ``lengths [batch]``.
_of_scaled = Kernel("attention", _by_xla, None, _unfit, _slower, gradient=(_forward, _backward))


def _native_obstacle(args: _Arguments, given: str | None) -> str | None:
    if args.mask is not None or args.bias is not None:
        return package_obstacle() or "it takes neither mask nor bias"
    arrays = *args[:3], args.lengths
    return _of_scaled.obstacle(*arrays, requested=given is not None, causal=args.causal)


_IMPLEMENTATIONS = {
    "native": _native,
    "math": _math,
    "memory_efficient": _memory_efficient,
    "xla": _xla,
    "cudnn": _cudnn,
}


def _heads_first(args: _Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value ``[batch, heads, time, head_dim]``, as many heads of each, float32 or wider."""
    groups = args.query.shape[2] // args.key.shape[2]
    dtype = jnp.promote_types(args.query.dtype, jnp.float32)
    key, value = (jnp.repeat(array, groups, 2) if groups > 1 else array for array in (args.key, args.value))
    query, key, value = (array.swapaxes(1, 2).astype(dtype) for array in (args.query, key, value))
    return query, key, value


def _obstacles(args: _Arguments, given: str | None) -> dict[str, str | None]:
    batch, num_queries, heads, _ = args.query.shape
    num_keys, size = args.key.shape[1], jnp.promote_types(args.query.dtype, jnp.float32).itemsize
    # A symbolic size (`jax.export`) is unknown and counts as 1.
    known = math.prod(axis for axis in (batch, heads, num_queries, num_keys, size) if isinstance(axis, int))
    large = known > _MAX_SCORES_BYTES and max(num_queries, num_keys) > BLOCK
    bias_obstacle = None if args.bias is None else "it takes no bias"
    # A preference only: "math" given by name takes scores of any size.
    size_obstacle = "the scores are large" if large and given is None and bias_obstacle is None else None
    old = 0 < compute_capability() < 8 and args.query.dtype == jnp.bfloat16
    xla_obstacle = "its bfloat16 products need an NVIDIA GPU of compute capability 8.0 or above" if old else None
    cudnn_obstacle = _cudnn_obstacle(args)
    return {
        "native": _native_obstacle(args, given),
        "math": size_obstacle,
        "memory_efficient": bias_obstacle,
        "xla": xla_obstacle,
        "cudnn": cudnn_obstacle,
    }


def _size(args: _Arguments) -> Size | None:
    """What decides which implementation is faster; None if those that keep scores would have many of them."""
    batch, num_keys = args.key.shape[:2]
    sizes = (batch, args.query.shape[2], args.query.shape[1], num_keys)
    if not all(isinstance(size, int) for size in sizes) or 4 * math.prod(sizes) > _CACHED_SCORES_BYTES:
        return None
    return Size(num_keys, args.query.dtype, f"{batch} × {num_keys} keys")


def _cudnn_obstacle(args: _Arguments) -> str | None:
    """The reason why `jax.nn.dot_product_attention` would raise; its checks are in jax/_src/cudnn."""
    if compute_capability() < 8:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    num_queries, num_keys, head_dim = args.query.shape[1], args.key.shape[1], args.query.shape[3]
    reasons = {
        f"it takes bfloat16 and float16, not {args.query.dtype}": args.query.dtype.itemsize != 2,
        f"head_dim must be a multiple of 8 up to 128, not {head_dim}": head_dim > 128 or head_dim % 8,
        "scale must be a plain number, not an array": not isinstance(args.scale, numbers.Real),
        f"its gradient takes even lengths, not {num_queries} and {num_keys}": num_queries % 2 or num_keys % 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
