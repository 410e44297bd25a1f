"""Members of a sweep and the fields they were swept over, and how both are printed."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxnn.record import metrics_of
from jaxnn.types import RecordError

SEED = "seed"
# Members with these statuses have no result: what they measured before is not averaged or ranked.
LOST = ("diverged", "failed")
# Members with these statuses are complete; what others measured is of fewer steps.
COMPLETE = ("finished", "stopped early")
# Selection tolerance: a float32, or a number printed with six digits, selects the value it stands for.
TOLERANCE = 1e-5

type At = Literal["final", "best"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A config field that was swept.

    Attributes:
        name: the field's, dotted if nested.
        values: its distinct values.
        scale: in plots: ``log``, ``linear`` or ``nominal``, as for seeds and values that are no numbers.
    """

    name: str
    values: tuple[Any, ...]
    scale: str


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        index: its number, which it keeps in a selection.
        point: the swept fields and their values.
        config: all config fields; nested dataclasses are mappings.
        status: ``waiting``, ``running``, ``finished``, ``stopped early``, ``diverged``, ``pruned``, ``failed`` or
            ``interrupted``.
        step: updates done.
        final: the last value of each metric.
        best: the metrics of the best evaluation by the monitored metric, and its ``step``; empty before the first.
        error: why it failed, or None.
        dir: its run directory if it was exported, else None.
    """

    index: int
    point: Mapping[str, Any]
    config: Mapping[str, Any]
    status: str
    step: int
    final: Mapping[str, float]
    best: Mapping[str, float]
    error: str | None = None
    dir: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether it finished or stopped early."""
        return self.status in COMPLETE

    @property
    def cut_short(self) -> bool:
        """Whether it is neither complete nor lost: pruned, interrupted, running, waiting."""
        return self.status not in (*COMPLETE, *LOST)

    @property
    def fields(self) -> dict[str, Any]:
        """The flat config by dotted names, and the point, whose values may be dataclasses."""
        return _flattened(self.config) | dict(self.point)

    def metrics(self, at: At = "final") -> dict[str, float]:
        """Its metrics at the end, or at its best evaluation."""
        return metrics_of(self.final if at == "final" else self.best)

    def __str__(self) -> str:
        return f"member {self.index}" + (f" ({show_point(self.point)})" if self.point else "")


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model": {"dropout": 0.1}}`` as ``{"model.dropout": 0.1}``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def grouped(members: Sequence[Member], names: Sequence[str]) -> list[tuple[dict[str, Any], list[int]]]:
    """Returns the values of ``names`` and the positions of the members that share them, in order of appearance."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for position, member in enumerate(members):
        fields = member.fields
        if lacking := [name for name in names if name not in fields]:
            raise RecordError(f"the config of member {member.index} lacks {lacking[0]!r}: the record is damaged.")
        point = {name: fields[name] for name in names}
        # Keyed by text: a value may be a nested config, which has no hash.
        groups.setdefault(repr(point), (point, []))[1].append(position)
    return list(groups.values())


def selection(wanted: Any) -> Callable[[Any], bool]:
    """Returns the test of a selection by a function, by a list, set or range of values, or by one value."""
    if callable(wanted):
        return lambda value: bool(wanted(value))
    several = isinstance(wanted, list | set | frozenset | range | np.ndarray)
    choices = [tuple(one) if isinstance(one, list) else one for one in (wanted if several else [wanted])]

    def same(value: Any, choice: Any) -> bool:
        if isinstance(value, float) and isinstance(choice, int | float | np.number):
            return math.isclose(value, choice, rel_tol=TOLERANCE)
        # True equals 1 in Python, but is a different setting.
        return isinstance(value, bool) == isinstance(choice, bool | np.bool_) and bool(value == choice)

    return lambda value: any(same(value, choice) for choice in choices)


def count_by_status(members: Iterable[Any]) -> str:
    """Returns ``60 finished, 4 diverged`` of members, or of their logs; ``no members`` for none."""
    counts = Counter(member.status for member in members)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "no members"


def show(value: Any, digits: int = 4) -> str:
    """Returns ``value`` as text: floats with this many significant digits, anything else as Python writes it."""
    if isinstance(value, tuple | list):
        shown = ", ".join(show(item, digits) for item in value)
        return f"({shown},)" if len(value) == 1 else f"({shown})"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def show_field(value: Any) -> str:
    """Returns a config field's value as text: floats with six digits, enough to select by."""
    return show(value, digits=6)


def show_point(point: Mapping[str, Any]) -> str:
    """Returns ``learning_rate 0.001, seed 3``."""
    return ", ".join(f"{name} {show_field(value)}" for name, value in point.items())
