"""Queries on the rows of a study: timed rows, the fastest row, relative rates."""

from __future__ import annotations

from collections.abc import Mapping

from harness import Finding, Plain, Quantity, Row, Rows, ratios

# For the method of a study.
GROWING = (
    "An accelerator queues calls and waits for the last, and continues with larger sizes until a call takes 2 ms or an "
    "eighth of its memory; a CPU waits for each call."
)
OVERHEAD = "mostly the overhead of a call"


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


def rate_finding(claim: str, what: str, rows: Rows, across: str = "size", article: str = "", note: str = "") -> Finding:
    """Returns the rate of `fastest`, which is not compared, and says why, if its time is mostly overhead.

    Args:
        claim: of the finding, as are ``what``, ``article`` and ``note``.
        what: as in `Finding`.
        rows: of one form.
        across: the name of the size in a case.
        article: as in `Finding`.
        note: as in `Finding`.
    """
    best = fastest(rows)
    hidden = best is not None and rows.mostly_overhead(best, across)
    notes = "; ".join(text for text in (note, OVERHEAD if hidden else "") if text)
    return Finding(claim, what, best and best.rate, article, notes, comparable=not hidden)


def without_overhead(
    label: str, found: Mapping[str, Row | None], rows: Rows, across: str = "size"
) -> tuple[dict[str, Row], list[str]]:
    """Returns the rows to conclude from, by name, and a sentence about those whose time is mostly overhead.

    Args:
        label: of the column.
        found: a row for each name; None if it was not timed.
        rows: of the column.
        across: the name of the size in a case.
    """
    timed = {name: row for name, row in found.items() if row is not None and row.seconds}
    hidden = [name for name, row in timed.items() if rows.mostly_overhead(row, across)]
    sentence = f"{label}: {OVERHEAD}: {', '.join(hidden)}; nothing is concluded from it."
    return {name: row for name, row in timed.items() if name not in hidden}, [sentence] if hidden else []


def relative(row: Row, base: Row) -> Quantity | None:
    """Returns the rate of ``row`` relative to ``base``, round by round; None if either was not timed."""
    timed = row.seconds and base.seconds
    return ratios(base.seconds, row.seconds).scaled(row.work / base.work, "") if timed else None
