"""What a layer must know of the batch beyond its inputs: the named axis that it is split over, and which rows count.

Under ``jit`` with shardings a layer sees the whole batch. Where each device computes with its own rows, as under
``jax.pmap``, batch statistics are averaged over the devices, and random draws are this device's part of the draws for
all: `make_train_step(…, axis_name=…)` sets the axis while it traces the loss. A model sees only ``Batch.inputs``:
`tasks.supervised` sets the mask while it traces the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import Array

_axis: ContextVar[str | None] = ContextVar("batch_axis", default=None)
_mask: ContextVar[Array | None] = ContextVar("batch_mask", default=None)


@contextlib.contextmanager
def batch_split_over(axis_name: str | None) -> Iterator[None]:
    """Within the block, which is traced, batches are this device's rows of those split over ``axis_name``."""
    token = _axis.set(axis_name)
    try:
        yield
    finally:
        _axis.reset(token)


def batch_axis() -> str | None:
    """The axis that batches are split over here; None where they are whole."""
    return _axis.get()


def is_full(mask: Array) -> bool:
    """Whether all of ``mask`` is known to be 1 while tracing: an array of NumPy, as a data source gives."""
    return isinstance(mask, np.ndarray) and bool(np.all(mask))


@contextlib.contextmanager
def rows_masked(mask: Array) -> Iterator[None]:
    """Within the block, which is traced, rows of a batch with ``mask [batch]`` 0 are padding."""
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
    """The mean of ``x`` over the devices that share the batch; ``x`` where it is whole."""
    axis = batch_axis()
    return x if axis is None else jax.lax.pmean(x, axis)


def rows_of_whole(draw: Callable[[tuple[int, ...]], jax.Array], shape: tuple[int, ...], batch: int = 0) -> jax.Array:
    """``draw(shape)`` for rows of a whole batch: all of them are drawn, and this device's are taken.

    Args:
        draw: from the shape of the whole to random numbers.
        shape: of this device's part, or of the whole.
        batch: which of its axes is the batch.
    """
    axis = batch_axis()
    if axis is None or len(shape) <= batch:
        return draw(shape)
    rows = shape[batch]
    whole = draw((*shape[:batch], rows * jax.lax.axis_size(axis), *shape[batch + 1 :]))
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(axis) * rows, rows, batch)
