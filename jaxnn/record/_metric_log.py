"""What a run reports: written while it trains, by any number of writers, and checked when it resumes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxnn.record._record_reader import numbers, read_bytes
from jaxnn.record._run_directory import METRICS_FILE, write_bytes

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


class LogDigest:
    """The number and the SHA-256 of consecutive ``lines``, each with its end, of the log ``file``."""

    def __init__(self, file: Path, lines: Iterable[bytes] = ()) -> None:
        self.file = file
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
        """The digest, in hexadecimal."""
        return self._digest.hexdigest()


def rewind_metrics(
    path: Path,
    end_of: Callable[[Line], int],
    noted: Mapping[str, Any] | None,
    where: str,
    members: Sequence[int] | None = None,
) -> tuple[list[Line], LogDigest, str | None]:
    """Cuts ``metrics.jsonl`` in ``path`` to the lines of a checkpoint; a damaged log is cut where its damage begins.

    ``noted`` are the ``lines`` and the ``sha256`` that belong to the checkpoint ``where``, None if there is none;
    ``end_of`` gives the last step that belongs to it, from a line. In a sweep it is the checkpoint of ``members``, and
    the lines of others stay. Returns the lines that were kept, their digest, and a message if they are not those that
    were reported; a file beside the log then keeps what is lost. RecordError if the disk refuses.
    """
    file = path / METRICS_FILE
    content = read_bytes(file)
    others, lines = list[bytes](), list[bytes]()
    for raw in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        member = None if members is None else _parsed(raw).get("member", members[0])
        (lines if members is None or member in members else others).append(raw)
    kept, message = lines[: noted["lines"]] if noted is not None else [], None
    digest = LogDigest(file, kept)
    if noted is None and lines:
        message = f"there is no checkpoint of {where}, so that it starts again; what it had reported is kept in"
    elif noted is not None and (digest.lines, digest.sha256) != (noted["lines"], noted["sha256"]):
        digest = LogDigest(file, kept := _undamaged(lines, end_of, members))
        lost, loss = noted["lines"] - digest.lines, "its lines are not those that were reported"
        if lost > 0:
            loss = f"{lost} of {noted['lines']} lines are lost"
        message = f"{file} is damaged up to {where}, {loss}; the file as it was found is"
    if message is not None:
        names = (file.with_name(f"{file.stem}.damaged-{number}{file.suffix}") for number in itertools.count(1))
        write_bytes(aside := next(name for name in names if not name.exists()), content)
        message = f"{message} {aside}"
    if (rewound := b"".join([*others, *kept])) != content:
        write_bytes(file, rewound)
    return [numbers(json.loads(line)) for line in kept], digest, message


def _undamaged(lines: Iterable[bytes], end_of: Callable[[Line], int], members: Sequence[int] | None) -> list[bytes]:
    """The lines up to their checkpoint, before the first that is no report, or not after its member's last."""
    kept, last = list[bytes](), dict[Any, int]()
    for raw in lines:
        line = _parsed(raw)
        step, member = line.get("step"), None if members is None else line.get("member")
        is_known = members is None or member in members
        if type(step) is not int or not is_known or step <= last.get(member, 0):
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
