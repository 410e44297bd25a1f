"""Exact evaluation of a whole split on the device: a masked tail, sums per batch, added up in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxnn.data import padded_indices
from jaxnn.loop.feed import Placement
from jaxnn.loop.programs import make_evaluate
from jaxnn.observe import Ledger, compile_ahead
from jaxnn.types import Examples, Experiment, Metrics, Source, TrainState

type Evaluator = Callable[[TrainState], dict[str, float]]

# How many batches are sent at a time where a split does not lie on the device.
STREAMED_BATCHES = 16


def make_evaluator(
    experiment: Experiment[Any],
    source: Source,
    state: TrainState,
    *,
    batch_size: int,
    resident: bool,
    ledger: Ledger,
    name: str,
) -> Evaluator:
    """Compiles the evaluation of ``source``.

    Args:
        experiment: whose task evaluates.
        source: the split.
        state: a state of the experiment, for its shapes.
        batch_size: examples a batch.
        resident: whether the split is put on the device once, or sent anew each time.
        ledger: gets the compilation.
        name: the split's name, for the ledger.

    Returns:
        A function from a state to the exact mean of each metric over the split. It waits for the result.
    """
    pieces = evaluation_pieces(source, batch_size, resident)
    program, compilation = compile_ahead(
        make_evaluate(experiment, source), f"evaluate {name}", "start", state, *next(pieces())
    )
    ledger.append(compilation)

    def evaluate(state: TrainState) -> dict[str, float]:
        means = mean_metrics([jax.device_get(program(state, *piece)) for piece in pieces()])
        return {key: float(value) for key, value in means.items()}

    return evaluate


def evaluation_pieces(
    source: Source, batch_size: int, resident: bool, where: Placement = None
) -> Callable[[], Iterator[Piece]]:
    """A function that goes through ``source``, each example once: examples, indices and mask on the device, in pieces.

    Args:
        source: the split.
        batch_size: examples a batch.
        resident: whether the split is put on the device once, in one piece, or sent anew each time.
        where: the devices; default: the first.
    """
    indices, mask = padded_indices(source.num_examples, batch_size)
    blocks = _resident_blocks if resident else _streamed_blocks
    return blocks(source.examples, indices, mask, where)


def mean_metrics(sums: Sequence[Metrics]) -> dict[str, np.ndarray]:
    """The exact mean of each metric from the sums ``[..., batches]`` of all pieces: ``[...]``, the loss first."""
    totals = {key: np.sum([np.sum(part[key], -1, np.float64) for part in sums], axis=0) for key in sums[0]}
    count = totals.pop("count")
    return {key: totals[key] / count for key in sorted(totals, key=lambda key: key != "loss")}


type Piece = tuple[Examples, Any, Any]


def _resident_blocks(
    examples: Examples, indices: np.ndarray, mask: np.ndarray, where: Placement
) -> Callable[[], Iterator[Piece]]:
    piece = jax.device_put((examples, indices, mask), where)
    return lambda: iter([piece])


def _streamed_blocks(
    examples: Examples, indices: np.ndarray, mask: np.ndarray, where: Placement
) -> Callable[[], Iterator[Piece]]:
    size = min(STREAMED_BATCHES, len(indices))
    padding = [(0, -len(indices) % size), (0, 0)]
    indices, mask = np.pad(indices, padding), np.pad(mask, padding)
    local = np.arange(size * indices.shape[1], dtype=np.int32).reshape(size, -1)

    def pieces() -> Iterator[Piece]:
        for start in range(0, len(indices), size):
            rows = indices[start : start + size].reshape(-1)
            block = Examples(*(array[rows] for array in examples))
            yield jax.device_put((block, local, mask[start : start + size]), where)

    return pieces
