"""Files that are complete or absent, and errors of the disk in one line."""

import contextlib
import errno
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxnn._json import jsonable
from jaxnn._text import first_line
from jaxnn.types import JaxnnError, RecordError

UNWRITABLE = (OSError, ValueError)


def open_regular(path: Path | str) -> io.BufferedReader:
    """Opens a file to read it; OSError if it is a pipe or a device, which might never end."""
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device")
    return file


def read_file(path: Path | str) -> bytes:
    """Reads a file; OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def sync(path: Path | str) -> None:
    """Flushes the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def refusals(subject: str, rest: str = "; what was recorded before is intact.") -> Iterator[None]:
    """Turns an error of the disk into a RecordError of one line: ``subject``, reason, fix and ``rest``."""
    try:
        yield
    except JaxnnError:
        raise
    except UNWRITABLE as error:
        full = next((text for text in map(os.strerror, (errno.ENOSPC, errno.EDQUOT)) if text in str(error)), None)
        # TensorStore appends a page about its configuration.
        reason = getattr(error, "strerror", None) or full or first_line(error).partition(" [tensorstore_spec=")[0]
        fix = (
            "free disk space" if full else "check that the folder exists and is writable, and no other process uses it"
        )
        raise RecordError(f"{subject} ({reason}): {fix}{rest}") from error


def make_room(folder: Path) -> None:
    """Creates ``folder`` and tests that it is writable, before a long computation; RecordError if it is not."""
    with refusals(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_json(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Replaces ``path`` by ``content`` as JSON, atomically."""
    write_bytes(path, f"{json.dumps(jsonable(content), indent=2, allow_nan=False)}\n".encode())


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces ``path`` by ``content`` atomically; RecordError if the disk refuses, and ``path`` is unchanged.

    Unless ``durable``, it does not wait until the disk has it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with refusals(f"{path} cannot be written"):
        try:
            temporary.unlink(missing_ok=True)  # of a process that was killed, or a link out of the folder
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
