"""Queries on the rows of a study: timed rows, the fastest row, relative rates."""

from __future__ import annotations

from jaxnn.bench import Plain, Quantity, Row, Rows, ratios

# For the method of a study.
GROWING = (
    "An accelerator queues calls and waits for the last, and continues with larger sizes until a call takes 2 ms or an "
    "eighth of its memory; a CPU waits for each call."
)


def distinct(rows: Rows, name: str) -> list[Plain]:
    """Returns the distinct values of ``name``, in order."""
    return list(dict.fromkeys(row.what[name] for row in rows if name in row.what))


def measured(rows: Rows) -> Rows:
    """Returns the rows that were timed."""
    return Rows(row for row in rows if row.seconds)


def fastest(rows: Rows) -> Row | None:
    """Returns the row with the highest median rate; None if nothing was timed."""
    return max(measured(rows), key=lambda row: row.rate.median if row.rate else 0.0, default=None)


def best_rate(rows: Rows) -> Quantity | None:
    """Returns the rate of `fastest`; None if nothing was timed."""
    return None if (best := fastest(rows)) is None else best.rate


def relative(row: Row, base: Row) -> Quantity | None:
    """Returns the rate of ``row`` relative to ``base``, round by round; None if either was not timed."""
    timed = row.seconds and base.seconds
    return ratios(base.seconds, row.seconds).scaled(row.work / base.work, "") if timed else None
