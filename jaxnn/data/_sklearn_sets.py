"""scikit-learn's small real data sets, which are part of its wheel: nothing is downloaded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxnn.data._arrays import arrays, check_shares, standardized
from jaxnn.types import DataError, Splits


def digits(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """1,797 handwritten digits: inputs float32 ``[8, 8, 1]`` in 0…1, labels 0 … 9.

    ``test_fraction`` and ``validation_fraction`` are the shares of examples held out; ``seed`` is that of the shuffle
    before the split, which keeps the shares of the classes. DataError for fractions that leave a split empty.
    """
    return _bundled("digits", test_fraction, validation_fraction, seed)


def iris(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """150 irises: 4 standardized lengths, 3 species. Arguments and errors as of `digits`."""
    return standardized(_bundled("iris", test_fraction, validation_fraction, seed))


def wine(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """178 wines: 13 standardized measurements, 3 growers. Arguments and errors as of `digits`."""
    return standardized(_bundled("wine", test_fraction, validation_fraction, seed))


def breast_cancer(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """569 tumours: 30 standardized measurements, 2 classes. Arguments and errors as of `digits`."""
    return standardized(_bundled("breast_cancer", test_fraction, validation_fraction, seed))


def diabetes(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """442 patients: 10 standardized measurements; regression of the disease's progress in a year.

    Targets are float32 ``[examples]``, raw: from 25 to 346. Arguments and errors as of `digits`.
    """
    return standardized(_bundled("diabetes", test_fraction, validation_fraction, seed))


def linnerud(test_fraction: float = 0.2, validation_fraction: float = 0.0, seed: int = 0) -> Splits:
    """20 men: 3 standardized exercises; regression of weight, waist and pulse.

    Targets are float32 ``[examples, 3]``, raw: pounds, inches, beats per minute. Arguments and errors as of `digits`.
    """
    return standardized(_bundled("linnerud", test_fraction, validation_fraction, seed))


def _bundled(name: str, test: float, validation: float, seed: int) -> Splits:
    """scikit-learn's set of that name, split; classes keep their shares."""
    check_shares({"test_fraction": test, "validation_fraction": validation}, seed)
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    bunch = getattr(datasets, f"load_{name}")()
    inputs, targets = bunch.data, bunch.target
    if name == "digits":
        inputs = (bunch.images[..., None] / 16.0).astype(np.float32)
    has_labels = np.issubdtype(targets.dtype, np.integer)
    shares = {"test": test, "validation": validation}
    counts = {split: math.ceil(share * len(targets)) for split, share in shares.items() if share}
    if sum(counts.values()) >= len(targets):
        raise DataError(
            f"test_fraction = {test} and validation_fraction = {validation} leave nothing to train on: their sum must "
            "be below 1."
        )
    parts, rest = {}, np.arange(len(targets))
    for split, count in counts.items():
        labels = targets[rest] if has_labels else None
        try:
            rest, parts[split] = train_test_split(rest, test_size=count, random_state=seed, stratify=labels)
        except ValueError as error:
            raise DataError(
                f"{count} of {len(rest)} examples cannot be held out as {split} with seed {seed} ({error}): choose "
                "other fractions or another seed."
            ) from error
    pairs: dict[str, Any] = {split: (inputs[part], targets[part]) for split, part in {"train": rest, **parts}.items()}
    class_names = tuple(str(label) for label in bunch.target_names) if has_labels else ()
    return arrays(**pairs, name=name, class_names=class_names)
