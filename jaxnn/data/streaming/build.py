"""Readers become a data set: what is known of them before their examples are read is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxnn.data.checks import as_examples, check_class_names, check_label_range
from jaxnn.data.streaming.pipeline import check_installed, cores
from jaxnn.data.streaming.reading import HostAugmentation, Reader, Reading, check_like
from jaxnn.data.streaming.source import StreamSource
from jaxnn.types import ConfigError, DataError, Examples, Splits

# Each takes some 220 MB of memory, half of it its own.
_MOST_WORKERS = 8


def stream(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    name: str = "stream",
    class_names: Sequence[str] = (),
    num_classes: int | None = None,
    augment: HostAugmentation | None = None,
    num_workers: int | None = None,
) -> Splits:
    """Examples that do not fit in memory as a data set: read and augmented by Grain while the device computes.

    Each split is a reader: any object with ``__len__`` and ``__getitem__(index) -> (input, target)``, such as a
    map-style ``Dataset`` of PyTorch or a ``RandomAccessDataSource`` of Grain. All inputs have one shape and dtype, and
    so have all targets; dtypes become those that `jaxnn.data.arrays` makes. A reader gives the same pair each time, is
    called in several threads, and is sent to worker processes, which open no accelerator: it opens files and
    connections where it uses them. It may also have ``targets`` and ``fingerprint``, see
    `jaxnn.data.streaming.reading.Reader`.

    A step's batch is a function of the seed and the step, whatever the number of workers and of processes.

    Args:
        train: what is trained on.
        test: what is held out to the end, or None.
        validation: what is looked at while training, or None.
        name: the data set's name, for reports.
        class_names: one name a class.
        num_classes: how many labels there are; by default as many as ``class_names``, and if there are none, labels
            need only be at least 0.
        augment: ``(rng, input) -> input`` for each training example: an input of the same shape and dtype, random by
            ``rng`` alone, a `numpy.random.Generator` that is a function of the seed, the step and the example's place
            in the batch.
        num_workers: how many processes read training batches; 0: threads of this process do, which is enough for
            readers that spend their time in C. By default one a CPU but one, at least 1 and at most 8. Evaluation is
            read in threads.

    Raises:
        ConfigError: Grain is not installed, or a bad ``num_workers``.
        DataError: no reader, an empty one, splits that are unlike each other, ``class_names`` that are not
            ``num_classes``, a label out of range, an example 0 that cannot be read or used.
    """
    check_installed()
    workers = _checked_workers(num_workers)
    class_names = tuple(class_names)
    check_class_names(class_names, num_classes)
    readers = {"train": train, "validation": validation, "test": test}
    given = {split: reader for split, reader in readers.items() if reader is not None or split == "train"}
    sources = {
        split: _source(
            Reading(_checked_reader(split, reader), split, num_classes or len(class_names) or None),
            workers,
            augment if split == "train" else None,
        )
        for split, reader in given.items()
    }
    for source in sources.values():
        _check_alike(sources["train"], source)
    return Splits(**sources, name=name, class_names=class_names)


def _checked_workers(num_workers: int | None) -> int:
    """How many worker processes there shall be."""
    if num_workers is None:
        return min(max(cores() - 1, 1), _MOST_WORKERS)
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ConfigError(f"num_workers must be an integer of at least 0, not {num_workers!r}.")
    return num_workers


def _checked_reader(split: str, reader: Any) -> Reader:
    """``reader`` if it has what a reader must have."""
    if isinstance(reader, tuple) and all(hasattr(item, "shape") for item in reader):
        raise DataError(f"{split} is a tuple of arrays, which lie in memory: use jn.data.arrays.")
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(reader, method)]
    if missing:
        raise DataError(
            f"{split} must be a reader with __len__ and __getitem__(index) -> (input, target), but the "
            f"{type(reader).__name__} has no {' and no '.join(missing)}: give random access to its examples."
        )
    if len(reader) == 0:
        raise DataError(f"{split} is empty: its reader's length is 0.")
    known: Reader = reader
    return known


def _source(reading: Reading, num_workers: int, augment: HostAugmentation | None) -> StreamSource:
    """The split of one reader."""
    first = reading.example(0)
    targets = _targets(reading, first)
    return StreamSource(reading, first, targets, num_workers, host_augment=augment)


def _targets(reading: Reading, first: Examples) -> np.ndarray:
    """The targets that the reader lists, checked; else that of the first example."""
    listed = getattr(reading.reader, "targets", None)
    if listed is None:
        return np.asarray(first.targets)[None]
    split = reading.split
    targets = np.asarray(as_examples(split, (np.arange(len(reading.reader)), listed)).targets)
    check_like(
        f"the first of the targets that {split} lists", targets[0], "that of example 0", np.asarray(first.targets)
    )
    if reading.num_classes is not None and np.issubdtype(targets.dtype, np.integer):
        check_label_range(split, targets, reading.num_classes)
    return targets


def _check_alike(train: StreamSource, other: StreamSource) -> None:
    """Raises DataError if the examples of two splits differ in shape or dtype."""
    for what, array, model in zip(("input", "target"), other.like, train.like, strict=True):
        where = f"the {what} of {other.reading.name(0)}"
        check_like(where, np.asarray(array), f"that of {train.reading.name(0)}", np.asarray(model))
