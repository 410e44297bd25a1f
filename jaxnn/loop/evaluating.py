"""Exact evaluation of a whole split on the device: a masked tail, sums per batch, added up in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxnn.data import padded_indices
from jaxnn.loop.programs import make_evaluate
from jaxnn.observe import Ledger, compile_ahead
from jaxnn.types import Examples, Experiment, Source, TrainState

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
    indices, mask = padded_indices(source.num_examples, batch_size)
    blocks = _resident_blocks if resident else _streamed_blocks
    pieces = blocks(source.examples, indices, mask)
    program, compilation = compile_ahead(
        make_evaluate(experiment, source), f"evaluate {name}", "start", state, *next(pieces())
    )
    ledger.append(compilation)

    def evaluate(state: TrainState) -> dict[str, float]:
        sums = [jax.device_get(program(state, *piece)) for piece in pieces()]
        totals = {key: sum(float(part[key].sum(dtype=np.float64)) for part in sums) for key in sums[0]}
        count = totals.pop("count")
        return {key: totals[key] / count for key in sorted(totals, key=lambda key: key != "loss")}

    return evaluate


type Piece = tuple[Examples, Any, Any]


def _resident_blocks(examples: Examples, indices: np.ndarray, mask: np.ndarray) -> Callable[[], Iterator[Piece]]:
    piece = jax.device_put((examples, indices, mask))
    return lambda: iter([piece])


def _streamed_blocks(examples: Examples, indices: np.ndarray, mask: np.ndarray) -> Callable[[], Iterator[Piece]]:
    size = min(STREAMED_BATCHES, len(indices))
    padding = [(0, -len(indices) % size), (0, 0)]
    indices, mask = np.pad(indices, padding), np.pad(mask, padding)
    local = np.arange(size * indices.shape[1], dtype=np.int32).reshape(size, -1)

    def pieces() -> Iterator[Piece]:
        for start in range(0, len(indices), size):
            rows = indices[start : start + size].reshape(-1)
            block = Examples(*(array[rows] for array in examples))
            yield jax.device_put((block, local, mask[start : start + size]))

    return pieces
