"""Exact evaluation of a whole split on the device: a masked tail, sums per batch, added up in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxnn.data import padded_indices
from jaxnn.loop.programs import make_evaluate
from jaxnn.observe import Ledger, compile_ahead
from jaxnn.parallel import SINGLE_DEVICE, Layout, shardings_of
from jaxnn.types import ConfigError, Examples, Experiment, Metrics, Source, Task, TrainState

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
        options = {"in_shardings": (state_shardings, *shardings_of(piece)), "out_shardings": layout.replicated}
    program, compilation = compile_ahead(function, f"evaluate {name}", "start", state, *piece, **options)
    ledger.append(compilation)
    task = experiment.task(experiment.config)

    def evaluate(state: TrainState) -> dict[str, float]:
        return finished(task, mean_metrics([jax.device_get(program(state, *piece)) for piece in pieces()]))

    return evaluate


def finished(task: Task, means: dict[str, Any], what: str = "the means ") -> dict[str, float]:
    """What ``task.finish`` makes of the mean of each metric, numbers or arrays: the numbers that are reported.

    Args:
        task: whose ``finish`` it is.
        means: of each metric.
        what: what these are, for errors.

    Raises:
        ConfigError: it raises, or gives something else than numbers.
    """
    try:
        values: Any = task.finish(means)
    # The user's own code: whatever it raises, only the user can change it.
    except Exception as error:
        given = ", ".join(f"{name} {list(np.shape(mean))}" if np.ndim(mean) else name for name, mean in means.items())
        text = (str(error).splitlines() or [""])[0]
        # A key that is not there is another mistake than a number that cannot be taken.
        of_numbers = isinstance(error, ArithmeticError | ValueError)
        advice = "; let it take any numbers, as NumPy's functions do" if of_numbers else ""
        raise ConfigError(
            f"the task's finish failed on {what}of {given}: {type(error).__name__}: {text}{advice}."
        ) from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"the task's finish gave a {type(values).__name__}: return a dict of numbers from finish.")
    return {str(name): _number(name, value) for name, value in values.items()}


def evaluation_pieces(
    source: Source, batch_size: int, resident: bool, layout: Layout = SINGLE_DEVICE
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


def mean_metrics(sums: Sequence[Metrics], axis: int = 0) -> dict[str, np.ndarray]:
    """The exact mean of each metric over the batches of all pieces, the loss first.

    Args:
        sums: of each piece, ``[..., batches, *metric]``, where ``...`` are ``axis`` axes.
        axis: that of the batches.

    Returns:
        ``[..., *metric]`` float64 each.
    """
    totals = {key: np.sum([np.sum(part[key], axis, np.float64) for part in sums], axis=0) for key in sums[0]}
    count = totals.pop("count")
    ordered = sorted(totals, key=lambda key: key != "loss")
    # A metric that is an array has more axes than its count.
    return {key: (totals[key].T / count.T).T for key in ordered}


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
    own = layout.local_rows(batch_size)

    def pieces() -> Iterator[Piece]:
        for start in range(0, len(indices), size):
            block = slice(start, start + size)
            rows = source.read(indices[block, own].reshape(-1))
            examples = Examples(*(array.reshape(size, -1, *array.shape[1:]) for array in rows))
            placed, counts = layout.place_batch((examples, mask[block, own]), batch_size)
            yield placed, None, counts

    return pieces


def _number(name: str, value: Any) -> float:
    shape = np.shape(value)
    try:
        if shape == ():
            return float(value)
    except (TypeError, ValueError):
        pass
    given = f"an array of shape {shape}" if shape else f"{value!r}"
    raise ConfigError(f"the metric {name!r} of the task is {given} in the end: return numbers from finish.")
