"""What a run reports: written while it trains, by any number of writers, and checked when it resumes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from jaxnn.record._checkpoints import Log
from jaxnn.record._record_reader import numbers, read_bytes
from jaxnn.record._run_directory import (
    LOCK_FILE,
    METRICS_FILE,
    json_line,
    locked,
    refusals,
    write_bytes,
    write_json,
)
from jaxnn.types import RecordError

type Line = dict[str, Any]


class MetricWriter(Protocol):
    """A place that metrics go to besides ``metrics.jsonl``: a tracking service, a table, a queue.

    It is called by the training thread of the process that writes the record, so it should return at once. A run that
    resumes writes the lines after its checkpoint again; their ``step`` shows it. If it has a ``close()``, it is closed
    at the end.

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
    """An open run directory and its held lock; None in all but one of the processes of a run, which write nothing.

    All that writes raises RecordError where the disk refuses, and leaves what was there as it was.
    """

    path: Path
    lock: IO[str] | None

    @property
    def writes(self) -> bool:
        """Whether this process writes the directory; RecordError if it is no longer the one that was locked."""
        if self.lock is None:
            return False
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path / LOCK_FILE), os.fstat(self.lock.fileno())):
                return True
        raise RecordError(
            f"the run directory {self.path} was removed or renamed, or its {LOCK_FILE} deleted, while its run was "
            "writing it: leave it where it is until the run is over."
        )

    def report(self, *lines: Mapping[str, Any]) -> list[bytes]:
        """Appends lines to ``metrics.jsonl`` and hands them to the system at once; returns them as written."""
        written, file = [json_line(line).encode() for line in lines], self.path / METRICS_FILE
        if not self.writes:
            return written
        # Opened for each report, since resuming replaces the file. Unbuffered: a buffer that could not be written would
        # be written again when it is closed.
        with refusals(file), file.open("ab", buffering=0) as log:
            before, content = log.tell(), b"".join(written)
            try:
                while content:
                    content = content[log.write(content) :]
            except OSError:
                log.truncate(before)
                raise
        return written

    def log(self, digest: LogDigest) -> Log:
        """The part of ``metrics.jsonl`` that belongs to a checkpoint that is saved now."""
        return Log(self.path / METRICS_FILE, digest.lines, digest.sha256)

    def write(self, name: str, content: Mapping[str, Any] | list[Any]) -> None:
        """Replaces a JSON file of the record, such as ``run.json``."""
        if self.writes:
            write_json(self.path / name, content)


@contextlib.contextmanager
def open_record(path: Path, *, writes: bool = True) -> Iterator[Record]:
    """Locks the existing run directory ``path`` and opens it; RecordError if another process writes it, or none can.

    ``writes`` is False for all but one of the processes of a run: they lock and write nothing.
    """
    with locked(path) if writes else contextlib.nullcontext() as lock:
        yield Record(path, lock)


class LogDigest:
    """The number and the SHA-256 of consecutive ``lines``, each with its end."""

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


def rewind_metrics(
    path: Path,
    end_of: Callable[[Line], int],
    noted: Mapping[str, Any] | None,
    where: str,
    members: Sequence[int] | None = None,
) -> tuple[list[Line], LogDigest, str | None]:
    """Cuts ``metrics.jsonl`` in ``path`` to what belongs to a checkpoint; a damaged log is cut where its damage begins.

    Whatever is lost is kept in a file beside it. RecordError if the disk refuses.

    Args:
        path: the run directory.
        end_of: from a line to the last step of the checkpoint that it may have.
        noted: the ``lines`` and the ``sha256`` that belong to the checkpoint; None if there is no checkpoint.
        where: the checkpoint, for messages.
        members: in a sweep, those whose checkpoint it is; the lines of others stay.

    Returns:
        The lines that were kept, their digest, and what to tell the user if they are not those that were reported.
    """
    file = path / METRICS_FILE
    content = read_bytes(file)
    others, lines = list[bytes](), list[bytes]()
    for raw in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        member = None if members is None else _parsed(raw).get("member", members[0])
        (lines if members is None or member in members else others).append(raw)
    kept, told = lines[: noted["lines"]] if noted is not None else [], None
    digest = LogDigest(kept)
    if noted is None and lines:
        told = f"there is no checkpoint of {where}, so that it starts again; what it had reported is kept in {{}}"
    elif noted is not None and (digest.lines, digest.sha256) != (noted["lines"], noted["sha256"]):
        digest = LogDigest(kept := _undamaged(lines, end_of))
        lost = noted["lines"] - digest.lines
        loss = (
            f"{lost} of {noted['lines']} lines are lost" if lost > 0 else "its lines are not those that were reported"
        )
        told = f"{file} is damaged up to {where}, {loss}; the file as it was found is {{}}"
    if told is not None:
        names = (file.with_name(f"{file.stem}.damaged-{number}{file.suffix}") for number in itertools.count(1))
        write_bytes(aside := next(name for name in names if not name.exists()), content)
        told = told.format(aside)
    if (rewound := b"".join([*others, *kept])) != content:
        write_bytes(file, rewound)
    return [numbers(json.loads(line)) for line in kept], digest, told


def _undamaged(lines: Iterable[bytes], end_of: Callable[[Line], int]) -> list[bytes]:
    """The lines up to their checkpoint, before the first that is no report, or not after its member's last."""
    kept, last = list[bytes](), dict[Any, int]()
    for raw in lines:
        step, member = (line := _parsed(raw)).get("step"), str(line.get("member"))
        if type(step) is not int or step <= last.get(member, 0):
            break
        last[member] = step
        if step <= end_of(line):
            kept.append(raw)
    return kept


def _parsed(raw: bytes) -> Line:
    """What a line says; nothing if it cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(raw)
        return line if isinstance(line, dict) else {}
    return {}
