"""How training data reach the compiled step: resident on the device, or sent a call's worth at a time."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxnn._text import format_bytes
from jaxnn.data import padded_indices
from jaxnn.observe import available_bytes, nbytes
from jaxnn.parallel import SINGLE_DEVICE, Layout, broadcast_from_primary
from jaxnn.types import Array, Batch, Examples, PyTree, Source, Splits, TrainingError

# The share of a device's free memory that resident data may take: the step needs the rest.
RESIDENT_SHARE = 0.5
# How many batches are sent at a time if a split is not on the device.
STREAMED_BATCHES = 16

type Piece = tuple[Examples, Any, Any, Any]


class DeviceFeed(NamedTuple):
    """The source of the examples of a call; all feeds return the same batches."""

    resident: bool  # whether the whole split is on the device
    # ``(step, num_steps) -> Examples`` on the device, called outside the compiled program.
    prepare: Callable[[int, int], Examples]
    sample: Callable[[int], Examples]  # ``num_steps -> Examples`` of the same shapes, at little cost
    # ``(examples, row) -> Batch``, traced inside the program; ``row`` is one of ``rows``.
    batch: Callable[[Examples, Any], Batch]
    # ``(examples, seed, steps [k])`` to the inputs of a scan over the steps, traced too; the seed may be a tracer.
    # Default: examples ``[steps, batch, ...]`` as they are.
    rows: Callable[[Examples, Array | int, jax.Array], PyTree] = lambda examples, seed, steps: examples
    close: Callable[[], None] = lambda: None  # stops background workers


def make_feed(
    splits: Splits, seed: int, batch_size: int, *, resident: bool | None = None, layout: Layout = SINGLE_DEVICE
) -> DeviceFeed:
    """The feed of the training split in the order of ``seed``; resident by default if all splits fit on the device."""
    if splits.train.examples is None:
        return _streamed_feed(splits.train, seed, batch_size, layout)
    if not jax.tree.leaves(splits.train.examples):  # generated there
        resident = True
    # The devices of a CPU share its memory.
    copies = layout.num_devices if layout.platform == "cpu" else 1
    needed = copies * sum(nbytes(one.examples) for one in splits.named().values() if one.examples is not None)
    free = broadcast_from_primary(lambda: None if layout.abstract else available_bytes(layout.device))
    if resident is None:
        resident = free is None or needed <= RESIDENT_SHARE * free
    elif resident and free is not None and needed > free and (copies > 1 or layout.platform != "cpu"):
        # One CPU device may use the arrays of the host as they are.
        raise TrainingError(
            f"resident data take {format_bytes(needed)}, and {format_bytes(free)} are free: leave resident at None to "
            "send a call's batches at a time."
        )
    make = _resident_feed if resident else _host_feed
    return make(splits.train, seed, batch_size, layout)


def _resident_feed(source: Source, seed: int, batch_size: int, layout: Layout) -> DeviceFeed:
    """All examples are sent to every device once; a batch is gathered there."""
    examples = layout.place(source.examples)
    return DeviceFeed(
        resident=True,
        prepare=lambda step, num_steps: examples,
        sample=lambda num_steps: examples,
        batch=lambda examples, indices: source.gather(examples, indices),
        # Replicated: an order computed in parts would have to be gathered again.
        rows=lambda examples, seed, steps: layout.constrain(source.order(seed, steps, batch_size), PartitionSpec()),
    )


def _host_feed(source: Source, seed: int, batch_size: int, layout: Layout) -> DeviceFeed:
    """The host gathers the examples of a call and sends them while the previous call runs."""
    own = layout.local_rows(batch_size)

    def prepare(step: int, num_steps: int) -> Examples:
        order = source.order(seed, np.arange(step, step + num_steps, dtype=np.int32), batch_size)
        rows = source.read(np.asarray(order)[:, own].reshape(-1))
        return _send(rows, num_steps, batch_size, layout)

    return DeviceFeed(False, prepare, lambda num_steps: prepare(0, num_steps), lambda _, rows: source.as_batch(rows))


def _streamed_feed(source: Any, seed: int, batch_size: int, layout: Layout) -> DeviceFeed:
    """Examples that worker processes read and decode are sent while the previous call runs."""
    own = layout.local_rows(batch_size)
    batches: Iterator[Examples] = iter(())
    next_step = -1

    def close() -> None:
        nonlocal next_step
        next_step = -1
        if hasattr(batches, "close"):
            batches.close()

    def prepare(step: int, num_steps: int) -> Examples:
        nonlocal batches, next_step
        if step != next_step:
            close()
            batches = source.batches(seed, step, batch_size, own)
        steps = [next(batches) for _ in range(num_steps)]
        next_step = step + num_steps
        return _send(jax.tree.map(lambda *arrays: np.concatenate(arrays), *steps), num_steps, batch_size, layout)

    def sample(num_steps: int) -> Examples:
        one_step = source.read(np.arange(own.start, own.stop))
        rows = jax.tree.map(lambda array: np.concatenate([array] * num_steps), one_step)
        return _send(rows, num_steps, batch_size, layout)

    return DeviceFeed(False, prepare, sample, lambda _, rows: source.as_batch(rows), close=close)


def _send(rows: Examples, num_steps: int, batch_size: int, layout: Layout) -> Examples:
    """This process's rows ``[steps * rows, ...]`` on the devices: ``[steps, batch, ...]``."""
    stacked = jax.tree.map(lambda array: array.reshape(num_steps, -1, *array.shape[1:]), rows)
    return layout.place_batch(stacked, batch_size)  # type: ignore[no-any-return]


def evaluation_pieces(
    source: Source, num_examples: int, batch_size: int, resident: bool, layout: Layout
) -> Callable[[], Iterator[Piece]]:
    """Returns a function that iterates over ``num_examples`` of ``source``, evenly spaced, in pieces on the device.

    A piece has examples, indices, mask, and the numbers of its batches. A ``resident`` split is put on the device once,
    in one piece; others are sent again each time.
    """
    indices, mask = padded_indices(num_examples, batch_size)
    indices = (indices.astype(np.int64) * source.num_examples // num_examples).astype(np.int32)
    if resident and source.examples is not None:
        numbers = np.arange(len(indices), dtype=np.int32)
        piece = (layout.place(source.examples), *layout.place((indices, mask, numbers)))
        return lambda: iter([piece])
    size = min(STREAMED_BATCHES, len(indices))
    padding = [(0, -len(indices) % size), (0, 0)]
    indices, mask = np.pad(indices, padding), np.pad(mask, padding)
    own = layout.local_rows(batch_size)

    def pieces() -> Iterator[Piece]:
        for start in range(0, len(indices), size):
            block = slice(start, start + size)
            examples = _send(source.read(indices[block, own].reshape(-1)), size, batch_size, layout)
            numbers = layout.place(np.arange(start, start + size, dtype=np.int32))
            yield examples, None, layout.place_batch(mask[block, own], batch_size), numbers

    return pieces
