"""Tar archives compressed by gzip are read in memory, member by member: no link, no path and no size is trusted."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

from jaxnn.types import DataError


def read_members(
    path: Path, wanted: Callable[[tuple[str, ...]], bool], most_bytes: int
) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """The parts of the path and the content of each wanted member, in the order of the archive; nothing is written.

    Args:
        path: a tar archive, compressed by gzip.
        wanted: whether the member whose path has these parts is read.
        most_bytes: how large the archive may be, decompressed.

    Raises:
        DataError: an archive that is truncated, damaged or larger, has a member that would be placed outside of it, or
            a link or the like where a file is wanted.
    """
    try:
        with gzip.open(path) as file:
            stream = _Forward(file, most_bytes, path)
            with tarfile.open(fileobj=cast(Any, stream), mode="r:") as archive:
                for member in archive:
                    parts = _parts(member, path)
                    if wanted(parts):
                        yield parts, _content(archive, member, path)
            # To the end, where the checksum is.
            while stream.read(1 << 16):
                pass
    except DataError:
        raise
    # A damaged archive makes tarfile fail in any of many ways.
    except Exception as error:
        raise DataError(f"{path} is truncated or damaged ({error}): download it again.") from error


class _Forward:
    """A stream as `tarfile` reads it, but never back and never beyond a limit.

    A header may announce any size, of which `tarfile` reads some at once, or send it back to where it has been.
    """

    def __init__(self, file: gzip.GzipFile, most_bytes: int, path: Path) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self._path = path

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, position: int) -> int:
        self._check(position)
        return self._file.seek(position)

    def read(self, size: int) -> bytes:
        self._check(self.tell() + size)
        return self._file.read(size)

    def _check(self, end: int) -> None:
        if end > self._most_bytes:
            raise DataError(
                f"{self._path} announces more than {self._most_bytes:,} bytes, which is too much for what it should "
                "hold: download it again."
            )
        if end < self.tell():
            raise tarfile.ReadError("a header leads back")


def _parts(member: tarfile.TarInfo, path: Path) -> tuple[str, ...]:
    """The parts of a member's path; DataError if they lead out of the archive."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise DataError(f"{path} has a member {member.name!r}, which would be outside of it: download it again.")
    return name.parts


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    """What is in a member that is a plain file; a sparse one may be of any size."""
    file = archive.extractfile(member) if member.isfile() and not member.issparse() else None
    if file is None:
        raise DataError(f"{path} has a link or the like at {member.name} instead of a file: download it again.")
    return file.read()
