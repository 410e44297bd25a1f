"""Attention over pairs of query and key blocks with an online softmax, which carries its maximum and sum.

Rabe and Staats, Self-attention Does Not Need O(n²) Memory, 2021 (arXiv:2112.05682); the backward pass recomputes the
weights, as in Dao et al., FlashAttention, 2022 (arXiv:2205.14135).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxnn.kernels._custom_vjp import custom_vjp

BLOCK = 256  # tokens: at head_dim 64 the blocks of a head fit into 1 MB of cache
_LOWEST = -1e30  # below any real score, and finite, so that differences are finite


class _Plan(NamedTuple):
    """The static arguments of the loop."""

    pairs: tuple[tuple[int, int], ...]  # of a block of queries and one of keys
    block: int
    num_keys: int
    causal: bool


def memory_efficient_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array | None, *, causal: bool, block: int = BLOCK
) -> jax.Array:
    """Softmax attention in memory ``O((T + S) * (head_dim + block))`` per head; the gradient computes the scores twice.

    Takes the scaled ``query [batch, heads, T, head_dim]``, float32 or wider, ``key`` and ``value [batch, heads, S,
    head_dim]`` of the same dtype, and ``visible [batch | 1, heads | 1, T | 1, S]`` bool, the keys a query sees; None:
    all. Returns ``[batch, heads, T, head_dim]``; zeros for a query that sees no key.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    block = min(block, max(num_queries, num_keys))
    pairs = [
        (row, column)
        for row in range(-(-num_queries // block))
        for column in range(-(-num_keys // block))
        if not causal or column <= row
    ]
    query, key, value = (_padded(array, 2, block) for array in (query, key, value))
    if visible is not None:
        visible = _padded(visible, 3, block)
        visible = visible if visible.shape[2] == 1 else _padded(visible, 2, block)
    return _attend(_Plan(tuple(pairs), block, num_keys, causal), query, key, value, visible)[:, :, :num_queries]


def _padded(array: jax.Array, axis: int, block: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % block)
    return jnp.pad(array, widths)


type _Carry = tuple[jax.Array, jax.Array, jax.Array]
type _Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]


def _forward(
    plan: _Plan, query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array | None
) -> tuple[jax.Array, _Saved]:
    def step(carry: _Carry, pair: jax.Array) -> tuple[_Carry, None]:
        out, highest, total = (_block(array, pair[0], plan.block) for array in carry)
        scores = _scores(plan, query, key, visible, pair)
        higher = jnp.maximum(highest, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - higher)
        decay = jnp.exp(highest - higher)
        total = total * decay + weights.sum(-1, keepdims=True)
        out = out * decay + weights @ _block(value, pair[1], plan.block)
        put = partial(_set_block, index=pair[0], block=plan.block)
        return (put(carry[0], out), put(carry[1], higher), put(carry[2], total)), None

    column = query[..., :1]
    start = (jnp.zeros_like(query), jnp.full_like(column, _LOWEST), jnp.zeros_like(column))
    (out, highest, total), _ = jax.lax.scan(step, start, jnp.array(plan.pairs, jnp.int32))
    total = jnp.where(total > 0, total, 1)
    out = out / total
    return out, (query, key, value, visible, out, highest + jnp.log(total))


def _backward(plan: _Plan, saved: _Saved, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, visible, out, log_total = saved
    # The mean of a row of weight gradients, which the softmax subtracts, without the row (FlashAttention, B.2).
    row_mean = (grad * out).sum(-1, keepdims=True)

    def step(carry: _Carry, pair: jax.Array) -> tuple[_Carry, None]:
        row, column = pair[0], pair[1]
        queries, grads = _block(query, row, plan.block), _block(grad, row, plan.block)
        scores = _scores(plan, query, key, visible, pair)
        weights = jnp.exp(scores - _block(log_total, row, plan.block))
        to_weights = grads @ _block(value, column, plan.block).mT
        to_scores = weights * (to_weights - _block(row_mean, row, plan.block))
        to_query = _add_to_block(carry[0], to_scores @ _block(key, column, plan.block), row, plan.block)
        to_key = _add_to_block(carry[1], to_scores.mT @ queries, column, plan.block)
        return (to_query, to_key, _add_to_block(carry[2], weights.mT @ grads, column, plan.block)), None

    zeros = (jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value))
    (to_query, to_key, to_value), _ = jax.lax.scan(step, zeros, jnp.array(plan.pairs, jnp.int32))
    return to_query, to_key, to_value, None


_attend = custom_vjp(lambda *arguments: _forward(*arguments)[0], num_static=1)
_attend.defvjp(_forward, _backward, push_forward=True)


def _scores(plan: _Plan, query: jax.Array, key: jax.Array, visible: jax.Array | None, pair: jax.Array) -> jax.Array:
    """``[batch, heads, block, block]``; minus infinity where the query does not see the key."""
    row, column = pair[0], pair[1]
    scores = _block(query, row, plan.block) @ _block(key, column, plan.block).mT
    queries = row * plan.block + jnp.arange(plan.block)[:, None]
    keys = column * plan.block + jnp.arange(plan.block)[None]
    seen = (keys < plan.num_keys) & (keys <= queries) if plan.causal else keys < plan.num_keys
    seen = seen[None, None]
    if visible is not None:
        part = jax.lax.dynamic_slice_in_dim(visible, column * plan.block, plan.block, 3)
        seen = seen & (part if part.shape[2] == 1 else _block(part, row, plan.block))
    elif not plan.causal and plan.num_keys % plan.block == 0:
        return scores
    return jnp.where(seen, scores, -jnp.inf)


def _add_to_block(array: jax.Array, new: jax.Array, index: jax.Array, block: int) -> jax.Array:
    return _set_block(array, _block(array, index, block) + new, index, block)


def _block(array: jax.Array, index: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, index * block, block, 2)


def _set_block(array: jax.Array, new: jax.Array, index: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, new, index * block, 2)
