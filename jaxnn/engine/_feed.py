"""How training data reach the compiled step: resident on the device, or sent a call's worth at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn.data import padded_indices
from jaxnn.observe import available_bytes, nbytes
from jaxnn.parallel import SINGLE_DEVICE, Layout, broadcast_from_primary
from jaxnn.types import Array, Batch, Examples, Metrics, PyTree, Source, Splits

# The share of a device's free memory that resident data may take: the rest is the step's own.
RESIDENT_SHARE = 0.5
# How many batches are sent at a time if a split is not on the device.
STREAMED_BATCHES = 16

type Piece = tuple[Examples, Any, Any]


class DeviceFeed(NamedTuple):
    """Where the examples of a call come from; all kinds give the same batches.

    Attributes:
        resident: whether the whole split is on the device.
        prepare: ``(step, num_steps) -> Examples`` on the device, called outside the compiled program.
        sample: ``num_steps -> Examples`` shaped like those; costs little, whatever is behind ``prepare``.
        rows: ``(examples, seed, steps [k])`` to what a scan over the steps goes through, traced inside the program;
            the seed may be a tracer.
        batch: ``(examples, one of these) -> Batch``, traced too.
        close: ends what works in the background.
    """

    resident: bool
    prepare: Callable[[int, int], Examples]
    sample: Callable[[int], Examples]
    rows: Callable[[Examples, Array | int, jax.Array], PyTree]
    batch: Callable[[Examples, Any], Batch]
    close: Callable[[], None]


def fits_on_device(*sources: Source, layout: Layout = SINGLE_DEVICE) -> bool:
    """Whether all ``sources`` may lie together on each device of ``layout``; those of a CPU share its memory."""
    device = layout.device
    free = available_bytes(device)
    needed = sum(nbytes(source.examples) for source in sources if source.examples is not None)
    copies = layout.num_devices if device.platform == "cpu" else 1
    return free is None or copies * needed <= RESIDENT_SHARE * free


def make_feed(
    splits: Splits, seed: int, batch_size: int, *, resident: bool | None = None, layout: Layout = SINGLE_DEVICE
) -> DeviceFeed:
    """The feed of the training split: resident if asked for, or if not told otherwise where all splits fit.

    Args:
        splits: the data.
        seed: decides the order.
        batch_size: examples a batch.
        resident: the run option.
        layout: the devices.
    """
    if splits.train.examples is None:
        return streamed_feed(splits.train, seed, batch_size, layout)
    if resident is None:
        resident = broadcast_from_primary(lambda: fits_on_device(*splits.named().values(), layout=layout))
    make = resident_feed if resident else host_feed
    return make(splits.train, seed, batch_size, layout)


def resident_feed(source: Source, seed: int, batch_size: int, layout: Layout = SINGLE_DEVICE) -> DeviceFeed:
    """All examples go to every device once; a batch is gathered there."""
    examples = layout.place(source.examples)
    return DeviceFeed(
        resident=True,
        prepare=lambda step, num_steps: examples,
        sample=lambda num_steps: examples,
        # Whole on every device: computed in parts, they would have to be put together again.
        rows=lambda examples, seed, steps: layout.replicate(source.order(seed, steps, batch_size)),
        batch=lambda examples, indices: source.gather(examples, indices),
        close=_nothing,
    )


def host_feed(source: Source, seed: int, batch_size: int, layout: Layout = SINGLE_DEVICE) -> DeviceFeed:
    """The host gathers the examples of a call in the order of ``seed`` and sends them while the call before runs."""
    own = layout.local_rows(batch_size)

    def prepare(step: int, num_steps: int) -> Examples:
        order = source.order(seed, np.arange(step, step + num_steps, dtype=np.int32), batch_size)
        rows = source.read(np.asarray(order)[:, own].reshape(-1))
        return _send(rows, num_steps, batch_size, layout)

    return _rowwise_feed(source, prepare, lambda num_steps: prepare(0, num_steps), _nothing)


def streamed_feed(source: Any, seed: int, batch_size: int, layout: Layout = SINGLE_DEVICE) -> DeviceFeed:
    """What the source reads, decodes and augments elsewhere is sent while the call before runs."""
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
        rows = Examples(*(np.concatenate(arrays) for arrays in zip(*steps, strict=True)))
        return _send(rows, num_steps, batch_size, layout)

    def sample(num_steps: int) -> Examples:
        rows = source.read(np.arange(own.start, own.stop))
        tiled = Examples(*(np.concatenate([array] * num_steps) for array in rows))
        return _send(tiled, num_steps, batch_size, layout)

    return _rowwise_feed(source, prepare, sample, close)


def _rowwise_feed(
    source: Source,
    prepare: Callable[[int, int], Examples],
    sample: Callable[[int], Examples],
    close: Callable[[], None],
) -> DeviceFeed:
    """Of examples ``[steps, batch, ...]``: a scan goes through them as they come."""
    return DeviceFeed(
        resident=False,
        prepare=prepare,
        sample=sample,
        rows=lambda examples, seed, steps: examples,
        batch=lambda examples, rows: source.as_batch(rows),
        close=close,
    )


def _send(rows: Examples, num_steps: int, batch_size: int, layout: Layout) -> Examples:
    """This process's rows ``[steps * rows, ...]`` on the devices: ``[steps, batch, ...]``."""
    stacked = (array.reshape(num_steps, -1, *array.shape[1:]) for array in rows)
    return Examples(*layout.place_batch(tuple(stacked), batch_size))


def _nothing() -> None:
    """There is nothing in the background."""


def evaluation_pieces(source: Source, batch_size: int, resident: bool, layout: Layout) -> Callable[[], Iterator[Piece]]:
    """A function that goes through ``source``, each example once: examples, indices and mask on the device, in pieces.

    Args:
        source: the split.
        batch_size: examples per batch.
        resident: whether the split is put on the device once, in one piece, or sent again each time.
        layout: the devices.
    """
    indices, mask = padded_indices(source.num_examples, batch_size)
    if resident and source.examples is not None:
        piece = (layout.place(source.examples), layout.place(indices), layout.place(mask))
        return lambda: iter([piece])
    size = min(STREAMED_BATCHES, len(indices))
    padding = [(0, -len(indices) % size), (0, 0)]
    indices, mask = np.pad(indices, padding), np.pad(mask, padding)
    own = layout.local_rows(batch_size)

    def pieces() -> Iterator[Piece]:
        for start in range(0, len(indices), size):
            block = slice(start, start + size)
            rows = source.read(indices[block, own].reshape(-1))
            examples = Examples(*(array.reshape(size, -1, *array.shape[1:]) for array in rows))
            placed, counts = layout.place_batch((examples, mask[block, own]), batch_size)
            yield placed, None, counts

    return pieces


def mean_metrics(sums: list[Metrics], axis: int) -> dict[str, np.ndarray]:
    """The exact mean of each metric over the batches of all pieces, the loss first, in float64.

    Args:
        sums: of each piece, ``[..., batches, *metric]`` with ``axis`` axes before that of the batches.
        axis: that of the batches.
    """
    totals = {key: np.sum([np.sum(part[key], axis, np.float64) for part in sums], axis=0) for key in sums[0]}
    count = totals.pop("count")
    ordered = sorted(totals, key=lambda key: key != "loss")
    # A metric that is an array has more axes than its count.
    return {key: (totals[key].T / count.T).T for key in ordered}
