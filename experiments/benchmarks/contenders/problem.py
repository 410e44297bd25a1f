"""The problem of a contender, read from a folder."""

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
    """The contender, its device and dtype; ``note`` records remarks on its results."""

    contender: str
    device: str
    dtype: str
    note: Callable[[str], None]


def read(folder: Path) -> Problem:
    """Reads spec.json, inputs.npy, targets.npy and weights.npz."""
    spec = json.loads((folder / "spec.json").read_text())
    inputs, targets = np.load(folder / "inputs.npy"), np.load(folder / "targets.npy")
    with np.load(folder / "weights.npz") as weights:
        return Problem(**spec, inputs=inputs, targets=targets, weights=dict(weights))


def orders(num_examples: int) -> Iterator[np.ndarray]:
    """Yields the order of the examples in each epoch: unchanged, then shuffled."""
    order = np.arange(num_examples)
    generator = np.random.default_rng(0)
    while True:
        yield order
        order = generator.permutation(num_examples)
