"""Shares of a set are held out: which examples go where is a function of the seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxnn.data.checks import check_integer
from jaxnn.data.shuffle import permute
from jaxnn.types import DataError


def split_off(num_examples: int, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """The indices of ``train`` and of each split that holds a share, shuffled by `jaxnn.data.permute`.

    Args:
        num_examples: of the whole.
        shares: for each split its share, at least 0 and below 1, rounded to whole examples and at least one; 0: no
            such split.
        seed: of the shuffle.

    Returns:
        For each split its indices ``[examples]``, rising; ``train`` is first and has the rest.

    Raises:
        DataError: shares or a seed out of range, or that leave nothing to train on.
    """
    for split, share in shares.items():
        check_share(split, share)
    check_integer("seed", seed, 0)
    counts = {split: max(1, round(share * num_examples)) for split, share in shares.items() if share}
    if sum(counts.values()) >= num_examples:
        raise DataError(
            f"{' and '.join(f'{count:,} for {split}' for split, count in counts.items()) or 'nothing held out'} leaves "
            f"nothing of {num_examples:,} examples to train on: hold out less."
        )
    shuffled = permute(np.arange(num_examples), num_examples, seed, 0)
    bounds = np.cumsum([0, *counts.values()])
    parts = {split: shuffled[begin:end] for split, begin, end in zip(counts, bounds[:-1], bounds[1:], strict=True)}
    return {split: np.sort(indices) for split, indices in {"train": shuffled[bounds[-1] :], **parts}.items()}


def check_share(name: str, share: Any) -> None:
    """Raises DataError unless ``share`` is a number that is at least 0 and below 1."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise DataError(f"{name} must be a share of the examples, at least 0 and below 1, not {share!r}.")
