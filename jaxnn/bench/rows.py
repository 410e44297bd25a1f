"""What was measured of a study's cases on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

type Plain = bool | int | float | str | None
"""A value of JSON without parts."""


class Quantity(NamedTuple):
    """A figure with its spread over rounds.

    Attributes:
        median: the figure.
        low: the least of the rounds.
        high: the most.
        unit: such as ``elements/s`` or ``s``; empty for a share.
    """

    median: float
    low: float
    high: float
    unit: str

    def scaled(self, factor: float, unit: str) -> Quantity:
        """The figure times ``factor``, which makes it one of another ``unit``."""
        return Quantity(factor * self.median, factor * self.low, factor * self.high, unit)


class Row(NamedTuple):
    """What was measured of one case.

    Attributes:
        what: see `Case`.
        seconds: of a call, one for each round.
        work: see `Case`.
        unit: see `Case`.
        observed: figures that are not times.
        missing: why it was not measured, if it was not.
    """

    what: Mapping[str, Plain]
    seconds: tuple[float, ...] = ()
    work: float = 1.0
    unit: str = "call"
    observed: Mapping[str, Plain] = {}
    missing: str = ""

    @property
    def time(self) -> Quantity | None:
        """The seconds of a call."""
        return quantity(self.seconds, "s")

    @property
    def rate(self) -> Quantity | None:
        """``work`` a second."""
        return quantity([self.work / seconds for seconds in self.seconds], f"{self.unit}/s")


def quantity(values: Sequence[float], unit: str) -> Quantity | None:
    """The figure of several rounds; None of no round."""
    return Quantity(median(values), min(values), max(values), unit) if values else None


def exactly(value: Plain, unit: str = "") -> Quantity:
    """A figure that was measured once."""
    number = float(value or 0.0)
    return Quantity(number, number, number, unit)


def relative(row: Row, base: Row) -> Quantity | None:
    """How many times the work a second of ``base`` a case did, round by round; None where one was not timed."""
    factor = row.work / base.work
    pairs = zip(base.seconds, row.seconds, strict=True) if base.seconds and row.seconds else ()
    return quantity([factor * one / each for one, each in pairs], "")


class Rows(tuple[Row, ...]):
    """The rows of one device."""

    def where(self, **what: Plain) -> Rows:
        """Those of which all this is true, in order."""
        return Rows(row for row in self if what.items() <= row.what.items())

    def one(self, **what: Plain) -> Row:
        """The one of which all this is true; one that was not measured where there is none."""
        found = self.where(**what)
        return found[0] if found else Row(what, missing="not measured")

    def values(self, name: str) -> list[Plain]:
        """What is told of ``name``, each once, in order."""
        return list(dict.fromkeys(row.what[name] for row in self if name in row.what))

    def measured(self) -> Rows:
        """Those that were timed."""
        return Rows(row for row in self if row.seconds)

    def fastest(self) -> Row | None:
        """The one of the highest rate, by its median; None where nothing was timed."""
        return max(self.measured(), key=lambda row: row.rate.median if row.rate else 0.0, default=None)

    def best_rate(self) -> Quantity | None:
        """The highest of their rates, by its median."""
        best = self.fastest()
        return None if best is None else best.rate
