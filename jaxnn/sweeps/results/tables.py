"""How the results of a sweep are written down: metrics with four digits, points with six, tables as text and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Beyond so many decimals a number is easier to read with an exponent.
MOST_DECIMALS = 6


class Table(NamedTuple):
    """A table that shows itself: as text where it is printed, as HTML in a notebook.

    Attributes:
        header: names of the columns.
        rows: their cells.
        notes: sentences below it.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return "\n".join([text_table(self.header, self.rows), *self.notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return html_table(self.header, self.rows) + notes


def show(value: Any, digits: int = 4) -> str:
    """``value`` for a reader: floats with so many significant digits, anything else as it is written in Python."""
    if isinstance(value, tuple | list):
        shown = ", ".join(show(item, digits) for item in value)
        return f"({shown},)" if len(value) == 1 else f"({shown})"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def show_value(value: Any) -> str:
    """A config field's ``value``: floats with six digits, which are enough to select by."""
    return show(value, digits=6)


def show_point(point: Mapping[str, Any]) -> str:
    """``learning_rate 0.001, seed 3``."""
    return ", ".join(f"{name} {show_value(value)}" for name, value in point.items())


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
