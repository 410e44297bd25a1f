"""What code that is traced may ask of the batch around it: its mapped axis, its sharding and its mask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import intercept_methods

from jaxnn.types import Array, PyTree

type Context = contextlib.AbstractContextManager[Any]
_axis: ContextVar[str | None] = ContextVar("batch_axis", default=None)
_mask: ContextVar[Array | None] = ContextVar("batch_mask", default=None)
_sharding: ContextVar[BatchSharding | None] = ContextVar("batch_sharding", default=None)


@contextlib.contextmanager
def setting[T](variable: ContextVar[T], value: T) -> Iterator[Any]:
    """Context in which ``variable`` has ``value``, which it returns."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def use_batch_axis(axis_name: str | None) -> Context:
    """Context in which a batch is this device's shard of a batch sharded over ``axis_name``, as in `pmap`.

    Layers average batch statistics over the axis and take this device's rows of the full batch's random draws.
    """
    return setting(_axis, axis_name)


def batch_axis() -> str | None:
    """The mapped axis over which batches are sharded here; None if a layer sees the full batch."""
    return _axis.get()


def normal_rows(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal random numbers ``[batch, ...]``; under a mapped batch axis, this device's rows of the full batch's."""
    axis, rows = batch_axis(), shape[0]
    if axis is None:
        return jax.random.normal(key, shape, dtype)
    full = jax.random.normal(key, (rows * jax.lax.axis_size(axis), *shape[1:]), dtype)
    return jax.lax.dynamic_slice_in_dim(full, jax.lax.axis_index(axis) * rows, rows)


class BatchSharding(NamedTuple):
    """How the batch that a model computes on is sharded over devices, in a program that XLA partitions."""

    size: int  # examples; arrays with as many rows are taken to have a batch axis
    constrain: Callable[[jax.Array], jax.Array]  # shards an array ``[batch, ...]`` by rows
    map_rows: Callable[[Callable[..., Any], Sequence[int | None], Any], Callable[..., Any]]  # see `map_rows`


@contextlib.contextmanager
def use_batch_sharding(sharding: BatchSharding) -> Iterator[None]:
    """Context in which the output of each Flax module stays sharded by rows.

    Without it XLA may shard activations as parameters are, by features, and exchange them before every layer.
    """

    def interceptor(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        out = method(*args, **kwargs)
        return shard_rows(out) if context.method_name == "__call__" else out

    with setting(_sharding, sharding), intercept_methods(interceptor):
        yield


def batch_sharding(num_rows: int) -> BatchSharding | None:
    """How ``num_rows`` rows are sharded here; None if batches are not, or if these are not those of whole batches.

    >>> batch_sharding(128) is None  # outside of a task that trains on several devices
    True
    """
    sharding = _sharding.get()
    return None if sharding is None or num_rows % sharding.size else sharding


def sharding_obstacle(num_rows: int) -> str | None:
    """The reason why `map_rows` cannot give each device its rows, of whose library calls XLA would give it all."""
    unknown = batch_sharding(0) is not None and batch_sharding(num_rows) is None
    return "devices share the batch, whose axis is not the first" if unknown else None


def map_rows(
    function: Callable[..., Any], num_rows: int, in_axes: Sequence[int | None], out_axes: Any
) -> Callable[..., Any]:
    """The function as each device runs it on its rows if ``num_rows`` rows are sharded here; otherwise ``function``.

    XLA cannot partition calls to libraries, and would give each device all rows. ``in_axes`` and ``out_axes``, which is
    an int or None for one result, are the batch axes of arguments and results; None for what all devices share.
    """
    if (sharding := batch_sharding(num_rows)) is None:
        return function

    def local(*args: Any) -> Any:
        with setting(_sharding, None):
            return function(*args)

    return sharding.map_rows(local, in_axes, out_axes)


def shard_rows(tree: PyTree) -> PyTree:
    """Shards the arrays ``[batch, ...]`` of ``tree`` by rows if batches are sharded here."""
    sharding = _sharding.get()
    if sharding is None:
        return tree

    def shard(leaf: Any) -> Any:
        has_rows = isinstance(leaf, jax.Array) and leaf.shape[:1] == (sharding.size,)
        return sharding.constrain(leaf) if has_rows else leaf

    return jax.tree.map(shard, tree)


def is_full(mask: Array) -> bool:
    """Whether ``mask`` is known to be all ones at trace time: a NumPy array, as data sources give."""
    return isinstance(mask, np.ndarray) and bool(np.all(mask))


def use_batch_mask(mask: Array) -> Context:
    """Context in which the rows of a batch with ``mask [batch]`` 0 are padding."""
    return setting(_mask, None if is_full(mask) else mask)


def batch_mask() -> jax.Array | None:
    """Returns the rows that are not padding, for models that compute across rows, while a task traces them.

    `nn.BatchNorm` applies it itself; Flax's takes it as an argument: ``BatchNorm(…)(x, mask=counts[:, None])``.

    >>> jn.nn.batch_mask() is None  # outside of a task: no padding
    True

    Returns:
        ``[batch]`` bool, False for padding (``Batch.mask`` is 0); None if no row is padding.
    """
    mask = _mask.get()
    return None if mask is None else jnp.asarray(mask) > 0


def mean_over_batch_axis(x: jax.Array) -> jax.Array:
    """Returns the mean of ``x`` over the devices that share the batch; ``x`` if the batch is not sharded."""
    axis = batch_axis()
    return x if axis is None else jax.lax.pmean(x, axis)
