"""Figures as text: three digits, a unit that fits, and the spread."""

from __future__ import annotations

from jaxnn.bench.rows import Quantity

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_quantity(quantity: Quantity) -> str:
    """``1.23 G elements/s (1.1–1.3)``; the spread is left out where there was one round, or none to be seen."""
    value, low, high = quantity.median, quantity.low, quantity.high
    if quantity.unit == "s":
        scale, unit = _time_scale(value)
    elif quantity.unit == "":
        scale, unit = 1.0, ""
    else:
        scale, prefix = _scale(value)
        unit = f" {prefix}{'' if quantity.unit.startswith(('FLOP', 'B/')) else ' ' if prefix else ''}{quantity.unit}"
    told, least, most = (_digits(each / scale) for each in (value, low, high))
    spread = "" if least == most else f" ({least}–{most})"
    return f"{told}{unit}{spread}"


def format_ratio(ratio: float) -> str:
    """``28×``, ``0.31×``."""
    return f"{_digits(ratio)}×"


def _scale(value: float) -> tuple[float, str]:
    return next(((scale, prefix) for scale, prefix in _PREFIXES if abs(value) >= scale), (1.0, ""))


def _time_scale(seconds: float) -> tuple[float, str]:
    if seconds >= 120:
        return 60.0, " min"
    return next(
        ((scale, unit) for scale, unit in ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs")) if seconds >= scale),
        (1e-9, " ns"),
    )


def _digits(value: float) -> str:
    """Three significant digits, none of them an exponent where it can be helped."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.1e}"
