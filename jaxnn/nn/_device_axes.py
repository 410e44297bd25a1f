"""The batch's mapped axis and mask, set while a loss or a model is traced, and the mesh axes of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from flax.linen import with_partitioning
from jax.sharding import PartitionSpec

from jaxnn.types import Array, PyTree

_axis: ContextVar[str | None] = ContextVar("batch_axis", default=None)
_mask: ContextVar[Array | None] = ContextVar("batch_mask", default=None)

partitioned = with_partitioning
"""``partitioned(initializer, (None, "model"))``: the parameter's second axis is split over the mesh axis ``model``."""
unboxed = meta.unbox
"""``unboxed(tree)``: plain arrays in place of the boxes that hold an array and the names of its axes."""


def partition_specs(tree: PyTree) -> PyTree:
    """The names of each array's axes as a ``PartitionSpec``; an empty one for an array without a box."""
    return jax.tree.map(
        lambda spec: spec if isinstance(spec, PartitionSpec) else PartitionSpec(),
        meta.get_partition_spec(tree),
        is_leaf=lambda leaf: leaf is None or isinstance(leaf, PartitionSpec),
    )


@contextlib.contextmanager
def batch_split_over(axis_name: str | None) -> Iterator[None]:
    """Within the traced block, batches are this device's rows of a batch sharded over ``axis_name``, as in `pmap`.

    Layers then average batch statistics over the axis, and their random draws are this device's part of all draws.
    """
    token = _axis.set(axis_name)
    try:
        yield
    finally:
        _axis.reset(token)


def batch_axis() -> str | None:
    """The mapped axis that batches are sharded over here; None if a layer sees the whole batch."""
    return _axis.get()


def is_full(mask: Array) -> bool:
    """Whether all of ``mask`` is known to be 1 while tracing: an array of NumPy, as a data source gives."""
    return isinstance(mask, np.ndarray) and bool(np.all(mask))


@contextlib.contextmanager
def rows_masked(mask: Array) -> Iterator[None]:
    """Within the traced block, rows of a batch with ``mask [batch]`` 0 are padding."""
    token = _mask.set(None if is_full(mask) else mask)
    try:
        yield
    finally:
        _mask.reset(token)


def batch_mask() -> jax.Array | None:
    """Which rows of the batch count, for a model that computes anything across them, while a task traces it.

    `nn.BatchNorm` asks for it itself; Flax's takes it as an argument: ``BatchNorm(…)(x, mask=counts[:, None])``.

    Returns:
        ``[batch]`` bool, False for padding (``Batch.mask`` is 0); None where all rows are known to count.
    """
    mask = _mask.get()
    return None if mask is None else jnp.asarray(mask) > 0


def mean_over_batch_axis(x: jax.Array) -> jax.Array:
    """The mean of ``x`` over the devices that share the batch; ``x`` if the batch is not sharded."""
    axis = batch_axis()
    return x if axis is None else jax.lax.pmean(x, axis)


def rows_of_whole(draw: Callable[[tuple[int, ...]], jax.Array], shape: tuple[int, ...], batch: int = 0) -> jax.Array:
    """This device's rows, along axis ``batch``, of ``draw`` for the whole batch."""
    axis = batch_axis()
    if axis is None or len(shape) <= batch:
        return draw(shape)
    rows = shape[batch]
    whole = draw((*shape[:batch], rows * jax.lax.axis_size(axis), *shape[batch + 1 :]))
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(axis) * rows, rows, batch)


def varying_alike[*Ts](*trees: *Ts) -> tuple[*Ts]:
    """``trees`` of arrays that all vary over the same mesh axes of `jax.shard_map`, as primitives and loops need it."""
    leaves = jax.tree.leaves(trees)
    union: frozenset[Any] = frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in leaves))

    def vary(leaf: Any) -> Any:
        axes = tuple(sorted(union - jax.typeof(leaf).mat.varying))
        return jax.lax.pcast(leaf, axes, to="varying") if axes else leaf

    return jax.tree.map(vary, trees)  # type: ignore[no-any-return]
