"""Runs studies and stores their results, as JSON and as a Markdown page of one or more machines."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from harness._study import Bench, Finding, Row, Rows, Study, find_studies
from harness._timer import measure
from jaxnn._disk import make_room, write_bytes, write_json
from jaxnn._figures import new_figure
from jaxnn._provenance import git_state
from jaxnn.observe import describe_devices, device_name
from jaxnn.parallel import first_devices
from jaxnn.types import ConfigError, RecordError

_FILE, _FORMAT = "results.json", 4


class Machine(NamedTuple):
    """A device, the software that ran on it, and the date.

    ``label`` names its column, ``CPU, AMD EPYC, 2 cores``; ``versions`` are those of Python, JAX, jaxlib and jaxnn;
    ``commit`` is that of the work tree, with ``+`` if it has changes (None: no work tree); ``date`` is ``YYYY-MM-DD``.
    """

    label: str
    versions: Mapping[str, str | None]
    commit: str | None
    date: str

    def __str__(self) -> str:
        return f"{self.date}, {self.label}, jax {self.versions.get('jax')}"


def describe_machine(device: jax.Device | None = None) -> Machine:
    """Describes ``device``, by default the first of this process, with the versions and commit in use."""
    versions = describe_devices()["versions"]
    git = git_state(Path(__file__).parent)
    return Machine(
        label=device_name(device or jax.devices()[0]),
        versions={name: versions.get(name) for name in ("python", "jax", "jaxlib", "jaxnn")},
        commit=None if git is None else git["commit"][:12] + ("+" if git["dirty"] else ""),
        date=time.strftime("%Y-%m-%d"),
    )


class Part(NamedTuple):
    """What one machine measured of a study, and the definition that it followed."""

    machine: Machine
    definition: Mapping[str, Any]
    rows: Rows


class Measured(NamedTuple):
    """Results of one study, by the machine's label. Only those of one definition are compared."""

    parts: Mapping[str, Part]

    @property
    def rows(self) -> dict[str, Rows]:
        """The rows by the label of the machine."""
        return {label: part.rows for label, part in self.parts.items()}

    def alike(self, label: str) -> dict[str, Rows]:
        """Returns the rows of all machines that followed the definition of the machine ``label``."""
        same = self.parts[label].definition
        return {other: part.rows for other, part in self.parts.items() if part.definition == same}

    def conclusions(self, study: Study) -> list[str]:
        """Returns what ``study`` concludes from each group of machines with the same definition."""
        groups = {tuple(self.alike(label)): self.alike(label) for label in self.parts}
        return [sentence for columns in groups.values() for sentence in study.conclude(columns)]


type Results = Mapping[str, Measured]


def bench(
    *studies: Study,
    devices: Sequence[str] | None = None,
    quick: bool = False,
    out: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> Results:
    """Measures ``studies`` and returns their results by name.

    Results in ``out`` are kept, except those of the same study and device: a page can be built study by study, and an
    interruption loses one study. Devices with other settings are not compared.

    Args:
        *studies: what to measure, see `find_studies`.
        devices: kinds, such as ``("cpu", "gpu")``; None: all available.
        quick: use small sizes and few rounds.
        out: folder for ``results.json``, ``results.md`` and figures; None: nothing is written.
        say: is called with one line per step.

    Raises ConfigError if a device is not available, RecordError if ``out`` cannot be read or written.

    >>> results = harness.bench(harness.find_studies()["bandwidth"], devices=("cpu",), quick=True)
    bandwidth: A GPU has its own memory...
    >>> for machine, rows in results["bandwidth"].rows.items():
    ...     print(machine, rows.one(operation="copy", size=2**26).rate)
    CPU, ... cores ... GB/s ...
    """
    folder = None if out is None else Path(out)
    found = first_devices(devices)
    machines = {kind: describe_machine(device) for kind, device in found.items()}
    page = dict(read_results(folder)) if folder is not None and (folder / _FILE).exists() else {}

    if folder is not None:
        make_room(folder)
    for study in studies:
        say(f"{study.name}: {study.title}")
        context = Bench(found, study.quick if quick else study.full)
        definition = study.definition(context.settings)
        rows: dict[str, list[Row]] = {kind: [] for kind in found}
        started = time.perf_counter()
        for pairs in measure(study, context):
            for case, row in pairs:
                rows[case.device].append(row)
            names = " ".join(map(str, pairs[0][0].what.values()))
            say(f"{study.name}: {names}, {len(pairs)} cases: {time.perf_counter() - started:.1f} s")
            started = time.perf_counter()
        new = {one.label: Part(one, definition, Rows(rows[kind])) for kind, one in machines.items()}
        page[study.name] = Measured({**(page[study.name].parts if study.name in page else {}), **new})
        if folder is not None:
            write_page(page, folder, find_studies() | {each.name: each for each in studies}, [study.name])
    return {study.name: page[study.name] for study in studies}


def merge(sources: Sequence[str | Path], out: str | Path) -> Results:
    """Merges results of several machines, folders or ``results.json`` files, into one page in the folder ``out``.

    Machines that measured a study with other settings stand beside each other and are not compared. Raises RecordError
    if a source cannot be read, or a study was measured twice on one device.
    """
    if len(sources) < 2:
        raise ConfigError("merge needs the results of two or more machines: pass their folders.")
    merged: dict[str, Measured] = {}
    for source in sources:
        for name, measured in read_results(Path(source)).items():
            known = merged[name].parts if name in merged else {}
            if both := sorted(set(known) & set(measured.parts)):
                raise RecordError(
                    f"{source} has {name} on {both[0]}, which an earlier folder has too: remove one of them."
                )
            merged[name] = Measured({**known, **measured.parts})
    write_page(merged, Path(out), find_studies(), merged)
    return merged


def read_results(path: Path) -> Results:
    """Reads the results in a folder, or its ``results.json``; raises RecordError if they are missing or damaged."""
    file = path / _FILE if path.is_dir() else path
    results = {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']}, not {_FORMAT}")
        for name, study in content["studies"].items():
            parts = {}
            for part in study:
                rows = Rows(Row(**{**row, "seconds": tuple(row["seconds"])}) for row in part["rows"])
                parts[part["machine"]["label"]] = Part(Machine(**part["machine"]), part["definition"], rows)
            results[name] = Measured(parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{file} cannot be read ({error!r}): pass a file that bench.py wrote.") from error
    return results


def write_page(results: Results, folder: Path, studies: Mapping[str, Study], changed: Iterable[str]) -> None:
    """Writes ``results.json``, ``results.md`` and the figures of the studies ``changed``; raises RecordError."""
    make_room(folder)
    content = {}
    for name, measured in results.items():
        content[name] = [
            {"machine": machine._asdict(), "definition": definition, "rows": [row._asdict() for row in rows]}
            for machine, definition, rows in measured.parts.values()
        ]
    write_json(folder / _FILE, {"format": _FORMAT, "studies": content})
    for name in set(changed) & set(studies):
        figure, picture = new_figure(layout="constrained"), io.BytesIO()
        studies[name].draw(results[name].rows, figure)
        figure.savefig(picture, format="png", dpi=110)
        write_bytes(folder / f"{name}.png", picture.getvalue())
    write_bytes(folder / "results.md", make_page(results, studies).encode())


def markdown_table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """Returns a Markdown table; ``|`` in cells is escaped."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '\\|') for cell in line)} |" for line in lines)


def make_page(results: Results, studies: Mapping[str, Study]) -> str:
    """Returns the page as Markdown: the machines, then a section for each of ``studies`` that was measured."""
    machines = set()
    for machine, *_ in (part for measured in results.values() for part in measured.parts.values()):
        versions = ", ".join(f"{package} {version}" for package, version in machine.versions.items() if version)
        machines.add((machine.label, versions, machine.commit or "", machine.date))
    intro = (
        "Values are medians over rounds, with minimum and maximum; × is the speed relative to the first column with "
        "the same settings."
    )
    table = markdown_table(sorted(machines), ("device", "versions", "commit", "date"))
    blocks = ["# Results", intro, table]
    for name, study in studies.items():
        if name not in results:
            continue
        claims = f" ({', '.join(study.claims)})" if study.claims else ""
        blocks += [f"## {name}{claims}", f"{study.title} {study.method}{_describe_settings(study, results[name])}"]
        blocks += [markdown_table(*findings_table(study, results)), *results[name].conclusions(study)]
        blocks.append(f"![{study.title}]({name}.png)")
        reasons: dict[tuple[str, str], list[str]] = {}
        for label, rows in results[name].rows.items():
            for row in filter(lambda row: row.missing, rows):
                case = " ".join(map(str, row.what.values()))
                reasons.setdefault((label, row.missing.rstrip(".")), []).append(case)
        blocks += [f"Not measured on {label}: {', '.join(cases)} ({why})." for (label, why), cases in reasons.items()]
    return "\n\n".join(blocks) + "\n"


def _describe_settings(study: Study, measured: Measured) -> str:
    """Returns which machines had quick settings, and which measured before sizes grew on accelerators."""
    quick = study.definition(study.quick)
    # A definition of earlier versions may lack a setting.
    brief = [label for label, part in measured.parts.items() if part.definition.items() <= quick.items()]
    text = (
        f" Quick settings{'' if len(brief) == len(measured.parts) else ' on ' + ' and '.join(brief)}." if brief else ""
    )
    fixed = [label for label, part in measured.parts.items() if "grow_until" not in part.definition]
    fixed = [label for label in fixed if "grow_until" in quick and not label.startswith("CPU")]
    return text + (f" On {' and '.join(fixed)} each call was waited for, and sizes did not grow." if fixed else "")


def findings_table(study: Study, results: Results) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Returns rows and header: claim and published value (if there are claims), what was measured, all machines."""
    labels = sorted({label for measured in results.values() for label in measured.parts})
    measured = results[study.name]
    base = {label: min(measured.alike(label)) for label in measured.parts}  # a CPU, if there is one
    found: dict[tuple[str, str], dict[str, Finding]] = {}
    for label, rows in measured.rows.items():
        for one in study.findings(rows):
            found.setdefault((one.claim, one.what), {})[label] = one
    table = []
    for (claim, what), known in found.items():
        article = next((one.article for one in known.values() if one.article), "–")
        texts = {}
        for label, one in known.items():
            other = known.get(base[label]) if base[label] != label else None
            texts[label] = one.text(other.quantity if other is not None and other.comparable else None)
        cells = [texts.get(label, "not measured") for label in labels]
        table.append((claim, what, article, *cells) if study.claims else (what, *cells))
    return table, ("claim", "what", "the article", *labels) if study.claims else ("what", *labels)
