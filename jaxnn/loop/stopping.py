"""Early stopping: a pure function of the evaluations so far, so a resumed run decides alike."""

from __future__ import annotations

from collections.abc import Sequence


def evaluations_since_best(values: Sequence[float], *, higher_is_better: bool) -> int:
    """How many of ``values``, oldest first, came after the first best one; NaN is never best."""
    sign = -1.0 if higher_is_better else 1.0
    ranked = [(sign * value, index) for index, value in enumerate(values) if value == value]
    return len(values) - 1 - min(ranked)[1] if ranked else len(values)


def should_stop(values: Sequence[float], patience: int | None, *, higher_is_better: bool) -> bool:
    """Whether the last ``patience`` evaluations brought nothing better (Prechelt 1998, "Early stopping")."""
    if patience is None or not values:
        return False
    return evaluations_since_best(values, higher_is_better=higher_is_better) >= patience
