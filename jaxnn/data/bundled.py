"""scikit-learn's small real data sets, which come with its wheel: nothing is downloaded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxnn.data.arrays import arrays, standardized
from jaxnn.data.checks import check_integer
from jaxnn.data.text.shares import check_share
from jaxnn.types import DataError, Splits


def digits(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """1,797 handwritten digits: inputs float32 ``[8, 8, 1]`` in 0…1, labels 0 … 9.

    Args:
        test_fraction: the share of examples held out as ``test``.
        validation_fraction: the share held out as ``validation``.
        seed: of the shuffle before the split, which keeps the shares of the classes.

    Raises:
        DataError: fractions that leave a split without examples.
    """
    bunch = _load("digits")
    images = (bunch.images[..., None] / 16.0).astype(np.float32)
    names = tuple(str(name) for name in bunch.target_names)
    parts = _split(bunch.target, True, test_fraction, validation_fraction, seed)
    return _splits("digits", images, bunch.target, parts, names)


def iris(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """150 irises: 4 standardised lengths, 3 species. Arguments and errors as of `digits`."""
    return _tabular("iris", test_fraction, validation_fraction, seed)


def wine(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """178 wines: 13 standardised measurements, 3 growers. Arguments and errors as of `digits`."""
    return _tabular("wine", test_fraction, validation_fraction, seed)


def breast_cancer(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """569 tumours: 30 standardised measurements, 2 classes. Arguments and errors as of `digits`."""
    return _tabular("breast_cancer", test_fraction, validation_fraction, seed)


def diabetes(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """442 patients: 10 standardised measurements; regression of the disease's progress in a year.

    Targets are float32 ``[examples]``, raw: from 25 to 346. Arguments and errors as of `digits`.
    """
    return _tabular("diabetes", test_fraction, validation_fraction, seed)


def linnerud(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """20 men: 3 standardised exercises; regression of weight, waist and pulse.

    Targets are float32 ``[examples, 3]``, raw: pounds, inches, beats a minute. Arguments and
    errors as of `digits`.
    """
    return _tabular("linnerud", test_fraction, validation_fraction, seed)


def _load(name: str) -> Any:
    """scikit-learn's bunch of that name."""
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")()


def _tabular(name: str, test_fraction: float, validation_fraction: float, seed: int) -> Splits:
    """A set of rows with standardised inputs: labels where the targets are integers."""
    bunch = _load(name)
    labelled = np.issubdtype(bunch.target.dtype, np.integer)
    names = tuple(str(label) for label in bunch.target_names) if labelled else ()
    parts = _split(bunch.target, labelled, test_fraction, validation_fraction, seed)
    return standardized(_splits(name, bunch.data, bunch.target, parts, names))


def _splits(
    name: str,
    inputs: np.ndarray,
    targets: np.ndarray,
    parts: dict[str, np.ndarray],
    class_names: tuple[str, ...],
) -> Splits:
    """The examples at the indices of each part as a data set."""
    pairs: dict[str, Any] = {split: (inputs[indices], targets[indices]) for split, indices in parts.items()}
    return arrays(**pairs, name=name, class_names=class_names)


def _split(targets: np.ndarray, stratify: bool, test: float, validation: float, seed: int) -> dict[str, np.ndarray]:
    """The indices of each split that is asked for; ``stratify`` keeps the shares of the labels."""
    check_integer("seed", seed, 0)
    from sklearn.model_selection import train_test_split

    parts = {}
    rest = np.arange(len(targets))
    for split, count in _counts(len(targets), test, validation).items():
        labels = targets[rest] if stratify else None
        try:
            rest, parts[split] = train_test_split(rest, test_size=count, random_state=seed, stratify=labels)
        except ValueError as error:
            raise DataError(
                f"{count} of {len(rest)} examples cannot be held out as {split} with seed {seed} "
                f"({error}): choose other fractions or another seed."
            ) from error
    return {"train": rest, **parts}


def _counts(num_examples: int, test: float, validation: float) -> dict[str, int]:
    """How many examples are held out for each split whose fraction is not 0."""
    fractions = {"test": test, "validation": validation}
    for split, fraction in fractions.items():
        check_share(f"{split}_fraction", fraction)
    counts = {split: math.ceil(share * num_examples) for split, share in fractions.items() if share}
    if sum(counts.values()) >= num_examples:
        raise DataError(
            f"test_fraction = {test} and validation_fraction = {validation} leave nothing to train "
            "on: their sum must be below 1."
        )
    return counts
