"""When a run is over: a function of its record so far, so that a resumed run decides alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxnn.loop.options import RunOptions
from jaxnn.loop.session import Session


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


def stops_early(lines: Sequence[Mapping[str, Any]], monitored: str, options: RunOptions) -> bool:
    """Whether a run that reported ``lines`` is to stop after the last, which is where it was evaluated."""
    if not lines or monitored not in lines[-1]:
        return False
    values = [line[monitored] for line in lines if monitored in line]
    return should_stop(values, options.patience, higher_is_better=options.higher_is_better)


def status_after(session: Session, step: int, *, interrupted: bool = False) -> str:
    """What has become of a run after ``step``: ``running``, ``finished``, ``interrupted`` or ``stopped early``."""
    if step == session.plan.num_steps:
        return "finished"
    if interrupted:
        return "interrupted"
    return "stopped early" if stops_early(session.lines, session.monitored, session.options) else "running"


def is_best(session: Session) -> bool:
    """Whether the newest evaluation is better than all before it."""
    values = session.monitored_values
    return bool(values) and evaluations_since_best(values, higher_is_better=session.options.higher_is_better) == 0
