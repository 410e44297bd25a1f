"""Run directories: created once, written by one process at a time, every file complete or absent."""

import dataclasses
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxnn._disk import make_room, refusals, write_bytes, write_json
from jaxnn._json import json_line
from jaxnn.types import RecordError

RECORD_FILE = "record.json"
METRICS_FILE = "metrics.jsonl"
FOLDER = "checkpoints"
LOCK_FILE = ".lock"


def new_run_dir(name: str, parent: Path = Path("runs")) -> Path:
    """Returns an unused absolute path, ``runs/<name>/<time>-<four hex digits>``, without creating it."""
    return parent.absolute() / name / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{secrets.token_hex(2)}"


def create_run_dir(path: Path) -> Path:
    """Creates ``path`` for a new run; RecordError if it is not vacant, or cannot be written."""
    check_vacant(path)
    make_room(path)
    return path


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


@dataclasses.dataclass
class Record:
    """An open run directory and its lock, which is None in the processes of a run that write nothing.

    Its methods raise RecordError if the disk refuses, and leave the files unchanged.
    """

    path: Path
    lock: IO[str] | None
    _size: int = 0  # bytes that this process left in ``metrics.jsonl``

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

    def report(self, *lines: Mapping[str, Any]) -> list[bytes]:
        """Appends lines to ``metrics.jsonl``, unbuffered; returns them as written."""
        written, file = [json_line(line).encode() for line in lines], self.path / METRICS_FILE
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

    def replace_metrics(self, content: bytes) -> None:
        """Replaces ``metrics.jsonl``."""
        write_bytes(self.path / METRICS_FILE, content)
        self._size = len(content)

    def write(self, name: str, content: Mapping[str, Any] | list[Any]) -> None:
        """Replaces a JSON file of the record, such as ``record.json``."""
        if self.writes:
            write_json(self.path / name, content)


@contextmanager
def open_record(path: Path, *, writes: bool = True) -> Iterator[Record]:
    """Locks the existing run directory ``path`` and opens it; the system unlocks it if the process dies.

    RecordError if another process has locked it. All but one of the processes of a run set ``writes=False`` instead.
    """
    if not writes:
        yield Record(path, None)
        return
    with refusals(f"{path / LOCK_FILE} cannot be written"):
        lock = open(path / LOCK_FILE, "w", opener=_own)  # noqa: SIM115
    with lock:
        if not _try_lock(lock, fcntl.LOCK_EX):
            raise _busy(path)
        yield Record(path, lock)


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
