"""Writing a record while a run goes on, so that a run that dies leaves one that can be read and resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.record.directory import (
    METRICS_FILE,
    RUN_FILE,
    json_line,
    locked,
    write_json,
    write_text,
)
from jaxnn.record.reader import read_metrics


class Record(NamedTuple):
    """An open run directory.

    Attributes:
        path: the directory; its lock is held.
    """

    path: Path

    def report(self, *lines: Mapping[str, Any]) -> None:
        """Appends lines to ``metrics.jsonl`` and hands them to the system at once."""
        # Opened anew each time: resuming replaces the file, and a handle would keep writing to the old one.
        with (self.path / METRICS_FILE).open("a") as file:
            file.writelines(map(json_line, lines))

    def describe(self, run: Mapping[str, Any]) -> None:
        """Replaces ``run.json``."""
        write_json(self.path / RUN_FILE, run)

    def write(self, name: str, content: Mapping[str, Any] | list[Any]) -> None:
        """Replaces another JSON file of the record."""
        write_json(self.path / name, content)


@contextlib.contextmanager
def open_record(path: Path) -> Iterator[Record]:
    """Locks the existing run directory ``path`` and opens it for writing.

    Raises:
        RecordError: another process is writing it.
    """
    with locked(path):
        yield Record(path)


def rewind_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops the lines of ``metrics.jsonl`` after ``step``, which a resumed run will write again; returns the rest."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_text(path / METRICS_FILE, "".join(map(json_line, kept)))
    return kept
