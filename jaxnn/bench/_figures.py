"""Measured figures: the times of a case, their median and spread, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

type Plain = bool | int | float | str | None
"""A JSON value without parts."""

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
_TIMES = ((120.0, 60.0, " min"), (1.0, 1.0, " s"), (1e-3, 1e-3, " ms"), (1e-6, 1e-6, " µs"), (0.0, 1e-9, " ns"))


class Quantity(NamedTuple):
    """A figure over rounds: median, minimum, maximum, and a unit such as ``elements/s``; empty for a ratio."""

    median: float
    low: float
    high: float
    unit: str

    def scaled(self, factor: float, unit: str) -> Quantity:
        """The figure times ``factor``, in another ``unit``."""
        return Quantity(factor * self.median, factor * self.low, factor * self.high, unit)

    def __str__(self) -> str:
        """``1.23 G elements/s (1.1–1.3)``: three digits, a fitting prefix, and the spread if there is any."""
        if self.unit == "s":
            scale, unit = next((scale, unit) for least, scale, unit in _TIMES if self.median >= least)
        elif self.unit:
            scale, prefix = next((scale or 1.0, prefix) for scale, prefix in _PREFIXES if abs(self.median) >= scale)
            unit = f" {prefix}{' ' if prefix and not self.unit.startswith(('FLOP', 'B/')) else ''}{self.unit}"
        else:
            scale, unit = 1.0, ""
        middle, low, high = (_digits(value / scale) for value in self[:3])
        return f"{middle}{unit}" + (f" ({low}–{high})" if low != high else "")


class Row(NamedTuple):
    """Measurements of one case, which ``what`` identifies.

    ``seconds`` of one call, one value per round; ``work`` of one call in a ``unit`` such as ``elements``; ``observed``
    figures that are not times, such as an error; ``missing``: why the case was not measured, empty if it was.
    """

    what: Mapping[str, Plain]
    seconds: tuple[float, ...] = ()
    work: float = 1.0
    unit: str = "call"
    observed: Mapping[str, Plain] = {}
    missing: str = ""

    @property
    def time(self) -> Quantity | None:
        """Seconds of one call; None if it was not timed."""
        return quantity(self.seconds, "s")

    @property
    def rate(self) -> Quantity | None:
        """``work`` per second; None if it was not timed."""
        return quantity([self.work / seconds for seconds in self.seconds], f"{self.unit}/s")


class Rows(tuple[Row, ...]):
    """The rows of one study on one device."""

    def where(self, **what: Plain) -> Rows:
        """The rows that match, in order."""
        return Rows(row for row in self if what.items() <= row.what.items())

    def one(self, **what: Plain) -> Row:
        """The first row that matches, or a row that was not measured."""
        return next(iter(self.where(**what)), Row(what, missing="not measured"))


def quantity(values: Sequence[float], unit: str) -> Quantity | None:
    """The figure of several rounds; None for no rounds."""
    return Quantity(median(values), min(values), max(values), unit) if values else None


def ratios(values: Sequence[float], base: Sequence[float]) -> Quantity:
    """``values`` over ``base``, round by round: both from one call of `interleaved`, of at least one round."""
    found = [value / other for value, other in zip(values, base, strict=True)]
    return Quantity(median(found), min(found), max(found), "")


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free confidence interval of a median, from order statistics (`scipy.stats.quantile_test`).

    With fewer values than the confidence needs (6 for 95 %) it is the range of the values.
    """
    from scipy.stats import quantile_test  # type: ignore[import-untyped]

    low, high = quantile_test(values, p=0.5).confidence_interval(confidence)
    return (low if low == low else min(values)), (high if high == high else max(values))  # NaN: too few values


def format_ratio(ratio: float) -> str:
    """``28×``, ``0.31×``."""
    return f"{_digits(ratio)}×"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent if possible."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"
