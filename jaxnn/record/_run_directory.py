"""A run's directory: created once, written by one process at a time, every file complete or absent."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxnn.record._state_files import refusal
from jaxnn.types import RecordError

RUN_FILE = "run.json"
SWEEP_FILE = "sweep.json"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"


# --- the directory ---


def new_run_dir(name: str, parent: Path = Path("runs")) -> Path:
    """``runs/<name>/<time>-<four hex digits>``: an unused path, not created."""
    return parent / name / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{secrets.token_hex(2)}"


def create_run_dir(path: Path) -> Path:
    """Creates ``path`` for a new run.

    Raises:
        RecordError: it holds something already, or cannot be created.
    """
    check_vacant(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(
            f"the run directory {path} cannot be created ({error.strerror}): choose another --run-dir."
        ) from error
    return path


def check_vacant(path: Path) -> None:
    """Confirms that ``path`` is free for a new run: absent, or a directory with nothing of worth in it.

    Raises:
        RecordError: it is a file, another process is writing it, or it holds something already.
    """
    check_name(path)
    if is_locked(path):
        raise _busy(path)
    check_unused(path)


def check_unused(path: Path) -> None:
    """Confirms that ``path`` is absent, or a directory with nothing of worth in it; its lock may be held.

    Raises:
        RecordError: it is a file, or holds something already.
    """

    def stillborn(file: Path) -> bool:
        """Whether a process left ``file`` that was killed before its ``run.json`` or ``sweep.json``."""
        if file.name == METRICS_FILE:
            return file.stat().st_size == 0
        return file.name == LOCK_FILE or file.name.startswith((f".{RUN_FILE}.", f".{SWEEP_FILE}."))

    if path.exists() and not path.is_dir():
        raise RecordError(f"the run directory {path} is a file: choose another --run-dir.")
    if path.exists() and not all(map(stillborn, path.iterdir())):
        raise RecordError(
            f"the run directory {path} is not empty: choose another --run-dir, or continue the run in it with "
            f"--resume {path}."
        )


def check_name(path: Path) -> None:
    """Confirms that there can be a file or a directory of that name.

    Raises:
        RecordError: it is too long, or not text.
    """
    try:
        str(path).encode()  # what is not UTF-8 can neither be printed nor kept in a record
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise RecordError(f"{str(path)!r:.80} cannot be a run directory ({reason}): choose another name.") from error


# --- its lock ---


@contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """Holds the run directory ``path`` for this process, by its open lock; the system lets go if the process dies.

    Raises:
        RecordError: another process holds it, or it cannot be written.
    """
    with refusals(path / LOCK_FILE):
        lock = (path / LOCK_FILE).open("w")
    with lock:
        if not _try_lock(lock):
            raise _busy(path)
        yield lock


def check_held(path: Path, lock: IO[str]) -> None:
    """Confirms that ``path`` still is the directory that was locked.

    Raises:
        RecordError: it was removed or renamed.
    """
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path / LOCK_FILE), os.fstat(lock.fileno())):
            return
    raise RecordError(
        f"the run directory {path} was removed or renamed, or its {LOCK_FILE} deleted, while its run was writing it: "
        "leave it where it is until the run is over."
    )


def is_locked(path: Path) -> bool:
    """Whether a process is writing the run directory ``path`` now."""
    try:
        with (path / LOCK_FILE).open("r") as lock:
            return not _try_lock(lock)
    except OSError:
        return False


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _busy(path: Path) -> RecordError:
    return RecordError(
        f"another process is writing the run directory {path}: wait for it, or choose another --run-dir."
    )


# --- its files ---


def make_room(folder: Path) -> None:
    """Makes ``folder`` and tries to write there, for results that take long to compute.

    Raises:
        RecordError: the disk refuses.
    """
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_json(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Replaces ``path`` by ``content`` as JSON in one step."""
    write_text(path, json.dumps(jsonable(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces ``path`` by ``content``: a reader, or a crash, sees the old file or the new one and nothing between.

    Raises:
        RecordError: the disk refused; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with refusals(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Adds complete lines to ``path`` and hands them to the system.

    Raises:
        RecordError: the disk refused; ``path`` is as it was.
    """
    # Unbuffered: a buffer that could not be written would be written again when it is closed.
    with refusals(path), path.open("ab", buffering=0) as file:
        before = file.tell()
        content = b"".join(lines)
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(before)
            raise


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turns an error of the system while ``path`` is written into a RecordError of one line."""
    try:
        yield
    except OSError as error:
        reason, cure = refusal(error)
        raise RecordError(
            f"{path} cannot be written ({reason}): {cure}; what was recorded before is intact."
        ) from error


def json_line(content: Mapping[str, Any]) -> str:
    """One line of ``metrics.jsonl``."""
    return json.dumps(jsonable(content), allow_nan=False) + "\n"


def jsonable(value: Any) -> Any:
    """``value`` in JSON's own types; NaN and infinities, which JSON lacks, become their names."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, Path):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)
