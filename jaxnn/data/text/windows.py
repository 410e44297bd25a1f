"""Running text, as ids, becomes windows whose next token is to be predicted."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from jaxnn.data.arrays import arrays
from jaxnn.types import DataError, Splits, suggest

type Targets = Literal["all", "last"]


def check_windows(where: str, length: Any, stride: Any, targets: Any) -> None:
    """Raises DataError for a length or a stride below 1, or unknown targets; ``where`` says whose."""
    if not all(isinstance(number, int) and number >= 1 for number in (length, stride)):
        raise DataError(f"{where}: length and stride must be integers of at least 1, not {length!r} and {stride!r}.")
    if targets not in ("all", "last"):
        raise DataError(f"{where}: targets is {targets!r}: {suggest(targets, ('all', 'last'))}.")


def windowed(
    ids: dict[str, np.ndarray], length: int, stride: int, targets: Targets, *, name: str, vocabulary: tuple[str, ...]
) -> Splits:
    """Running text as a data set of windows.

    Tokens at a split's end that fill no window and its targets are left out.

    Args:
        ids: for each split its tokens ``[tokens]``, more than ``length`` of them.
        length: tokens of a window.
        stride: from the start of one training window to the next. If ``targets`` are "all", windows of other splits
            follow one another, so that each token is predicted once.
        targets: "all": the next token at each place, ``[windows, length]``; "last": the one behind the window,
            ``[windows]``.
        name: the data set's name.
        vocabulary: what the ids stand for.
    """
    pairs: dict[str, Any] = {}
    for split, tokens in ids.items():
        apart = stride if split == "train" or targets == "last" else length
        windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::apart]
        pairs[split] = windows[:, :-1], windows[:, 1:] if targets == "all" else windows[:, -1]
    return arrays(**pairs, name=name, class_names=vocabulary)
