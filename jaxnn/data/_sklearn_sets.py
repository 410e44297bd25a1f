"""Small real data sets that are part of scikit-learn: nothing is downloaded."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data._arrays import arrays, check_fractions, standardize
from jaxnn.types import DataError, Splits


def digits(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """1,797 handwritten digits: inputs float32 ``[8, 8, 1]`` in 0…1, labels 0 … 9.

    ``test_fraction`` and ``validation_fraction`` of the examples become those splits, after a shuffle by ``seed``,
    stratified by class. Raises DataError for fractions that leave a split empty.

    >>> jn.data.digits(validation_fraction=0.1)
    Splits(digits: 1,257 train, 180 validation, 360 test, inputs float32 [8, 8, 1], 10 classes)
    """
    return _bundled("digits", test_fraction, validation_fraction, seed)


def iris(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """150 irises: 4 standardized lengths, 3 species. Arguments and errors as for `digits`.

    >>> jn.data.iris()
    Splits(iris: 120 train, 30 test, inputs float32 [4], 3 classes)
    """
    return standardize(_bundled("iris", test_fraction, validation_fraction, seed))


def wine(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """178 wines: 13 standardized measurements, 3 growers. Arguments and errors as for `digits`.

    >>> jn.data.wine()
    Splits(wine: 142 train, 36 test, inputs float32 [13], 3 classes)
    """
    return standardize(_bundled("wine", test_fraction, validation_fraction, seed))


def breast_cancer(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """569 tumours: 30 standardized measurements, 2 classes. Arguments and errors as for `digits`.

    >>> jn.data.breast_cancer().class_names
    ('malignant', 'benign')
    """
    return standardize(_bundled("breast_cancer", test_fraction, validation_fraction, seed))


def diabetes(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """442 patients: 10 standardized measurements; regression of the disease's progress in a year.

    Targets are float32 ``[examples]``, raw: from 25 to 346. Arguments and errors as for `digits`.

    >>> jn.data.diabetes()
    Splits(diabetes: 353 train, 89 test, inputs float32 [10])
    """
    return standardize(_bundled("diabetes", test_fraction, validation_fraction, seed))


def _bundled(name: str, test: float, validation: float, seed: int) -> Splits:
    """Loads a data set of scikit-learn and splits it, stratified by class."""
    check_fractions({"test_fraction": test, "validation_fraction": validation}, seed)
    names: tuple[str, ...] = tuple("0123456789")
    if name == "digits":  # read from their file: importing scikit-learn takes a second
        files: Any = importlib.util.find_spec("sklearn")
        rows = np.loadtxt(Path(files.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
        inputs, targets = (rows[:, :-1].reshape(-1, 8, 8, 1) / 16.0).astype(np.float32), rows[:, -1].astype(np.int64)
    else:
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{name}")()
        inputs, targets, names = bunch.data, bunch.target, tuple(map(str, bunch.get("target_names", ())))
    has_labels = np.issubdtype(targets.dtype, np.integer)
    fractions = {"test": test, "validation": validation}
    counts = {split: math.ceil(fraction * len(targets)) for split, fraction in fractions.items() if fraction}
    if sum(counts.values()) >= len(targets):
        raise DataError(
            f"test_fraction {test} and validation_fraction {validation} leave nothing to train on: lower them."
        )
    pairs: dict[str, Any] = {}
    rest = np.arange(len(targets))
    for split, count in counts.items():
        rest, part = _split_off(rest, targets[rest] if has_labels else None, count, split, seed)
        pairs[split] = inputs[part], targets[part]
    return arrays((inputs[rest], targets[rest]), **pairs, name=name, class_names=names if has_labels else ())


def _split_off(
    rows: np.ndarray, labels: np.ndarray | None, count: int, split: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the remaining rows and ``count`` rows for ``split``, the same as scikit-learn's ``train_test_split``."""
    random = np.random.RandomState(seed)
    if labels is None:
        order = random.permutation(len(rows))
        return rows[order[count:]], rows[order[:count]]
    sizes = np.bincount(labels)
    if min(sizes) < 2 or min(count, len(rows) - count) < len(sizes):
        raise DataError(
            f"a {split} split of {count} of {len(rows)} examples cannot be stratified by {len(sizes)} classes: choose "
            "other fractions or another seed."
        )
    kept_counts = _class_counts(sizes, len(rows) - count, random)
    taken_counts = _class_counts(sizes - kept_counts, count, random)
    kept, taken = [], []
    for label, size in enumerate(sizes):
        members = np.flatnonzero(labels == label)[random.permutation(size)]
        kept.append(members[: kept_counts[label]])
        taken.append(members[kept_counts[label] :][: taken_counts[label]])
    return rows[random.permutation(np.concatenate(kept))], rows[random.permutation(np.concatenate(taken))]


def _class_counts(sizes: np.ndarray, count: int, random: np.random.RandomState) -> np.ndarray:
    """Returns the number of examples of each class among ``count``: proportional, rounded, with ties drawn."""
    exact = sizes / sizes.sum() * count
    counts: np.ndarray = np.floor(exact).astype(int)
    remainders = exact - counts
    missing = count - counts.sum()
    for remainder in np.unique(remainders)[::-1]:
        (ties,) = np.nonzero(remainders == remainder)
        drawn = random.choice(ties, min(len(ties), missing), replace=False) if missing > 0 else ties[:0]
        counts[drawn] += 1
        missing -= len(drawn)
    return counts
