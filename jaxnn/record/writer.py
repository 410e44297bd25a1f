"""Writing a record while a run goes on, so that a run that dies leaves one that can be read and resumed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from jaxnn.checkpoints import Log
from jaxnn.record.directory import (
    METRICS_FILE,
    RUN_FILE,
    append_lines,
    check_held,
    json_line,
    locked,
    write_bytes,
    write_json,
)
from jaxnn.record.log import LogDigest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Record(NamedTuple):
    """An open run directory.

    All that writes raises RecordError where the disk refuses, and leaves what was there as it was.

    Attributes:
        path: the directory.
        lock: its lock, held; None in all but one of the processes of a run, whose writing comes to nothing.
    """

    path: Path
    lock: IO[str] | None

    @property
    def writes(self) -> bool:
        """Whether this process writes the directory.

        Raises:
            RecordError: it is no longer the one that was locked.
        """
        if self.lock is not None:
            check_held(self.path, self.lock)
        return self.lock is not None

    def report(self, *lines: Mapping[str, Any]) -> list[bytes]:
        """Appends lines to ``metrics.jsonl`` and hands them to the system at once; returns them as written."""
        written = [json_line(line).encode() for line in lines]
        if self.writes:
            # Opened anew each time: resuming replaces the file, and a handle would keep writing to the old one.
            append_lines(self.path / METRICS_FILE, written)
        return written

    def log(self, digest: LogDigest) -> Log:
        """What of ``metrics.jsonl`` belongs to a checkpoint that is saved now.

        Raises:
            RecordError: the directory is no longer the one that was locked.
        """
        if self.lock is not None:
            check_held(self.path, self.lock)
        return Log(self.path / METRICS_FILE, digest.lines, digest.sha256)

    def describe(self, run: Mapping[str, Any]) -> None:
        """Replaces ``run.json``."""
        self.write(RUN_FILE, run)

    def write(self, name: str, content: Mapping[str, Any] | list[Any]) -> None:
        """Replaces another JSON file of the record."""
        if self.writes:
            write_json(self.path / name, content)

    def draw(self, name: str, figure: Figure) -> None:
        """Replaces a picture of the record by the matplotlib ``figure``."""
        if not self.writes:
            return
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=120)
        write_bytes(self.path / name, drawn.getvalue())


@contextlib.contextmanager
def open_record(path: Path, *, writes: bool = True) -> Iterator[Record]:
    """Locks the existing run directory ``path`` and opens it for writing.

    Args:
        path: the directory.
        writes: False for all but one of the processes of a run: they lock and write nothing.

    Raises:
        RecordError: another process is writing it, or it cannot be written.
    """
    with locked(path) if writes else contextlib.nullcontext() as lock:
        yield Record(path, lock)
