"""Sequences of ids of different lengths as one array, and how they become rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Sequences one after another.

    Attributes:
        values: ``[total]`` int32, those of the first sequence, then those of the second, …
        lengths: ``[sequences]`` int64, whose sum is ``total``.
    """

    values: np.ndarray
    lengths: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Where in ``values`` each sequence begins: ``[sequences]``."""
        starts: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return starts

    @property
    def rows(self) -> np.ndarray:
        """Which sequence each value is of: ``[total]``."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def remaining(self) -> np.ndarray:
        """How many values there are from each to its sequence's end, itself among them: ``[total]``."""
        return np.repeat(self.starts + self.lengths, self.lengths) - np.arange(len(self.values))


def ragged(sequences: Sequence[np.ndarray]) -> Ragged:
    """Arrays ``[any length]`` as one."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return Ragged(np.concatenate([np.zeros(0, np.int32), *sequences]), lengths)


def joined(parts: Sequence[Ragged]) -> Ragged:
    """Each sequence of the first part, followed by the same one of the second, and so on."""
    lengths = sum((part.lengths for part in parts), np.zeros_like(parts[0].lengths))
    values = np.empty(lengths.sum(), np.int32)
    places = np.cumsum(lengths) - lengths
    for part in parts:
        values[np.arange(len(part.values)) + np.repeat(places - part.starts, part.lengths)] = part.values
        places = places + part.lengths
    return Ragged(values, lengths)


def padded(sequences: Ragged, length: int, *, keep_end: bool, pad_start: bool) -> np.ndarray:
    """Rows of one length: what is longer is cut, what is shorter is filled up with 0.

    Args:
        sequences: what the rows are made of.
        length: of a row.
        keep_end: of what is longer the end is kept, else the start.
        pad_start: zeros stand in front, else behind.

    Returns:
        ``[sequences, length]`` int32.
    """
    if keep_end:
        kept = sequences.remaining <= length
    else:
        kept = np.arange(len(sequences.values)) - np.repeat(sequences.starts, sequences.lengths) < length
    counts = np.minimum(sequences.lengths, length)[:, None]
    columns = np.arange(length)[None]
    rows = np.zeros((len(counts), length), np.int32)
    rows[columns >= length - counts if pad_start else columns < counts] = sequences.values[kept]
    return rows
