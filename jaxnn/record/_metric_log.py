"""The metrics that a run reports: any number of writers take them, and a resumed run checks those on the disk."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxnn._disk import write_bytes
from jaxnn._figures import draw_picture
from jaxnn._json import numbers
from jaxnn.parallel import is_primary
from jaxnn.record._record_reader import read_bytes
from jaxnn.record._run_directory import METRICS_FILE, Record
from jaxnn.types import ConfigError, RecordError, warn

type Line = dict[str, Any]


class WriterFacts(NamedTuple):
    """The run or the sweep that a metric writer is opened for.

    >>> from jaxnn.record import WriterFacts
    >>> WriterFacts("digits", Path("runs/digits"), {"model": {"depth": 2}}).config
    {'model': {'depth': 2}}
    """

    name: str  # of the experiment
    path: Path | None  # the directory of the record, or None
    config: Mapping[str, Any]  # as in ``record.json``
    members: Mapping[int, Mapping[str, Any]] = {}  # of a sweep the points by member, else empty
    resumed: int | None = None  # the step that a run resumes from, 0 for a sweep; None: it is new


class MetricWriter(Protocol):
    """A destination of metrics in addition to ``metrics.jsonl``: a tracking service, a table, a queue.

    Pass instances as the option ``writers``. The training thread of the process that writes the record calls ``write``,
    which should return quickly. A resumed run writes the lines after its checkpoint again, as their ``step`` shows.
    An exception becomes a warning, and training continues.

    Four more methods are called if there are any: ``open(facts: WriterFacts)`` before the first line;
    ``media(name, content, step)`` with pictures, uint8 ``[height, width, 3]``, and texts, ``str``, of
    probes and the curves at the end; ``flush()`` before each checkpoint, which a resumed run may start from;
    ``close()`` when the record is complete, also if there was no ``open``.

    >>> class LossPrinter:
    ...     def write(self, lines):
    ...         for line in lines:
    ...             print(line["step"], line["train_loss"])
    >>> LossPrinter().write([{"step": 100, "train_loss": 0.5, "seconds": 0.1}])
    100 0.5
    """

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes the lines of one report, one for each member in a sweep: ``step``, metrics and throughput by name."""


class Writers:
    """The metric writers of a run or a sweep; their exceptions become warnings, since the record has every line."""

    def __init__(self, writers: Sequence[Any] = ()) -> None:
        self._writers = writers

    @property
    def take_media(self) -> bool:
        """Whether any of the writers takes pictures and texts."""
        return any(hasattr(writer, "media") for writer in self._writers)

    def open(self, facts: WriterFacts) -> None:
        """Opens the writers, in the process that writes the record; ConfigError or RecordError if one fails."""
        for writer in self._writers if is_primary() else ():
            try:
                getattr(writer, "open", lambda facts: None)(facts)
            except RecordError:
                raise
            except Exception as error:  # any: the service's
                raise ConfigError(
                    f"the writer {type(writer).__name__} cannot be opened ({type(error).__name__}: {error}): check its "
                    "service and its settings, or leave it out."
                ) from error

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Sends the lines of one report; each writer gets copies."""
        for writer in self._writers if is_primary() else ():
            _attempt(writer, "write", [dict(line) for line in lines])

    def media(self, name: str, content: Any, step: int) -> None:
        """Sends a text, or a picture, as `draw_picture` takes it, to the writers that have ``media``."""
        content = content if isinstance(content, str) else np.asarray(draw_picture(content))
        for writer in self._writers if is_primary() else ():
            _attempt(writer, "media", name, content, step)

    def flush(self) -> None:
        """Has the writers store what they were sent: a checkpoint that will cover it is about to be saved."""
        for writer in self._writers if is_primary() else ():
            _attempt(writer, "flush")

    def close(self) -> None:
        """Closes the writers, in every process."""
        for writer in self._writers:
            _attempt(writer, "close")


def _attempt(writer: Any, method: str, *arguments: Any) -> None:
    """Calls a method of a user's writer, if it has it; warns of an exception."""
    try:
        getattr(writer, method, lambda *_: None)(*arguments)
    except Exception as error:  # any: the writer's
        cause = " ".join([f"{type(error).__name__}:", *str(error).split()])
        warn(f"the writer {type(writer).__name__} failed in {method} ({cause}): the run continues; check the writer.")


class LogDigest:
    """The number and the SHA-256 of consecutive ``lines`` of the log ``file``, each with its newline."""

    def __init__(self, file: Path, lines: Iterable[bytes] = ()) -> None:
        self.file = file
        self.lines = 0
        self._digest = hashlib.sha256()
        self.add(lines)

    def add(self, lines: Iterable[bytes]) -> None:
        """Adds lines to the digest."""
        for line in lines:
            self.lines += 1
            self._digest.update(line)

    @property
    def sha256(self) -> str:
        """The digest in hexadecimal."""
        return self._digest.hexdigest()


def rewind_metrics(
    record: Record,
    end_of: Callable[[Line], int],
    noted: Mapping[str, Any] | None,
    name: str,
    members: Sequence[int],
) -> tuple[list[Line], LogDigest, str | None]:
    """Truncates ``metrics.jsonl`` of ``record`` to the lines of a checkpoint; a damaged log, where its damage starts.

    ``noted`` is the ``log`` of the checkpoint ``name``; ``end_of`` maps a line to the checkpoint's last step. The
    checkpoint is of ``members``, and lines of others stay. Returns the kept lines, their digest, and a
    message if they differ from the reported ones; the original is then copied to a file beside the log.
    """
    file = record.path / METRICS_FILE
    content = read_bytes(file)
    others, lines = list[bytes](), list[bytes]()
    for raw in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        (lines if _parsed(raw).get("member", members[0]) in members else others).append(raw)
    kept, message = lines[: noted["lines"]] if noted is not None else [], None
    digest = LogDigest(file, kept)
    if noted is None and lines:
        message = f"there is no checkpoint of {name}, so it starts again; its reported metrics are kept in"
    elif noted is not None and (digest.lines, digest.sha256) != (noted["lines"], noted["sha256"]):
        digest = LogDigest(file, kept := _undamaged(lines, end_of, members))
        lost, loss = noted["lines"] - digest.lines, "its lines differ from the reported ones"
        if lost > 0:
            loss = f"{lost} of {noted['lines']} lines are lost"
        message = f"{file} is damaged up to {name}, {loss}; the original file is"
    if message is not None:
        names = (file.with_name(f"{file.stem}.damaged-{number}{file.suffix}") for number in itertools.count(1))
        write_bytes(aside := next(name for name in names if not name.exists()), content)
        message = f"{message} {aside}"
    if (rewound := b"".join([*others, *kept])) != content:
        record.replace_metrics(rewound)
    return [numbers(json.loads(line)) for line in kept], digest, message


def _undamaged(lines: Iterable[bytes], end_of: Callable[[Line], int], members: Sequence[int]) -> list[bytes]:
    """The lines up to their checkpoint, before the first that is no report, or not after its member's last."""
    kept, last = list[bytes](), dict[Any, int]()
    for raw in lines:
        line = _parsed(raw)
        step, member = line.get("step"), line.get("member")
        if type(step) is not int or member not in members or step <= last.get(member, 0):
            break
        last[member] = step
        if step <= end_of(line):
            kept.append(raw)
    return kept


def _parsed(raw: bytes) -> Line:
    """A line as a mapping; an empty one if it is not JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(raw)
        return line if isinstance(line, dict) else {}
    return {}
