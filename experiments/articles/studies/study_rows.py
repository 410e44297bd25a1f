"""Questions to the rows of a study: which were timed, which is fastest, how fast one is relative to another."""

from __future__ import annotations

from jaxnn.bench import Plain, Quantity, Row, Rows, ratios


def distinct(rows: Rows, name: str) -> list[Plain]:
    """The values of ``name`` in order, each once."""
    return list(dict.fromkeys(row.what[name] for row in rows if name in row.what))


def measured(rows: Rows) -> Rows:
    """The rows that were timed."""
    return Rows(row for row in rows if row.seconds)


def fastest(rows: Rows) -> Row | None:
    """The row with the highest median rate; None if nothing was timed."""
    return max(measured(rows), key=lambda row: row.rate.median if row.rate else 0.0, default=None)


def best_rate(rows: Rows) -> Quantity | None:
    """The rate of `fastest`; None if nothing was timed."""
    return None if (best := fastest(rows)) is None else best.rate


def relative(row: Row, base: Row) -> Quantity | None:
    """Rate of ``row`` over that of ``base``, round by round; None if either was not timed."""
    timed = row.seconds and base.seconds
    return ratios(base.seconds, row.seconds).scaled(row.work / base.work, "") if timed else None
