"""What a run reports: written while it trains, by any number of writers, and checked when it resumes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxnn.record._checkpoints import Log
from jaxnn.record._record_reader import numbers, read_bytes
from jaxnn.record._run_directory import (
    METRICS_FILE,
    RUN_FILE,
    append_lines,
    check_held,
    json_line,
    locked,
    write_bytes,
    write_json,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

type Line = dict[str, Any]


class MetricWriter(Protocol):
    """A place that metrics go to besides ``metrics.jsonl``: a tracking service, a table, a queue.

    It is called by the training thread of the process that writes the record, so it should return at once. A run that
    resumes writes the lines after its checkpoint again; their ``step`` shows it. Its ``close()``, if it has one, is
    called at the end.

    >>> class LossPrinter:
    ...     def write(self, lines):
    ...         for line in lines:
    ...             print(line["step"], line["train_loss"])
    >>> LossPrinter().write([{"step": 100, "train_loss": 0.5, "seconds": 0.1}])
    100 0.5
    """

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Takes the lines of one report, one for each member in a sweep: ``step``, metrics and speeds by name."""


class Record(NamedTuple):
    """An open run directory.

    All that writes raises RecordError where the disk refuses, and leaves what was there as it was.

    Attributes:
        path: the directory.
        lock: its lock, held; None in all but one of the processes of a run, which write nothing.
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
            # Opened for each report, since resuming replaces the file.
            append_lines(self.path / METRICS_FILE, written)
        return written

    def log(self, digest: LogDigest) -> Log:
        """The part of ``metrics.jsonl`` that belongs to a checkpoint that is saved now.

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
        """Replaces a picture of the record by the matplotlib ``figure``; may be called by another thread."""
        if self.writes:
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


# --- the log that a checkpoint belongs to ---


class LogDigest:
    """The number and the SHA-256 of consecutive lines.

    Args:
        lines: what was written so far, each with its end.
    """

    def __init__(self, lines: Iterable[bytes] = ()) -> None:
        self.lines = 0
        self._digest = hashlib.sha256()
        self.add(lines)

    def add(self, lines: Iterable[bytes]) -> None:
        """Takes in more lines."""
        for line in lines:
            self.lines += 1
            self._digest.update(line)

    @property
    def sha256(self) -> str:
        """In hexadecimal."""
        return self._digest.hexdigest()

    def fits(self, noted: Mapping[str, Any] | None) -> bool:
        """Whether these are the ``lines`` and the ``sha256`` that were noted."""
        return noted is not None and (noted["lines"], noted["sha256"]) == (self.lines, self.sha256)


def rewind_metrics(
    path: Path,
    end_of: Callable[[Line], int],
    noted: Mapping[str, Any] | None,
    where: str,
    members: Sequence[int] | None = None,
) -> tuple[list[Line], LogDigest, str | None]:
    """Drops from ``metrics.jsonl`` what was reported after a checkpoint, which a resumed run reports again.

    If the lines up to the checkpoint are not those it notes, those that can be read are kept, in the order of their
    steps and each step once; the file as it was found is kept beside it.

    Args:
        path: the run directory.
        end_of: the step of the checkpoint, for a line; in a sweep each member has its own.
        noted: the ``lines`` and the ``sha256`` that belong to the checkpoint; None if there is no checkpoint.
        where: the checkpoint, for messages.
        members: in a sweep, those whose checkpoint it is; the lines of others stay.

    Returns:
        The lines that were kept, their digest, and what to tell the user if they are not those that were reported.

    Raises:
        RecordError: the disk refuses.
    """
    file = path / METRICS_FILE
    content = read_bytes(file)
    others, lines = _split(content, members)
    kept = lines[: noted["lines"]] if noted is not None else []
    told = None
    digest = LogDigest(kept)
    if lines and noted is None:
        told = f"there is no checkpoint of {where}, so that it starts again; what it had reported is kept in {{}}"
    elif noted is not None and not digest.fits(noted):
        kept = _readable(lines, end_of)
        digest = LogDigest(kept)
        told = f"{file} is damaged up to {where}, {_loss(noted, digest)}; the file as it was found is {{}}"
    if told is not None:
        names = (file.with_name(f"{file.stem}.damaged-{number}{file.suffix}") for number in itertools.count(1))
        write_bytes(aside := next(name for name in names if not name.exists()), content)
        told = told.format(aside)
    if (rewound := b"".join([*others, *kept])) != content:
        write_bytes(file, rewound)
    return [numbers(json.loads(line)) for line in kept], digest, told


def check_metrics(path: Path, noted: Mapping[str, Any], where: str, members: Sequence[int]) -> str | None:
    """What to tell the user if the lines of ``members`` are not those that were noted when they were over."""
    file = path / METRICS_FILE
    digest = LogDigest(_split(read_bytes(file), members)[1])
    return None if digest.fits(noted) else f"{file} is damaged for {where}, {_loss(noted, digest)}"


def _loss(noted: Mapping[str, Any], found: LogDigest) -> str:
    if found.fits(noted):
        return "with lines twice or out of order, and is repaired"
    if (lost := noted["lines"] - found.lines) > 0:
        return f"{lost} of {noted['lines']} lines are lost"
    return "its lines are not those that were reported"


def _split(content: bytes, members: Sequence[int] | None) -> tuple[list[bytes], list[bytes]]:
    """The complete lines of others than ``members``, and theirs; what cannot be read is theirs too."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for raw in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        line = None if members is None else _parsed(raw)
        parts[line is None or members is None or line.get("member") in members].append(raw)
    return parts


def _readable(lines: Iterable[bytes], end_of: Callable[[Line], int]) -> list[bytes]:
    """The lines up to their checkpoint that are reports, by member and step, the first of each."""
    found: dict[tuple[str, int], bytes] = {}
    for raw in lines:
        line = _parsed(raw)
        if line is not None and type(step := line.get("step")) is int and 0 < step <= end_of(line):
            found.setdefault((str(line.get("member")), step), raw)
    return [found[key] for key in sorted(found, key=lambda key: key[1])]


def _parsed(raw: bytes) -> Line | None:
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(raw)
        return line if isinstance(line, dict) else None
    return None
