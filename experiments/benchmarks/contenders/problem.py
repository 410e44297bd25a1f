"""What a contender is given, read from a problem's folder."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network, its initial weights by Flax path ("Dense_0/kernel"), and examples in the order of training."""

    network: str
    batch_size: int
    learning_rate: float
    num_batches: int
    inputs: np.ndarray
    targets: np.ndarray
    weights: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Options:
    """Which contender runs where; ``note`` takes what a reader of its figures should know."""

    contender: str
    device: str
    dtype: str
    note: Callable[[str], None]


def read(folder: Path) -> Problem:
    """The problem of a folder: spec.json, inputs.npy, targets.npy and weights.npz."""
    spec = json.loads((folder / "spec.json").read_text())
    inputs, targets = np.load(folder / "inputs.npy"), np.load(folder / "targets.npy")
    with np.load(folder / "weights.npz") as weights:
        return Problem(**spec, inputs=inputs, targets=targets, weights=dict(weights))


def orders(num_examples: int) -> Iterator[np.ndarray]:
    """The order of the examples in each pass over them: as they are, then shuffled."""
    order = np.arange(num_examples)
    generator = np.random.default_rng(0)
    while True:
        yield order
        order = generator.permutation(num_examples)
