"""A run's directory: created once, written by one process at a time, every file whole or absent."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxnn.types import RecordError

RUN_FILE = "run.json"
SWEEP_FILE = "sweep.json"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"


def new_run_dir(name: str, parent: Path = Path("runs")) -> Path:
    """``runs/<name>/<time>-<four hex digits>``: a path nobody has yet, not created."""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    return parent / name / f"{stamp}-{secrets.token_hex(2)}"


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
        RecordError: it is a file, or holds something already.
    """
    if path.is_dir() and all(map(_stillborn, path.iterdir())):
        return
    if path.exists():
        raise RecordError(
            f"the run directory {path} is not empty: choose another --run-dir, or continue the run in it with "
            f"--resume {path}."
        )


def _stillborn(file: Path) -> bool:
    """Whether one that was killed before its ``run.json`` or ``sweep.json`` left ``file``: it cannot be resumed."""
    if file.name == METRICS_FILE:
        return file.stat().st_size == 0
    return file.name == LOCK_FILE or file.name.startswith((f".{RUN_FILE}.", f".{SWEEP_FILE}."))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the run directory ``path`` for this process; the system lets go of it if the process dies.

    Raises:
        RecordError: another process holds it.
    """
    with (path / LOCK_FILE).open("w") as lock:
        if not _try_lock(lock):
            raise RecordError(
                f"another process is writing the run directory {path}: wait for it, or choose another --run-dir."
            )
        yield


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


def write_json(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Writes ``content`` so that a reader, or a crash, sees the old file or the new one and nothing between."""
    write_text(path, json.dumps(jsonable(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
