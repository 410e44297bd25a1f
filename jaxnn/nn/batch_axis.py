"""The named axis that a batch is split over where each device computes with its own rows, as under ``jax.pmap``.

Under ``jit`` with shardings a layer sees the whole batch, and needs none of this. Where it sees its rows alone, what
concerns the whole batch must ask the others: batch statistics are averaged, and random draws are this device's part
of the draws for all. `make_train_step(…, axis_name=…)` says so while it traces the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax

_axis: ContextVar[str | None] = ContextVar("batch_axis", default=None)


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
