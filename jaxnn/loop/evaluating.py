"""Exact evaluation of a whole split on the device: a masked tail, sums per batch, added up in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxnn.data import padded_indices
from jaxnn.loop.programs import make_evaluate
from jaxnn.observe import Ledger, compile_ahead
from jaxnn.parallel import SINGLE, Layout, shardings_of
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
    layout: Layout,
    state_shardings: Any,
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
        layout: the devices.
        state_shardings: where the state lies on them; None for one device.
        ledger: gets the compilation.
        name: the split's name, for the ledger.

    Returns:
        A function from a state to the exact mean of each metric over the split. It waits for the result.
    """
    pieces = evaluation_pieces(source, batch_size, resident, layout)
    function, piece = make_evaluate(experiment, source, layout), next(pieces())
    options: dict[str, Any] = {}
    if state_shardings is not None:
        options = {"in_shardings": (state_shardings, *shardings_of(piece)), "out_shardings": layout.whole}
    program, compilation = compile_ahead(function, f"evaluate {name}", "start", state, *piece, **options)
    ledger.append(compilation)
    finish = experiment.task(experiment.config).finish

    def evaluate(state: TrainState) -> dict[str, float]:
        means = finish(mean_metrics([jax.device_get(program(state, *piece)) for piece in pieces()]))
        return {key: float(value) for key, value in means.items()}

    return evaluate


def evaluation_pieces(
    source: Source, batch_size: int, resident: bool, layout: Layout = SINGLE
) -> Callable[[], Iterator[Piece]]:
    """A function that goes through ``source``, each example once: examples, indices and mask on the device, in pieces.

    Args:
        source: the split.
        batch_size: examples a batch.
        resident: whether the split is put on the device once, in one piece, or sent anew each time.
        layout: the devices.
    """
    indices, mask = padded_indices(source.num_examples, batch_size)
    blocks = _resident_blocks if resident and source.examples is not None else _streamed_blocks
    return blocks(source, indices, mask, layout)


def mean_metrics(sums: Sequence[Metrics]) -> dict[str, np.ndarray]:
    """The exact mean of each metric from the sums ``[..., batches]`` of all pieces: ``[...]``, the loss first."""
    totals = {key: np.sum([np.sum(part[key], -1, np.float64) for part in sums], axis=0) for key in sums[0]}
    count = totals.pop("count")
    return {key: totals[key] / count for key in sorted(totals, key=lambda key: key != "loss")}


type Piece = tuple[Examples, Any, Any]


def _resident_blocks(
    source: Source, indices: np.ndarray, mask: np.ndarray, layout: Layout
) -> Callable[[], Iterator[Piece]]:
    piece = (layout.place(source.examples), layout.place(indices), layout.place(mask))
    return lambda: iter([piece])


def _streamed_blocks(
    source: Source, indices: np.ndarray, mask: np.ndarray, layout: Layout
) -> Callable[[], Iterator[Piece]]:
    batch_size, size = indices.shape[1], min(STREAMED_BATCHES, len(indices))
    padding = [(0, -len(indices) % size), (0, 0)]
    indices, mask = np.pad(indices, padding), np.pad(mask, padding)
    own = layout.process_rows(batch_size)

    def pieces() -> Iterator[Piece]:
        for start in range(0, len(indices), size):
            block = slice(start, start + size)
            rows = source.read(indices[block, own].reshape(-1))
            examples = Examples(*(array.reshape(size, -1, *array.shape[1:]) for array in rows))
            placed, counts = layout.place_rows((examples, mask[block, own]), batch_size)
            yield placed, None, counts

    return pieces
