"""Results of studies: the machine, JSON files, results of several machines merged, and a page in Markdown."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxnn.bench._figures import Quantity, Row, Rows, format_ratio
from jaxnn.bench._study import Finding, Study, find_studies
from jaxnn.observe import cpu_count, describe_devices, device_kind, markdown_table, name_device
from jaxnn.record import git_state, make_room, new_figure, write_bytes, write_json
from jaxnn.types import ConfigError, RecordError

RESULTS_FILE = "results.json"
_FORMAT = 2
# Kinds of device that the page has a column for, measured or not.
_EXPECTED = ("cpu", "gpu")
_INTRODUCTION = (
    "Each figure is the median over rounds, with the least and the greatest in brackets; × is the speed relative to "
    "the first CPU column."
)


class Machine(NamedTuple):
    """A device, the software that measured on it, and when: one column of a table.

    Attributes:
        device: ``cpu``, ``gpu`` or ``tpu``.
        kind: model name of the device.
        cores: CPU cores available to the process.
        load: load average of the last minute before the measurement; None: unknown.
        versions: of Python, JAX, jaxlib and jaxnn.
        commit: of the work tree, with ``+`` if it has changes; None: no work tree.
        date: of the measurement, ``YYYY-MM-DD``.
    """

    device: str
    kind: str
    cores: int
    load: float | None
    versions: Mapping[str, str | None]
    commit: str | None
    date: str

    @property
    def label(self) -> str:
        """Name of the column: ``CPU, AMD EPYC, 2 cores``."""
        return name_device(self.device, self.kind, self.cores)

    def __str__(self) -> str:
        return f"{self.date}, {self.label}, jax {self.versions.get('jax')}"

    def runs_the_same(self, other: Machine) -> bool:
        """Whether both measured with the same committed code and versions."""
        return (self.versions, self.commit) == (other.versions, other.commit) and not (self.commit or "").endswith("+")


def describe_machine(device: jax.Device | None = None) -> Machine:
    """Describes ``device``, by default the first one of this process, and what runs on it now."""
    device = device or jax.devices()[0]
    versions = describe_devices()["versions"]
    git = git_state(Path(__file__).parent, tracked=True)
    return Machine(
        device=device.platform,
        kind=device_kind(device),
        cores=cpu_count() or 1,
        load=round(os.getloadavg()[0], 2),
        versions={name: versions.get(name) for name in ("python", "jax", "jaxlib", "jaxnn")},
        commit=None if git is None else git["commit"][:12] + ("+" if git["dirty"] else ""),
        date=time.strftime("%Y-%m-%d"),
    )


class Part(NamedTuple):
    """The figures of one study on one device; not ``complete`` if the study was interrupted."""

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

    def check_comparable(self, name: str, other: Measured, here: str, there: str) -> None:
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
    studies: dict[str, Any] = {name: measured._asdict() for name, measured in results.items()}
    for study in studies.values():
        parts = [part._asdict() for part in study["parts"].values()]
        study["parts"] = [
            {**part, "machine": part["machine"]._asdict(), "rows": [row._asdict() for row in part["rows"]]}
            for part in parts
        ]
    write_json(folder / RESULTS_FILE, {"format": _FORMAT, "studies": studies})
    return folder / RESULTS_FILE


def read_results(path: Path) -> Results:
    """Reads the file, or the folder, that `write_results` wrote.

    Raises:
        RecordError: it is missing, truncated, of another format, or incomplete; the message names the file.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RecordError(f"{file} is not complete JSON ({error}): measure again, or copy it again.") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise RecordError(f"{file} is not a results file of format {_FORMAT}: give what `jaxnn bench` writes.")
    results = {}
    try:
        for name, study in content["studies"].items():
            parts = [
                Part(
                    Machine(**part["machine"]),
                    Rows(Row(**{**row, "seconds": tuple(row["seconds"])}) for row in part["rows"]),
                    bool(part["complete"]),
                )
                for part in study["parts"]
            ]
            by_label = {part.machine.label: part for part in parts}
            results[name] = Measured(dict(study["definition"]), bool(study["quick"]), by_label)
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{file} is incomplete or was edited ({error!r}): measure again.") from error
    return results


def merge(sources: Sequence[str | Path], out: str | Path) -> Results:
    """Merges the results of several machines into one page.

    Args:
        sources: folders or ``results.json`` files.
        out: folder of the page.

    Raises:
        ConfigError: fewer than two sources.
        RecordError: a source cannot be read; a study is incomplete, was defined differently, or was measured twice on
            one device.
    """
    if len(sources) < 2:
        raise ConfigError("merge needs the results of two machines or more: give their folders.")
    merged: dict[str, Measured] = {}
    first: dict[str, str] = {}
    for there in map(str, sources):
        for name, measured in read_results(Path(there)).items():
            for label, part in measured.parts.items():
                if not part.complete:
                    raise RecordError(f"{there} has incomplete figures of {name} on {label}: measure it again.")
            here, known = first.setdefault(name, there), merged.get(name, measured._replace(parts={}))
            known.check_comparable(name, measured, here, there)
            if both := sorted(set(known.parts) & set(measured.parts)):
                raise RecordError(f"{here} and {there} both have {name} on {both[0]}: leave one of them out.")
            merged[name] = known._replace(parts={**known.parts, **measured.parts})
    write_page(merged, Path(out), find_studies(), list(merged))
    return merged


def write_page(results: Results, folder: Path, studies: Mapping[str, Study], changed: Sequence[str]) -> None:
    """Writes ``results.json``, ``results.md`` and the pictures of ``changed`` studies, or that do not exist."""
    write_results(results, folder)
    for name in results:
        picture = folder / f"{name}.png"
        if name in studies and (name in changed or not picture.exists()):
            figure, content = new_figure(layout="constrained"), io.BytesIO()
            studies[name].draw(results[name].rows, figure)
            figure.savefig(content, format="png", dpi=110)
            write_bytes(picture, content.getvalue())
    write_bytes(folder / "results.md", make_page(results, studies).encode())


def make_page(results: Results, studies: Mapping[str, Study]) -> str:
    """The page as Markdown: the machines, then a section for each of ``studies`` that was measured."""
    quick = sorted(name for name, measured in results.items() if measured.quick)
    blocks = [
        "# Measured figures",
        _INTRODUCTION + (f" Measured with quick settings: {', '.join(quick)}." if quick else ""),
        markdown_table(_machine_rows(results), ("device", "versions", "commit", "date", "load before a study")),
    ]
    for name, study in studies.items():
        if name not in results:
            continue
        measured = results[name]
        title = name + (f" ({', '.join(study.claims)})" if study.claims else "")
        blocks += [f"## {title}", f"{study.title} {study.method}", markdown_table(*findings_table(study, results))]
        blocks += [*study.conclude(measured.rows), f"![{study.title}]({name}.png)"]
        reasons: dict[tuple[str, str], list[str]] = {}
        for label, part in measured.parts.items():
            if not part.complete:
                blocks.append(f"Interrupted on {label} after {len(part.rows)} cases: measure it again.")
                continue
            for row in filter(lambda row: row.missing, part.rows):
                cases = reasons.setdefault((label, row.missing.rstrip(".")), [])
                cases.append(" ".join(map(str, row.what.values())))
        if told := [f"{label}: {', '.join(cases)} ({reason})" for (label, reason), cases in reasons.items()]:
            blocks.append(f"Not measured: {'; '.join(told)}.")
    if missing := [name for name in studies if name not in results]:
        blocks += ["## Not measured", f"{', '.join(missing)}."]
    return "\n\n".join(blocks) + "\n"


def _machines(results: Results) -> dict[str, Machine | None]:
    """The columns of the page by label, CPUs first; None for an expected kind that was not measured."""
    found = {label: part.machine for measured in results.values() for label, part in measured.parts.items()}
    kinds = {machine.device for machine in found.values()}
    absent: dict[str, Machine | None] = {kind.upper(): None for kind in _EXPECTED if kind not in kinds}
    return dict(sorted((found | absent).items()))


def _machine_rows(results: Results) -> Iterable[tuple[str, ...]]:
    """One row per device; a page may have been measured with several versions, commits and dates."""
    for label in _machines(results):
        used = [measured.parts[label].machine for measured in results.values() if label in measured.parts]
        versions = (", ".join(f"{name} {value}" for name, value in one.versions.items() if value) for one in used)
        columns = versions, (one.commit or "" for one in used), (one.date for one in used)
        texts = ["; ".join(dict.fromkeys(filter(None, column))) for column in columns]
        loads = [one.load for one in used if one.load is not None]
        yield label, texts[0] or "not measured", *texts[1:], f"{min(loads):.1f} to {max(loads):.1f}" if loads else ""


def findings_table(study: Study, results: Results) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Rows and header: claim, what was measured, the article's figure, and a column per machine of ``results``."""
    machines = _machines(results)
    found = {label: study.findings(rows) for label, rows in results[study.name].rows.items()}
    by_label = {label: {(one.claim, one.what): one for one in findings} for label, findings in found.items()}
    base = next((label for label, machine in machines.items() if machine is not None and machine.device == "cpu"), None)
    table = []
    for key in dict.fromkeys(key for findings in by_label.values() for key in findings):
        known = {label: findings[key] for label, findings in by_label.items() if key in findings}
        article = next((one.article for one in known.values() if one.article), "–")
        reference = known[base].quantity if base in known else None
        cells = (_cell(known.get(label), None if label == base else reference) for label in machines)
        table.append((*key, article, *cells))
    if study.claims:
        return table, ("claim", "what", "the article", *machines)
    return [(row[1], *row[3:]) for row in table], ("what", *machines)  # a study of one's own has no article


def _cell(finding: Finding | None, reference: Quantity | None) -> str:
    if finding is None or finding.quantity is None:
        return (finding.note if finding is not None else "") or "not measured"
    figure = finding.quantity
    text = str(figure)
    speed = figure.unit == "s" or figure.unit.endswith("/s")
    if speed and finding.comparable and reference is not None and reference.unit == figure.unit:
        if figure.median and reference.median:
            ratio = figure.median / reference.median
            text += f", {format_ratio(1 / ratio if figure.unit == 's' else ratio)}"
    return f"{text}; {finding.note}" if finding.note else text
