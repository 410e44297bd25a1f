"""Reading records back: one run, its metrics, or a table of all runs below a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxnn.record.directory import METRICS_FILE, RUN_FILE, is_locked
from jaxnn.types import RecordError

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
    "devices",
    "jax_flags",
)


def read_run(path: Path) -> dict[str, Any]:
    """What ``run.json`` in ``path`` says.

    A run that says it is running while no process holds its directory was killed: its status reads ``interrupted``.

    Raises:
        RecordError: there is no record, or it is damaged.
    """
    file = path / RUN_FILE
    if not file.is_file():
        raise RecordError(
            f"{path} holds no run (no {RUN_FILE} in it): give the directory of one run; `jaxnn runs` lists them."
        )
    try:
        run = _whole(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read ({error}): the record is damaged.") from error
    if run.get("status") == "running" and not is_locked(path):
        run["status"] = "interrupted"
    return run


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` in ``path``, oldest first; a torn last line, left by a crash, is dropped."""
    file = path / METRICS_FILE
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    try:
        return [_numbers(json.loads(line)) for line in lines]
    except ValueError as error:
        raise RecordError(f"{file} holds a line that is not JSON ({error}): delete that line.") from error


def find_runs(folder: Path) -> Iterator[Path]:
    """The directories at or below ``folder`` that hold a run, oldest first and those that are damaged before all."""
    found = folder.rglob(RUN_FILE) if folder.is_dir() else []
    return iter(sorted((file.parent for file in found), key=_age))


def _age(path: Path) -> tuple[str, str]:
    """What runs are sorted by: when they began, or their name where that is the same or unknown."""
    try:
        return read_run(path)["started"], path.name
    except RecordError:
        return "", path.name


def _whole(run: Any) -> dict[str, Any]:
    """The content of ``run.json``, once it is known to be all there."""
    missing = [name for name in FACTS if not isinstance(run, dict) or name not in run]
    if missing:
        raise ValueError(f"it lacks {missing[0]!r}")
    whole: dict[str, Any] = run
    return whole


def _numbers(line: Any) -> dict[str, Any]:
    """Undoes the names that stand for NaN and infinities."""
    if not isinstance(line, dict):
        raise ValueError(f"{line!r} is no mapping")
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among what a line of ``metrics.jsonl`` holds."""
    return {name: value for name, value in line.items() if name.startswith(METRIC_PREFIXES)}
