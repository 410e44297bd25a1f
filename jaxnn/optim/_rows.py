"""Some rows of a table, in place of a gradient or an update that is zero in all others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxnn.types import Params, PyTree


class SparseRows(NamedTuple):
    """A gradient or an update of a table by its rows.

    Attributes:
        ids: ``[n]`` int32, which rows; the same may come more than once, and counts as the sum. One beyond the
            table's last row does not count.
        values: ``[n, ...]`` what there is for each.
    """

    ids: jax.Array
    values: jax.Array


def is_rows(node: Any) -> bool:
    """Whether ``node`` is ``SparseRows``: a leaf of gradients and updates, for ``jax.tree.map``'s ``is_leaf``."""
    return isinstance(node, SparseRows)


def summed(rows: SparseRows, num_rows: int) -> SparseRows:
    """The same with each id once: values of equal ids are summed, and what sums to zero gets an id beyond the table.

    Costs a sort of the ids, or where there are more of them than rows, an array of ``num_rows`` values. Gives at most
    ``num_rows`` rows, their ids distinct; zeros for ids beyond the table.
    """
    if len(rows.ids) >= num_rows:
        ids = jnp.arange(num_rows, dtype=jnp.int32)
        values = jax.ops.segment_sum(rows.values, rows.ids, num_rows)
    else:
        order = jnp.argsort(rows.ids)
        ids = rows.ids[order]
        is_first = jnp.concatenate([jnp.ones((1,), bool), ids[1:] != ids[:-1]])[: len(ids)]
        slots = jnp.cumsum(is_first) - 1
        values = jax.ops.segment_sum(rows.values[order], slots, len(ids), indices_are_sorted=True)
        ids = jnp.full_like(ids, num_rows).at[slots].set(ids, indices_are_sorted=True)
    axes = tuple(range(1, values.ndim))
    # A comparison that is true of NaN too: it must not be lost.
    counts = jnp.any(values != 0, axis=axes, keepdims=True) & (ids < num_rows).reshape(-1, *[1 for _ in axes])
    beyond = num_rows + jnp.arange(len(ids), dtype=jnp.int32)
    return SparseRows(jnp.where(counts.reshape(-1), ids, beyond), jnp.where(counts, values, 0))


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows ``[n, ...]`` of ``table`` at ``ids [n]``, distinct; zeros for ids beyond it."""
    return table.at[ids].get(mode="fill", fill_value=0, unique_indices=True)


def put_rows(table: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """``table`` with ``values [n, ...]`` for its rows at ``ids [n]``, distinct; those beyond it are dropped."""
    return table.at[ids].set(values.astype(table.dtype), mode="drop", unique_indices=True)


def apply_updates(params: Params, updates: PyTree) -> Params:
    """``optax.apply_updates``, where an update may be ``SparseRows`` with distinct ids: only these rows are touched."""

    def apply(update: Any, param: jax.Array) -> Any:
        if not is_rows(update):
            return optax.apply_updates(param, update)
        return param.at[update.ids].add(update.values.astype(param.dtype), mode="drop", unique_indices=True)

    updated: Params = jax.tree.map(apply, updates, params, is_leaf=lambda node: node is None or is_rows(node))
    return updated
