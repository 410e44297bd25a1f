"""Results of studies: read and written as JSON, merged from several machines, shown as one Markdown page."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.bench.figures import Quantity, Row, Rows, format_ratio
from jaxnn.bench.machine import Machine
from jaxnn.bench.study import Finding, Study
from jaxnn.record import make_room, write_bytes, write_json, write_text
from jaxnn.types import RecordError

FILE = "results.json"
FORMAT = 2
ABSENT = "not measured"
# Kinds of device that the page has a column for, measured or not.
EXPECTED = ("cpu", "gpu")


class Part(NamedTuple):
    """The figures of one study on one device.

    Attributes:
        machine: the device, its software, and the date.
        rows: the figures.
        complete: whether all cases are there; False: the study was interrupted.
    """

    machine: Machine
    rows: Rows
    complete: bool = True


class Measured(NamedTuple):
    """The figures of one study.

    Attributes:
        definition: what must be equal for figures to be comparable.
        quick: whether they come from the quick settings.
        parts: by the label of the machine.
    """

    definition: Mapping[str, Any]
    quick: bool
    parts: Mapping[str, Part]

    @property
    def rows(self) -> dict[str, Rows]:
        """The complete figures by label; nothing is concluded from incomplete ones."""
        return {label: part.rows for label, part in self.parts.items() if part.complete}

    def check_alike(self, name: str, other: Measured, here: str, there: str) -> None:
        """Raises RecordError if figures of study ``name`` in ``here`` and ``there`` are not comparable."""
        for key in dict.fromkeys([*self.definition, *other.definition]):
            ours, theirs = self.definition.get(key), other.definition.get(key)
            if ours != theirs:
                raise RecordError(
                    f"{name} was defined differently: {key} is {ours} in {here} and {theirs} in {there}. Measure one "
                    "of them again, both quick or both full, with one version of jaxnn."
                )


type Results = Mapping[str, Measured]
"""Figures by name of the study."""


def write_results(results: Results, folder: Path) -> Path:
    """Writes ``results.json`` atomically into ``folder``, which is created if needed; raises RecordError."""
    make_room(folder)
    studies = {
        name: {
            "definition": measured.definition,
            "quick": measured.quick,
            "parts": [
                {"machine": part.machine._asdict(), "complete": part.complete, "rows": [r._asdict() for r in part.rows]}
                for part in measured.parts.values()
            ],
        }
        for name, measured in results.items()
    }
    write_json(folder / FILE, {"format": FORMAT, "studies": studies})
    return folder / FILE


def read_results(path: Path) -> Results:
    """Reads the file, or the folder, that `write_results` wrote.

    Raises:
        RecordError: it is missing, cut short, of another format, or incomplete; the message names the file.
    """
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RecordError(f"{file} is not complete JSON ({error}): measure again, or copy it again.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecordError(f"{file} is not a results file of format {FORMAT}: give what `jaxnn bench` writes.")
    try:
        return {name: _read_study(one) for name, one in content["studies"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{file} is incomplete or was edited ({error!r}): measure again.") from error


def _read_study(content: Mapping[str, Any]) -> Measured:
    parts = [
        Part(
            Machine(**part["machine"]),
            Rows(Row(**{**row, "seconds": tuple(row["seconds"])}) for row in part["rows"]),
            bool(part["complete"]),
        )
        for part in content["parts"]
    ]
    return Measured(dict(content["definition"]), bool(content["quick"]), {part.machine.label: part for part in parts})


def merge_results(sources: Sequence[tuple[str, Results]]) -> Results:
    """The results of several machines as one.

    Args:
        sources: each with the name that errors call it by.

    Raises:
        RecordError: a study is incomplete, was defined differently, or was measured twice on one device.
    """
    merged: dict[str, tuple[str, Measured]] = {}
    for there, results in sources:
        for name, measured in results.items():
            for label, part in measured.parts.items():
                if not part.complete:
                    raise RecordError(f"{there} has incomplete figures of {name} on {label}: measure it again.")
            here, known = merged.get(name, (there, measured._replace(parts={})))
            known.check_alike(name, measured, here, there)
            if both := sorted(set(known.parts) & set(measured.parts)):
                raise RecordError(f"{here} and {there} both have {name} on {both[0]}: leave one of them out.")
            merged[name] = here, known._replace(parts={**known.parts, **measured.parts})
    return {name: measured for name, (_, measured) in merged.items()}


def write_page(
    results: Results, folder: Path, studies: Mapping[str, Study], *, title: str, changed: Sequence[str]
) -> None:
    """Writes ``results.json``, ``results.md`` and a picture per study; pictures of unchanged studies are kept.

    Raises:
        RecordError: the disk refuses.
    """
    from matplotlib.figure import Figure

    write_results(results, folder)
    for name in results:
        picture = folder / f"{name}.png"
        if name in studies and (name in changed or not picture.exists()):
            figure, content = Figure(layout="constrained"), io.BytesIO()
            studies[name].draw(results[name].rows, figure)
            figure.savefig(content, format="png", dpi=110)
            write_bytes(picture, content.getvalue())
    write_text(folder / "results.md", make_page(results, studies, title))


def make_page(results: Results, studies: Mapping[str, Study], title: str) -> str:
    """The page as Markdown: the machines, then a section for each of ``studies`` that was measured."""
    machines = machines_of(results)
    quick = sorted(name for name, measured in results.items() if measured.quick)
    blocks = [
        f"# {title}",
        "Each figure is the median over rounds, with the least and the greatest in brackets; × is the speed relative "
        "to the first CPU column." + (f" Measured with quick settings: {', '.join(quick)}." if quick else ""),
        markdown_table(("device", "versions", "commit", "date", "load before a study"), _machine_rows(results)),
    ]
    for name, study in studies.items():
        if name in results:
            rows = results[name].rows
            blocks += [
                f"## {name}" + (f" ({', '.join(study.claims)})" if study.claims else ""),
                f"{study.title} {study.method}",
            ]
            blocks += [markdown_table(*findings_table(study, rows, machines)), *study.conclude(rows)]
            blocks += [f"![{study.title}]({name}.png)"]
            blocks += [
                f"Interrupted on {label} after {len(part.rows)} cases: measure it again."
                for label, part in results[name].parts.items()
                if not part.complete
            ]
            if reasons := _reasons(rows):
                blocks.append(f"Not measured: {'; '.join(reasons)}.")
    if missing := [name for name in studies if name not in results]:
        blocks += ["## Not measured", f"{', '.join(missing)}."]
    return "\n\n".join(blocks) + "\n"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells are text."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '\\|') for cell in line)} |" for line in lines)


def machines_of(results: Results) -> dict[str, Machine | None]:
    """The columns of the page by label, CPUs first; None for an expected kind that was not measured."""
    found = {label: part.machine for measured in results.values() for label, part in measured.parts.items()}
    kinds = {machine.device for machine in found.values()}
    absent: dict[str, Machine | None] = {kind.upper(): None for kind in EXPECTED if kind not in kinds}
    return dict(sorted((found | absent).items()))


def _machine_rows(results: Results) -> Iterable[tuple[str, ...]]:
    """One row per device; a page may have been measured with several versions, commits and dates."""
    for label in machines_of(results):
        used = [measured.parts[label].machine for measured in results.values() if label in measured.parts]
        versions = (", ".join(f"{name} {value}" for name, value in one.versions.items() if value) for one in used)
        columns = versions, (one.commit or "" for one in used), (one.date for one in used)
        texts = ["; ".join(dict.fromkeys(filter(None, column))) for column in columns]
        loads = [one.load for one in used if one.load is not None]
        yield label, texts[0] or ABSENT, *texts[1:], f"{min(loads):.1f} to {max(loads):.1f}" if loads else ""


def findings_table(
    study: Study, rows: Mapping[str, Rows], machines: Mapping[str, Machine | None]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: claim, what was measured, the article's figure, and one column per machine."""
    by_label = {label: {(one.claim, one.what): one for one in study.findings(found)} for label, found in rows.items()}
    base = next((label for label, machine in machines.items() if machine is not None and machine.device == "cpu"), None)
    table = []
    for key in dict.fromkeys(key for found in by_label.values() for key in found):
        known = {label: found[key] for label, found in by_label.items() if key in found}
        article = next((one.article for one in known.values() if one.article), "–")
        reference = known[base].quantity if base in known else None
        cells = (_cell(known.get(label), None if label == base else reference) for label in machines)
        table.append((*key, article, *cells))
    header = ("claim", "what", "the article", *machines)
    if study.claims:
        return header, table
    return (header[1], *machines), [(row[1], *row[3:]) for row in table]  # a study of one's own has no article


def _cell(finding: Finding | None, reference: Quantity | None) -> str:
    if finding is None or finding.quantity is None:
        return (finding.note if finding is not None else "") or ABSENT
    text, unit = str(finding.quantity), finding.quantity.unit
    speeds = unit == "s" or unit.endswith("/s")
    if reference is not None and finding.comparable and speeds and reference.unit == unit:
        if finding.quantity.median and reference.median:
            ratio = finding.quantity.median / reference.median
            text += f", {format_ratio(1 / ratio if unit == 's' else ratio)}"
    return f"{text}; {finding.note}" if finding.note else text


def _reasons(rows: Mapping[str, Rows]) -> list[str]:
    """Why cases were not measured: each reason once, with the cases it applies to."""
    found: dict[tuple[str, str], list[str]] = {}
    for label, those in rows.items():
        for row in those:
            if row.missing:
                found.setdefault((label, row.missing.rstrip(".")), []).append(" ".join(map(str, row.what.values())))
    return [f"{label}: {', '.join(cases)} ({reason})" for (label, reason), cases in found.items()]
