"""Studies measured on the devices at hand, and their figures as JSON and as a page of several machines in Markdown."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxnn.bench._study import Bench, Finding, Row, Rows, Study, find_studies, measure_group
from jaxnn.observe import describe_devices, device_name, markdown_table
from jaxnn.parallel import first_devices
from jaxnn.record import git_state, make_room, new_figure, write_bytes, write_json
from jaxnn.types import ConfigError, RecordError

_FILE = "results.json"
_FORMAT = 3


class Machine(NamedTuple):
    """A device, the software that measured on it, and when.

    ``label`` names its column, ``CPU, AMD EPYC, 2 cores``; ``versions`` are those of Python, JAX, jaxlib and jaxnn,
    ``commit`` is that of the work tree, with ``+`` if it has changes (None: no work tree), ``date`` ``YYYY-MM-DD``.
    """

    label: str
    versions: Mapping[str, str | None]
    commit: str | None
    date: str

    def __str__(self) -> str:
        return f"{self.date}, {self.label}, jax {self.versions.get('jax')}"


def describe_machine(device: jax.Device | None = None) -> Machine:
    """Describes ``device``, by default the first one of this process, and what runs on it now."""
    versions = describe_devices()["versions"]
    git = git_state(Path(__file__).parent, tracked=True)
    return Machine(
        label=device_name(device or jax.devices()[0]),
        versions={name: versions.get(name) for name in ("python", "jax", "jaxlib", "jaxnn")},
        commit=None if git is None else git["commit"][:12] + ("+" if git["dirty"] else ""),
        date=time.strftime("%Y-%m-%d"),
    )


class Measured(NamedTuple):
    """The figures of one study: what must be equal for figures to be comparable, and the figures by machine's label."""

    definition: Mapping[str, Any]
    parts: Mapping[str, tuple[Machine, Rows]]

    @property
    def rows(self) -> dict[str, Rows]:
        """The rows by the label of the machine."""
        return {label: rows for label, (_, rows) in self.parts.items()}

    def joined(self, new: Measured, where: str) -> Measured:
        """Both, new figures of a machine in place of old; RecordError if not comparable ones would be lost."""
        if self.definition == new.definition:
            return new._replace(parts={**self.parts, **new.parts})
        if set(self.parts) <= set(new.parts):
            return new
        raise RecordError(
            f"{where} has {self.definition['study']} defined differently, {self.definition} and not {new.definition}: "
            "measure again, both quick or both full, with one version of jaxnn."
        )


type Results = Mapping[str, Measured]
"""Figures by name of the study."""


def bench(
    *studies: Study,
    devices: Sequence[str] | None = None,
    quick: bool = False,
    out: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> Results:
    """Measures ``studies`` and returns their figures by name.

    Figures in ``out`` are kept, except those of the same study and device: a page may be made study by study, and an
    interruption loses the figures of one study.

    Args:
        *studies: what to measure, see `find_studies`.
        devices: kinds, such as ``("cpu", "gpu")``; None: all available.
        quick: small sizes and few rounds.
        out: folder that gets ``results.json``, ``results.md`` and pictures; None: nothing is written.
        say: gets one line per step.

    Raises:
        ConfigError: a device is not available.
        RecordError: ``out`` has figures of another definition from another device, or cannot be written.
    """
    folder = None if out is None else Path(out)
    found = first_devices(devices)
    machines = {kind: describe_machine(device) for kind, device in found.items()}
    page = dict(read_results(folder)) if folder is not None and (folder / _FILE).exists() else {}

    def add(study: Study, rows: Mapping[str, Sequence[Row]]) -> Measured:
        parts = {machine.label: (machine, Rows(rows[kind])) for kind, machine in machines.items()}
        new = Measured(study.definition(study.quick if quick else study.full), parts)
        return page.get(study.name, new).joined(new, str(folder))

    for study in studies:
        add(study, dict.fromkeys(found, ()))  # refused before anything is measured in vain
    if folder is not None:
        make_room(folder)
    for study in studies:
        say(f"{study.name}: {study.title}")
        context = Bench(found, study.quick if quick else study.full)
        rows: dict[str, list[Row]] = {kind: [] for kind in found}
        for group in filter(None, study.cases(context)):  # a group may be empty: too large for every device here
            started = time.perf_counter()
            for case, row in zip(group, measure_group(group, context.settings), strict=True):
                rows[case.device].append(row)
            names = " ".join(map(str, group[0].what.values()))
            say(f"{study.name}: {names}, {len(group)} cases: {time.perf_counter() - started:.1f} s")
        page[study.name] = add(study, rows)
        if folder is not None:
            write_page(page, folder, find_studies() | {each.name: each for each in studies}, [study.name])
    return {study.name: page[study.name] for study in studies}


def merge(sources: Sequence[str | Path], out: str | Path) -> Results:
    """Merges the results of several machines, folders or ``results.json`` files, into one page in the folder ``out``.

    Raises:
        ConfigError: fewer than two sources.
        RecordError: a source cannot be read; a study was defined differently, or was measured twice on one device.
    """
    if len(sources) < 2:
        raise ConfigError("merge needs the results of two machines or more: give their folders.")
    merged: dict[str, Measured] = {}
    for source in sources:
        for name, measured in read_results(Path(source)).items():
            known = merged.get(name, measured._replace(parts={}))
            if both := sorted(set(known.parts) & set(measured.parts)):
                raise RecordError(f"{source} has {name} on {both[0]}, and so has one before it: leave one of them out.")
            merged[name] = known.joined(measured, f"a folder before {source}")
    write_page(merged, Path(out), find_studies(), merged)
    return merged


def read_results(path: Path) -> Results:
    """Reads the file, or the folder, that `write_page` wrote; raises RecordError if it is missing or damaged."""
    file = path / _FILE if path.is_dir() else path
    results = {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']}, not {_FORMAT}")
        for name, study in content["studies"].items():
            parts = {}
            for part in study["parts"]:
                rows = Rows(Row(**{**row, "seconds": tuple(row["seconds"])}) for row in part["rows"])
                parts[part["machine"]["label"]] = Machine(**part["machine"]), rows
            results[name] = Measured(study["definition"], parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{file} cannot be read ({error!r}): give what `jaxnn bench` wrote, all of it.") from error
    return results


def write_page(results: Results, folder: Path, studies: Mapping[str, Study], changed: Iterable[str]) -> None:
    """Writes ``results.json``, ``results.md`` and the pictures of the studies ``changed``; raises RecordError."""
    make_room(folder)
    content = {}
    for name, measured in results.items():
        parts = [(machine._asdict(), [row._asdict() for row in rows]) for machine, rows in measured.parts.values()]
        columns = [{"machine": machine, "rows": rows} for machine, rows in parts]
        content[name] = {"definition": measured.definition, "parts": columns}
    write_json(folder / _FILE, {"format": _FORMAT, "studies": content})
    for name in set(changed) & set(studies):
        figure, picture = new_figure(layout="constrained"), io.BytesIO()
        studies[name].draw(results[name].rows, figure)
        figure.savefig(picture, format="png", dpi=110)
        write_bytes(folder / f"{name}.png", picture.getvalue())
    write_bytes(folder / "results.md", make_page(results, studies).encode())


def make_page(results: Results, studies: Mapping[str, Study]) -> str:
    """The page as Markdown: the machines, then a section for each of ``studies`` that was measured."""
    machines = set()
    for machine, _ in (part for measured in results.values() for part in measured.parts.values()):
        versions = ", ".join(f"{package} {version}" for package, version in machine.versions.items() if version)
        machines.add((machine.label, versions, machine.commit or "", machine.date))
    figures = "Figures are medians over rounds, with minimum and maximum; × is the speed relative to the first column."
    table = markdown_table(sorted(machines), ("device", "versions", "commit", "date"))
    blocks = ["# Measured figures", figures, table]
    for name, study in studies.items():
        if name not in results:
            continue
        claims = f" ({', '.join(study.claims)})" if study.claims else ""
        quick = " Quick settings." if study.definition(study.quick) == results[name].definition else ""
        blocks += [f"## {name}{claims}", f"{study.title} {study.method}{quick}"]
        blocks += [markdown_table(*findings_table(study, results)), *study.conclude(results[name].rows)]
        blocks.append(f"![{study.title}]({name}.png)")
        reasons: dict[tuple[str, str], list[str]] = {}
        for label, rows in results[name].rows.items():
            for row in filter(lambda row: row.missing, rows):
                case = " ".join(map(str, row.what.values()))
                reasons.setdefault((label, row.missing.rstrip(".")), []).append(case)
        blocks += [f"Not measured on {label}: {', '.join(cases)} ({why})." for (label, why), cases in reasons.items()]
    return "\n\n".join(blocks) + "\n"


def findings_table(study: Study, results: Results) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Rows and header: claim, what was measured, the article's figure (if there are claims), a column per machine."""
    labels = sorted({label for measured in results.values() for label in measured.parts})
    base = labels[0]  # a CPU, if there is one
    found: dict[tuple[str, str], dict[str, Finding]] = {}
    for label, rows in results[study.name].rows.items():
        for one in study.findings(rows):
            found.setdefault((one.claim, one.what), {})[label] = one
    table = []
    for (claim, what), known in found.items():
        article = next((one.article for one in known.values() if one.article), "–")
        reference = known[base].quantity if base in known else None
        texts = {label: one.text(None if label == base else reference) for label, one in known.items()}
        cells = [texts.get(label, "not measured") for label in labels]
        table.append((claim, what, article, *cells) if study.claims else (what, *cells))
    return table, ("claim", "what", "the article", *labels) if study.claims else ("what", *labels)
