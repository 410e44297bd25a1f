"""Members as a table: their points, what became of them and why, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence

from jaxnn.sweeps.results.outcomes import At, Axis, Member
from jaxnn.sweeps.results.tables import Table, show, show_value


def member_table(members: Sequence[Member], axes: Sequence[Axis], metrics: Sequence[str], at: At, limit: int) -> Table:
    """The first ``limit`` of ``members``, with these metrics; with a column ``error`` where any of them failed."""
    shown = members[:limit]
    failed = any(member.error for member in shown)
    names = [axis.name for axis in axes]
    header = ["member", *names, "status", "step" if at == "final" else "best step", *metrics]
    rows = [_row(member, names, metrics, at) + [first_line(member.error)] * failed for member in shown]
    more = len(members) - len(shown)
    return Table([*header, *["error"] * failed], rows, [f"… and {more} more"] if more else [])


def first_line(error: str | None) -> str:
    """Of an error, whose message may go on with a traceback; empty for none."""
    return (error or "").strip().partition("\n")[0]


def _row(member: Member, names: Sequence[str], metrics: Sequence[str], at: At) -> list[str]:
    fields, measured = member.fields, member.metrics(at)
    step = member.step if at == "final" else member.best.get("step", "–")
    point = [show_value(fields.get(name)) for name in names]
    values = [show(measured[name]) if name in measured else "–" for name in metrics]
    return [str(member.index), *point, member.status, str(step), *values]
