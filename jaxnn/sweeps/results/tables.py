"""How the results of a sweep are written down: numbers with four digits, tables as text and as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

# Beyond so many decimals a number is easier to read with an exponent.
MOST_DECIMALS = 6


def show(value: Any) -> str:
    """``value`` for a reader: floats with four significant digits, anything else as it is written in Python."""
    if isinstance(value, tuple | list):
        shown = ", ".join(map(show, value))
        return f"({shown},)" if len(value) == 1 else f"({shown})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_point(point: dict[str, Any]) -> str:
    """``learning_rate 0.001, seed 3``."""
    return ", ".join(f"{name} {show(value)}" for name, value in point.items())


def show_spread(mean: float, deviation: float, low: float, high: float) -> str:
    """``0.9812 ± 0.0021 (0.9791 to 0.9833)``: all with the decimals that four digits of the mean have."""
    if not math.isfinite(deviation):
        return show(float(mean))
    largest = max(abs(mean), abs(low), abs(high))
    decimals = 3 - math.floor(math.log10(largest)) if largest > 0 else 0
    if not 0 <= decimals <= MOST_DECIMALS or 0 < deviation < 0.5 * 10.0**-decimals:
        return f"{mean:.4g} ± {deviation:.2g} ({low:.4g} to {high:.4g})"
    return f"{mean:.{decimals}f} ± {deviation:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart, a row a line."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a notebook; without a header where that is empty."""
    lines = [_html_row("th", header)] if header else []
    lines += [_html_row("td", row) for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _html_row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind} style="text-align:left">{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"
