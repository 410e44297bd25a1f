"""Texts and their labels become a data set whose vocabulary is that of its training texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from jaxnn.data.arrays import arrays
from jaxnn.data.source import ArraySource
from jaxnn.data.text.tokenizer import Tokenizer, Vocabulary, checked_texts
from jaxnn.types import DataError, Examples, Splits


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TextSource(ArraySource):
    """A split of texts as rows of ids, which still knows what they stand for.

    Attributes:
        vocabulary: that of the training texts, in every split.
    """

    vocabulary: Vocabulary


def texts(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    tokenizer: Tokenizer | None = None,
    name: str = "texts",
    class_names: Sequence[str] = (),
    num_classes: int | None = None,
) -> Splits:
    """The user's own texts as a data set; `vocabulary` gives what their ids stand for.

    Each split is a pair ``(texts, targets [examples, ...])`` of a list of strings and an array-like, as of
    `jaxnn.data.arrays`. The vocabulary is a function of the training texts alone.

    Args:
        train: what is trained on.
        test: what is held out to the end, or None.
        validation: what is looked at while training, or None.
        tokenizer: how texts become ids; None: ``Tokenizer()``.
        name: the data set's name, for reports.
        class_names: one name a class.
        num_classes: how many labels there are, see `jaxnn.data.arrays`.

    Returns:
        Inputs int32 ``[length]``, and the targets.

    Raises:
        DataError: not pairs, not texts, an empty text, training texts without tokens, no `Tokenizer`; else as
            `jaxnn.data.arrays`.
    """
    if not isinstance(tokenizer, Tokenizer | None):
        raise DataError(
            f"tokenizer must be a jn.data.Tokenizer, not {tokenizer!r}: its fields say how texts become ids."
        )
    pairs = {"train": train, "validation": validation, "test": test}
    given = {split: _checked_pair(split, pair) for split, pair in pairs.items() if pair is not None or split == "train"}
    found = (tokenizer or Tokenizer()).fit(given["train"][0])
    encoded: dict[str, Any] = {split: (found.encode(lines), targets) for split, (lines, targets) in given.items()}
    splits = arrays(**encoded, name=name, class_names=class_names, num_classes=num_classes)
    sources: dict[str, Any] = {
        split: TextSource(cast(Examples, source.examples), vocabulary=found) for split, source in splits.named().items()
    }
    return splits._replace(**sources)


def vocabulary(splits: Splits) -> Vocabulary:
    """What the ids of a data set of texts stand for.

    Raises:
        DataError: a data set of something else.
    """
    if isinstance(splits.train, TextSource):
        return splits.train.vocabulary
    raise DataError(
        f"{splits.name} has no vocabulary of texts to classify: those made by jn.data.texts, text_folder, csv, tsv and "
        "the like have one; of characters and words it is class_names."
    )


def _checked_pair(split: str, pair: Any) -> tuple[Sequence[str], Any]:
    """``pair`` if it is one of texts and targets."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(
            f"{split} must be a pair (texts, targets), not a {type(pair).__name__}: write {split}=(texts, targets)."
        )
    known = checked_texts(f"{split}'s texts", pair[0])
    empty = [index for index, text in enumerate(known) if not text.strip()]
    if empty:
        raise DataError(
            f"text {empty[0]} of {split} is empty (empty ones: {len(empty):,}), so that nothing is known of it: leave "
            "such examples out."
        )
    return known, pair[1]
