"""Reading records back: one run, its metrics, or all runs and sweeps below a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxnn.record.directory import METRICS_FILE, RUN_FILE, check_name, is_locked
from jaxnn.record.directory import SWEEP_FILE as SWEEP_FILE
from jaxnn.record.schema import RUN, SWEEP, check_facts
from jaxnn.types import RecordError

# What makes a directory that of a sweep besides the file itself: shards that have it.
SHARDS = f"shards/*/{SWEEP_FILE}"
# How metrics are told from the rest of a line: by the split they were measured on.
METRIC_PREFIXES = ("train_", "validation_", "test_")
# What every run.json holds from the start, and readers rely on.
FACTS = (
    "name",
    "status",
    "started",
    "config",
    "options",
    "steps_per_call",
    "seconds_per_step_measured",
    "fingerprint",
    "layout",
    "devices",
    "jax_flags",
)


def read_run(path: Path) -> dict[str, Any]:
    """What ``run.json`` in ``path`` says.

    A run that says it is running while no process holds its directory was killed: its status reads ``interrupted``.

    Raises:
        RecordError: there is no record, or it is damaged.
    """
    check_name(path)
    file = path / RUN_FILE
    if not file.is_file():
        raise RecordError(
            f"{path} holds no run (no {RUN_FILE} in it): give the directory of one run; `jaxnn runs` lists them."
        )
    return read_facts(file, FACTS)


def read_facts(file: Path, needed: tuple[str, ...]) -> dict[str, Any]:
    """What ``run.json`` or ``sweep.json`` says; ``running`` reads ``interrupted`` where no process holds its directory.

    Raises:
        RecordError: it is damaged: not JSON, without one of ``needed``, or with a value that cannot be.
    """
    schema = RUN if file.name == RUN_FILE else SWEEP
    try:
        facts = check_facts(parse_json(file.read_bytes()), schema, needed)
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read ({error}): the record is damaged.") from error
    if facts["status"] == "running" and not is_locked(file.parent):
        facts["status"] = "interrupted"
    return facts


def parse_json(text: bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is not JSON, or holds NaN or infinities, which have names in records.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` in ``path``, oldest first; a torn last line, left by a crash, is dropped.

    Raises:
        RecordError: a line is no mapping of names to numbers with a step.
    """
    lines = [numbers(line) for line in read_lines(path / METRICS_FILE)]
    for line in lines:
        values = [line.get("step"), *metrics_of(line).values()]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
            raise RecordError(
                f"{path / METRICS_FILE} holds {str(line)[:60]!r}, which is no step with its metrics: delete that line."
            )
    return lines


def read_bytes(file: Path) -> bytes:
    """What a file of the record holds; nothing if there is none.

    Raises:
        RecordError: the system refuses to read it.
    """
    try:
        return file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise RecordError(f"{file} cannot be read ({error.strerror or error}): the record is damaged.") from error


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The mappings in a file of JSON lines, oldest first; a torn last line is dropped, and no file holds none.

    Raises:
        RecordError: a line is no mapping.
    """
    lines = read_bytes(file).splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    try:
        return [_mapping(parse_json(line)) for line in lines]
    except ValueError as error:
        raise RecordError(f"{file} holds a line that is not JSON ({error}): delete that line.") from error


def find_runs(folder: Path) -> Iterator[Path]:
    """The directories at or below ``folder`` that hold a run, oldest first and those that are damaged before all.

    The members of a sweep are not among them: the sweep stands for them, see :func:`find_sweeps`.
    """
    return iter(sorted((path for path in _outside_sweeps(folder) if (path / RUN_FILE).is_file()), key=age))


def find_sweeps(folder: Path) -> Iterator[Path]:
    """The directories at or below ``folder`` that hold a sweep, in the same order."""
    return iter(sorted((path for path in _outside_sweeps(folder) if is_sweep(path)), key=age))


def is_sweep(path: Path) -> bool:
    """Whether the directory ``path`` holds a sweep, or shards of one."""
    try:
        return (path / SWEEP_FILE).is_file() or any(path.glob(SHARDS))
    except OSError:  # a name that is too long, say
        return False


def _outside_sweeps(folder: Path) -> Iterator[Path]:
    """The directories at or below ``folder``, those of sweeps among them but nothing that is in one."""
    for path, folders, _ in folder.walk():
        yield path
        if is_sweep(path):
            folders.clear()


def age(path: Path) -> tuple[str, str]:
    """What records are sorted by: when they began, or their name where that is the same or unknown."""
    for file in (path / RUN_FILE, path / SWEEP_FILE, *sorted(path.glob(SHARDS))):
        try:
            return str(read_facts(file, ("status", "started"))["started"]), path.name
        except RecordError:
            continue
    return "", path.name


def _mapping(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise ValueError(f"{line!r} is no mapping")
    return line


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes the names that stand for NaN and infinities."""
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}


def final_metrics(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of each metric in the lines of ``metrics.jsonl``, oldest first."""
    final: dict[str, float] = {}
    for line in lines:
        final |= metrics_of(line)
    return final


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among what a line of ``metrics.jsonl`` holds."""
    return {name: value for name, value in line.items() if name.startswith(METRIC_PREFIXES)}
