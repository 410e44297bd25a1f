"""Run directories: created once, written by one process at a time, every file complete or absent."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from jaxnn._disk import make_room, read_file, refusals, write_bytes, write_json
from jaxnn._json import json_line, numbers
from jaxnn.types import RecordError

RECORD_FILE = "record.json"
METRICS_FILE = "metrics.jsonl"
FOLDER = "checkpoints"
GROUPS = "groups"  # the folder of the checkpoints of a sweep, by group
LOCK_FILE = ".lock"

type Line = dict[str, Any]


def check_name(path: Path) -> None:
    """Raises RecordError for a name that no directory can have: it is too long, or not text."""
    try:
        str(path).encode()  # a name that is not UTF-8 can neither be printed nor recorded
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise RecordError(f"{str(path)!r:.80} cannot be a run directory ({reason}): choose another name.") from error


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


@dataclasses.dataclass
class Record:
    """An open run directory and its lock, which is None in the processes of a run that write nothing.

    Its methods raise RecordError if the disk refuses, and leave the files unchanged.
    """

    path: Path
    lock: IO[str] | None
    CODE: ClassVar[str] = "code.patch"  # the name of a file with what was not committed; never run
    _size: int = 0  # bytes that this process left in ``metrics.jsonl``

    @staticmethod
    def unused_path(name: str, parent: Path = Path("runs")) -> Path:
        """Returns an unused absolute path, ``runs/<name>/<time>-<four hex digits>``, without creating it."""
        return parent.absolute() / name / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{secrets.token_hex(2)}"

    @staticmethod
    def create(path: Path) -> Path:
        """Creates ``path`` for a new run; RecordError if it is not vacant, or cannot be written."""
        Record.check_vacant(path)
        make_room(path)
        return path

    @staticmethod
    def check_vacant(path: Path, *, held: bool = False) -> None:
        """Raises RecordError unless ``path`` is free for a new run; ``held``: this process has locked it."""
        check_name(path)
        if not held and is_locked(path):
            raise _busy(path)

        def is_remnant(file: Path) -> bool:
            """Whether ``file`` is of a process that was killed before it wrote ``record.json``."""
            if file.name == METRICS_FILE:
                return file.stat().st_size == 0
            return file.name == LOCK_FILE or file.name.startswith(f".{RECORD_FILE}.")

        if path.exists() and not path.is_dir():
            raise RecordError(f"the run directory {path} is a file: choose another --run-dir.")
        if path.exists() and not all(map(is_remnant, path.iterdir())):
            raise RecordError(
                f"the run directory {path} is not empty: choose another --run-dir, or continue the run in it with "
                f"--resume {path}."
            )

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, writes: bool = True) -> Iterator[Record]:
        """Locks the existing run directory ``path`` and opens it; the system unlocks it if the process dies.

        RecordError if another process has locked it. All processes of a run but one set ``writes=False`` instead.
        """
        if not writes:
            yield cls(path, None)
            return
        with refusals(f"{path / LOCK_FILE} cannot be written"):
            lock = open(path / LOCK_FILE, "w", opener=_own)  # noqa: SIM115
        with lock:
            if not _try_lock(lock, fcntl.LOCK_EX):
                raise _busy(path)
            yield cls(path, lock)

    @property
    def writes(self) -> bool:
        """Whether this process writes the directory; RecordError if the locked directory is gone."""
        if self.lock is None:
            return False
        with suppress(OSError):
            if os.path.samestat(os.stat(self.path / LOCK_FILE), os.fstat(self.lock.fileno())):
                return True
        raise RecordError(
            f"the run directory {self.path} was removed or renamed, or its {LOCK_FILE} deleted, during the run: "
            "leave it in place until the run has ended."
        )

    def report(self, *lines: Mapping[str, Any], name: str = METRICS_FILE) -> list[bytes]:
        """Appends lines to ``metrics.jsonl``, or always to another file, unbuffered; returns them as written."""
        written, file = [json_line(line).encode() for line in lines], self.path / name
        if not self.writes:
            return written
        if self._size and not (file.exists() and file.stat().st_size >= self._size):
            raise RecordError(
                f"{file} was removed or shortened during the run: leave it in place until the run has ended; to "
                f"continue from its last checkpoint: --resume {self.path}."
            )
        # Opened for each report, since resuming replaces the file. Unbuffered, since closing the file would try again
        # to write a buffer that the disk refused.
        with refusals(f"{file} cannot be written"), open(file, "ab", buffering=0, opener=_own) as log:
            before, content = log.tell(), b"".join(written)
            try:
                while content:
                    content = content[log.write(content) :]
            except OSError:
                log.truncate(before)
                raise
            self._size = log.tell()
        return written

    def digest(self, lines: Iterable[bytes] = ()) -> LogDigest:
        """Returns the digest of the first ``lines`` of ``metrics.jsonl``."""
        return LogDigest(self.path / METRICS_FILE, lines)

    def _replace_metrics(self, content: bytes) -> None:
        """Replaces ``metrics.jsonl``."""
        write_bytes(self.path / METRICS_FILE, content)
        self._size = len(content)

    def rewind(
        self, end_of: Callable[[Line], int], noted: Mapping[str, Any] | None, name: str, members: Sequence[int]
    ) -> tuple[list[Line], LogDigest, str | None]:
        """Truncates ``metrics.jsonl`` to the lines of a checkpoint; a damaged log, where its damage starts.

        ``noted`` is the ``log`` of the checkpoint ``name``; ``end_of`` maps a line to the checkpoint's last step. The
        checkpoint is of ``members``, and lines of others stay. Returns the kept lines, their digest, and a
        message if they differ from the reported ones; the original is then copied to a file beside the log.
        """
        file = self.path / METRICS_FILE
        content = read_bytes(file)
        others, lines = list[bytes](), list[bytes]()
        for raw in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
            (lines if _parsed(raw).get("member", members[0]) in members else others).append(raw)
        kept, message = lines[: noted["lines"]] if noted is not None else [], None
        digest = self.digest(kept)
        if noted is None and lines:
            message = f"there is no checkpoint of {name}, so it starts again; its reported metrics are kept in"
        elif noted is not None and (digest.lines, digest.sha256) != (noted["lines"], noted["sha256"]):
            digest = self.digest(kept := _undamaged(lines, end_of, members))
            lost, loss = noted["lines"] - digest.lines, "its lines differ from the reported ones"
            if lost > 0:
                loss = f"{lost} of {noted['lines']} lines are lost"
            message = f"{file} is damaged up to {name}, {loss}; the original file is"
        if message is not None:
            names = (file.with_name(f"{file.stem}.damaged-{number}{file.suffix}") for number in itertools.count(1))
            write_bytes(aside := next(name for name in names if not name.exists()), content)
            message = f"{message} {aside}"
        if (rewound := b"".join([*others, *kept])) != content:
            self._replace_metrics(rewound)
        return [numbers(json.loads(line)) for line in kept], digest, message

    def write(self, name: str, content: Mapping[str, Any] | list[Any]) -> None:
        """Replaces a JSON file of the record, such as ``record.json``."""
        if self.writes:
            write_json(self.path / name, content)

    def write_text(self, name: str, text: str) -> None:
        """Replaces a file of the record that only people and comparisons read, without waiting for the disk."""
        if self.writes:
            write_bytes(self.path / name, text.encode(), durable=False)

    @staticmethod
    def listing(path: Path, facts: Mapping[str, Any], number: int) -> Path:
        """The file with the equations that a group computes, of the record in ``path`` with these ``facts``."""
        return path / (f"program-{number}.txt" if facts["points"] else "program.txt")

    @staticmethod
    def states(path: Path, facts: Mapping[str, Any], number: int) -> Path:
        """The folder of the checkpoints of a group, by its number, of the record in ``path`` with these ``facts``."""
        return path / GROUPS / f"{number}" if facts["points"] else path / FOLDER


def is_locked(path: Path) -> bool:
    """Whether a process has locked the run directory ``path``."""
    try:
        with open(path / LOCK_FILE, opener=_own) as lock:
            return not _try_lock(lock, fcntl.LOCK_SH)  # several processes may ask at the same time
    except OSError:
        return False


def _own(path: str, flags: int) -> int:
    """Opens a file of the record itself: no link, which may lead out of it, and no pipe, which might never open."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _try_lock(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _busy(path: Path) -> RecordError:
    return RecordError(
        f"another process is writing the run directory {path}: wait for it, or choose another --run-dir."
    )


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
    with suppress(ValueError, RecursionError):
        line = json.loads(raw)
        return line if isinstance(line, dict) else {}
    return {}


def read_bytes(file: Path) -> bytes:
    """Reads a file of the record, empty if absent; RecordError if the system refuses."""
    try:
        return read_file(file)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RecordError(f"{file} cannot be read ({error.strerror or error}): the record is damaged.") from error
