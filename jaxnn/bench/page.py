"""The page of results: what each article says, what was measured, on which devices; as blocks that are rendered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxnn.bench.machine import Column
from jaxnn.bench.numbers import format_quantity, format_ratio
from jaxnn.bench.results import Measured, Results
from jaxnn.bench.rows import Quantity, Rows
from jaxnn.bench.study import Finding, Study

TITLE = "The articles' claims, measured"
ABSENT = "not measured"
# What the page has a column for, measured or not.
EXPECTED = ("cpu", "gpu")


class Heading(NamedTuple):
    """A heading; level 1 is the page's own."""

    level: int
    text: str


class Paragraph(NamedTuple):
    """A paragraph of plain text."""

    text: str


class Table(NamedTuple):
    """A table; all cells are text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Picture(NamedTuple):
    """A picture beside the page, and what it shows."""

    file: str
    alt: str


type Block = Heading | Paragraph | Table | Picture


def make_page(results: Results, studies: Sequence[Study]) -> list[Block]:
    """The blocks of the page.

    Args:
        results: what was measured.
        studies: all that there are, in the page's order; of those not among the results it says so.
    """
    columns = columns_of(results)
    blocks: list[Block] = [
        Heading(1, TITLE),
        Paragraph(_explanation(results)),
        _devices(results, columns),
    ]
    for study in studies:
        if study.name in results:
            blocks += _section(study, results[study.name], columns)
    left_out = [study.name for study in studies if study.name not in results]
    if left_out:
        blocks += [Heading(2, "Not measured"), Paragraph(", ".join(left_out) + ".")]
    return blocks


def columns_of(results: Results) -> dict[str, Column | None]:
    """The table's columns by their label, CPUs first; None for an expected kind that nobody measured."""
    found = {label: part.column for measured in results.values() for label, part in measured.parts.items()}
    kinds = {column.device for column in found.values()}
    absent: dict[str, Column | None] = {kind.upper(): None for kind in EXPECTED if kind not in kinds}
    return dict(sorted((found | absent).items()))


def _explanation(results: Results) -> str:
    quick = sorted(name for name, measured in results.items() if measured.quick)
    told = (
        "A figure is the median over rounds, with the least and the most of them in brackets; × is how many times as "
        "fast as the first CPU column."
    )
    return f"{told} Measured quickly, with small sizes and few rounds: {', '.join(quick)}." if quick else told


def _devices(results: Results, columns: Mapping[str, Column | None]) -> Table:
    """Each device, and with what its studies were measured: all that there was, since a page may grow for long."""
    rows = []
    for label in columns:
        parts = [one.parts[label].column for one in results.values() if label in one.parts]
        versions = _each(", ".join(f"{name} {told}" for name, told in one.versions.items() if told) for one in parts)
        loads = [one.load for one in parts if one.load is not None]
        load = f"{min(loads):.1f} to {max(loads):.1f}" if loads else ""
        commits, dates = _each(one.commit or "" for one in parts), _each(one.date for one in parts)
        rows.append((label, versions or ABSENT, commits, dates, load))
    return Table(("device", "versions", "commit", "date", "load before a study"), tuple(rows))


def _each(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _section(study: Study, measured: Measured, columns: Mapping[str, Column | None]) -> Iterable[Block]:
    rows = measured.rows
    yield Heading(2, f"{study.name} ({', '.join(study.claims)})")
    yield Paragraph(f"{study.title} {study.method}")
    yield findings_table(study, rows, columns)
    for sentence in study.conclude(rows):
        yield Paragraph(sentence)
    yield Picture(f"{study.name}.png", study.title)
    for label, part in measured.parts.items():
        if not part.whole:
            yield Paragraph(f"Interrupted on {label} after {len(part.rows)} cases: to be measured again.")
    if reasons := _reasons(rows):
        yield Paragraph(f"Not measured: {'; '.join(reasons)}.")


def findings_table(study: Study, rows: Mapping[str, Rows], columns: Mapping[str, Column | None]) -> Table:
    """Claim, what, the article's figure, and a column for each device."""
    by_label = {label: {(one.claim, one.what): one for one in study.findings(rows[label])} for label in rows}
    keys = list(dict.fromkeys(key for found in by_label.values() for key in found))
    base = next((label for label, column in columns.items() if column is not None and column.device == "cpu"), None)
    table = []
    for key in keys:
        known = {label: found[key] for label, found in by_label.items() if key in found}
        article = next((one.article for one in known.values() if one.article), "–")
        reference = known[base].quantity if base in known else None
        cells = [_cell(known.get(label), None if label == base else reference) for label in columns]
        table.append((key[0], key[1], article, *cells))
    return Table(("claim", "what", "the article", *columns), tuple(table))


def _cell(finding: Finding | None, reference: Quantity | None) -> str:
    if finding is None or finding.quantity is None:
        return finding.note if finding is not None and finding.note else ABSENT
    told = format_quantity(finding.quantity)
    if reference is not None and finding.comparable and (ratio := speedup(finding.quantity, reference)) is not None:
        told += f", {format_ratio(ratio)}"
    return f"{told}; {finding.note}" if finding.note else told


def speedup(quantity: Quantity, reference: Quantity) -> float | None:
    """How many times as fast as ``reference``; None for what is no speed."""
    if quantity.unit != reference.unit or not quantity.median or not reference.median:
        return None
    if quantity.unit == "s":
        return reference.median / quantity.median
    return quantity.median / reference.median if quantity.unit.endswith("/s") else None


def _reasons(rows: Mapping[str, Rows]) -> list[str]:
    """Why cases were not measured, each reason once with how often."""
    told = []
    for label, found in rows.items():
        counts: dict[str, list[str]] = {}
        for row in found:
            if row.missing:
                counts.setdefault(row.missing.rstrip("."), []).append(" ".join(map(str, row.what.values())))
        told += [f"{label}: {', '.join(cases)} ({reason})" for reason, cases in counts.items()]
    return told
