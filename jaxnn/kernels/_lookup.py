"""Rows of an embedding's table, and means of rows without an array of all of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn._batch_context import batch_sharding
from jaxnn.kernels._custom_vjp import custom_vjp
from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._package import native_call
from jaxnn.types import is_half

_NONE = -(2**31)  # an id that counts for nothing, in the native kernels


@functools.partial(custom_vjp, num_static=1)
def _half_rows(num_rows: int, table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of a ``table [num_rows, features]`` in half precision, whose gradients are summed in float32."""
    return jnp.take(table, ids, axis=0)


def _half_rows_backward(num_rows: int, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    # XLA would make a constant of the table's size early, and hold it while the activations are.
    zero, rows = jax.lax.optimization_barrier((jnp.float32(0), cotangent))
    zeros = jnp.broadcast_to(zero, (num_rows, cotangent.shape[-1]))
    return zeros.at[saved[1]].add(rows.astype(jnp.float32), mode="drop").astype(cotangent.dtype), None


def _half_rows_forward(num_rows: int, table: jax.Array, ids: jax.Array) -> tuple[jax.Array, Any]:
    return jnp.take(table, ids, axis=0), (table, ids)


_half_rows.defvjp(_half_rows_forward, _half_rows_backward, push_forward=True)


def _by_xla(table: jax.Array, ids: jax.Array, where: jax.Array | None, *, summed: bool) -> jax.Array:
    rows = _half_rows(len(table), table, ids) if is_half(table.dtype) else jnp.take(table, ids, axis=0)
    if not summed:
        return rows
    counted = rows if where is None else jnp.where(where[..., None], rows, 0)
    return jnp.sum(counted, axis=-2, dtype=jnp.promote_types(rows.dtype, jnp.float32))


def _forward(table: jax.Array, ids: jax.Array, where: jax.Array | None, *, summed: bool) -> Any:
    if not summed:
        return _by_xla(table, ids, where, summed=False), ()
    groups = _counted(ids, where).reshape(-1, ids.shape[-1])
    (sums,) = native_call("jaxnn_lookup_sums", [(len(groups), table.shape[1])], table, groups)
    return sums.reshape(*ids.shape[:-1], table.shape[1]), ()


def _backward(operands: Any, kept: Any, cotangent: jax.Array, *, summed: bool) -> tuple[jax.Array, None, None]:
    # XLA's sum runs on one thread, and its operand has a row for each id.
    table, ids, where = operands
    sums = cotangent.reshape(-1, table.shape[1])
    groups = _counted(ids, where).reshape(len(sums), -1)
    (gradient,) = native_call("jaxnn_lookup_gradient", [table.shape], groups, sums)
    return gradient, None, None


def _counted(ids: jax.Array, where: jax.Array | None) -> jax.Array:
    return ids if where is None else jnp.where(where, ids, _NONE)


def _unfit(table: Any, ids: Any, where: Any, *, summed: bool) -> str | None:
    if (str(table.dtype), str(ids.dtype)) != ("float32", "int32"):
        return "the table is not float32, or the ids are not int32"
    if batch_sharding(0) is not None:
        return "devices share the batch"
    return None if ids.size else "there are no ids"


# Of ``table [rows, features]``, ``ids [...]`` and None: rows ``[..., features]``; or if ``summed``, of ids ``[..., n]``
# and those that count, ``where [..., n]`` or None, their sums ``[..., features]``. Outside of a gradient it is XLA's:
# `optim.sparse_rows` finds lookups by their gather.
lookup = Kernel("lookup", _by_xla, _by_xla, _unfit, gradient=(_forward, _backward))
