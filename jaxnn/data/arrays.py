"""Arrays become a data set, and a data set a standardised or an augmented one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxnn.data.augment import chain
from jaxnn.data.checks import as_examples, check_alike, check_class_names, check_integer, check_label_range
from jaxnn.data.shuffle import steps_per_epoch
from jaxnn.data.source import ArraySource, Augmentation
from jaxnn.types import DataError, Examples, Source, Splits


def arrays(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    name: str = "arrays",
    class_names: Sequence[str] = (),
    num_classes: int | None = None,
) -> Splits:
    """The user's own arrays as a data set, checked here once and for all.

    Each split is a pair ``(inputs [examples, ...], targets [examples, ...])`` of array-likes.
    Integer targets are labels ``0 … num_classes - 1``; targets to regress are floats. Inputs of
    dtype uint8 stay uint8 and are scaled to 0…1 a batch at a time; other integers become int32
    and are left as they are (tokens); floats become float32; booleans float32 as inputs and int32
    as targets. Arrays that need no conversion are not copied.

    Args:
        train: what is trained on.
        test: what is held out to the end, or None.
        validation: what is looked at while training, or None.
        name: the data set's name, for reports.
        class_names: one name a class.
        num_classes: how many labels there are; by default as many as ``class_names``. If there are
            neither, integer targets may be anything: the task checks what it learns from.

    Raises:
        DataError: not a pair, lengths that differ, an empty split, NaN or infinity, a dtype that
            is no number, an integer beyond int32, a label out of range, splits that are unlike
            each other, ``class_names`` that are not ``num_classes``.
    """
    class_names = tuple(class_names)
    check_class_names(class_names, num_classes)
    pairs = {"train": train, "validation": validation, "test": test}
    given = {split: pair for split, pair in pairs.items() if pair is not None or split == "train"}
    examples = {split: as_examples(split, pair) for split, pair in given.items()}
    check_alike(examples)
    for split, (_, targets) in examples.items():
        known = num_classes or len(class_names) or None
        if known and np.issubdtype(targets.dtype, np.integer):
            check_label_range(split, np.asarray(targets), known)
        elif known:
            raise DataError(
                f"the targets of {split} are {targets.dtype} {targets.shape[1:]} an example, and there are {known} "
                "classes: give integer labels, of one-hot rows targets.argmax(axis=-1), or leave the classes out."
            )
    sources = {split: ArraySource(found) for split, found in examples.items()}
    return Splits(**sources, name=name, class_names=class_names)


def hold_out(
    pair: tuple[np.ndarray, np.ndarray], num_validation: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray] | None]:
    """The training pair without its last ``num_validation`` examples, and these (None if 0).

    Raises:
        DataError: ``num_validation`` is no integer, is negative or leaves nothing to train on.
    """
    if isinstance(num_validation, float) and 0 < num_validation < 1:
        raise DataError(
            f"num_validation counts examples and is no share: {num_validation} of {len(pair[0])} training examples are "
            f"{round(num_validation * len(pair[0]))}."
        )
    check_integer("num_validation", num_validation, 0)
    num_train = len(pair[0]) - num_validation
    if num_train < 1:
        raise DataError(
            f"num_validation = {num_validation} of {len(pair[0])} training examples cannot be held "
            f"out: give 0 to {len(pair[0]) - 1}."
        )
    if num_validation == 0:
        return pair, None
    inputs, targets = pair
    return (inputs[:num_train], targets[:num_train]), (inputs[num_train:], targets[num_train:])


def augmented(splits: Splits, *augmentations: Augmentation) -> Splits:
    """The data set with its training inputs augmented, after any augmentation they had before.

    Args:
        splits: a data set of `ArraySource`.
        augmentations: such as ``augment.flip()``, applied in this order.

    Raises:
        DataError: the training split is another kind of source.
    """
    train = _array_source(splits.train)
    before = () if train.augment is None else (train.augment,)
    augment = chain(*before, *augmentations)
    return splits._replace(train=dataclasses.replace(train, augment=augment))


def standardized(splits: Splits) -> Splits:
    """The data set with each column of its inputs at mean 0 and variance 1 over ``train``.

    A column is one number of an example, over all examples. The other splits are moved and scaled
    by the figures of ``train``; a column that is constant there becomes 0 in all of them.

    Raises:
        DataError: inputs that are not floats, or a source that is no `ArraySource`.
    """
    inputs = np.asarray(_array_source(splits.train).examples.inputs)
    if not np.issubdtype(inputs.dtype, np.floating):
        raise DataError(f"inputs of dtype {inputs.dtype} cannot be standardized: give float inputs to arrays().")
    mean = inputs.mean(axis=0, dtype=np.float64)
    deviation = inputs.std(axis=0, dtype=np.float64)
    varies = inputs.max(axis=0) > inputs.min(axis=0)
    scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=varies)

    def apply(source: Source) -> Source:
        source = _array_source(source)
        scaled = ((np.asarray(source.examples.inputs) - mean) * scale).astype(np.float32)
        return dataclasses.replace(source, examples=Examples(scaled, source.examples.targets))

    changed: dict[str, Any] = {name: apply(source) for name, source in splits.named().items()}
    return splits._replace(**changed)


def check_batch_size(source: Source, batch_size: int) -> None:
    """Raises DataError if a batch is larger than the set, or holds nothing."""
    steps_per_epoch(source.num_examples, batch_size)


def check_labels(splits: Splits, num_classes: int, *, ignore: int | None = None) -> None:
    """Checks that all targets are labels that a model with ``num_classes`` outputs can learn, or ``ignore``.

    Raises:
        DataError: targets that are not integers, or a label out of range; it is named.
    """
    for split, source in splits.named().items():
        targets = np.asarray(source.targets)
        if not np.issubdtype(targets.dtype, np.integer):
            raise DataError(
                f"the targets of {split} are {targets.dtype}, but classes are learned from integer "
                "labels: convert them, or use a task of regression."
            )
        if targets.min(initial=0) >= 0 and targets.max(initial=0) < num_classes:
            continue
        if ignore is not None:
            targets = np.where(targets == ignore, 0, targets)
        check_label_range(split, targets, num_classes, may_be_none=False)


def _array_source(source: Source) -> ArraySource:
    """The source itself if it is of arrays, else DataError."""
    if not isinstance(source, ArraySource):
        raise DataError(
            f"a {type(source).__name__} cannot be changed here, only an ArraySource as arrays() "
            "makes: prepare other sources before they are given to Splits."
        )
    return source
