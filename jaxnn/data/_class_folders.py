"""Files sorted into ``<split>/<class>/``, in a folder or in a tar archive that is read and never unpacked."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np

from jaxnn.data._downloads import os_errors_named
from jaxnn.types import DataError

SPLIT_FOLDERS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}

# By the split's folder and the class: the names of files.
type Listing = dict[str, dict[str, list[str]]]
# Of one split: its folder, the files `<class>/<file>` in it by class and then by name, their labels [examples] int32.
type Labelled = tuple[str, list[str], np.ndarray]


def is_example(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file's name has one of the suffixes and is not hidden."""
    return name.lower().endswith(suffixes) and not name.startswith(".")


@os_errors_named()
def list_folder(root: Path, suffixes: tuple[str, ...], classes: Collection[str] = ()) -> Listing:
    """The files ``root/{train,val,validation,test}/<class>/*`` with these suffixes, of all or some ``classes``."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give the one that holds train/.")
    listing: Listing = {}
    for split in SPLIT_FOLDERS:
        if (root / split).is_dir():
            kinds = [kind for kind in (root / split).iterdir() if kind.is_dir() and not kind.name.startswith(".")]
            listing[split] = {
                kind.name: [file.name for file in kind.iterdir() if is_example(file.name, suffixes)]
                for kind in kinds
                if not classes or kind.name in classes
            }
    return listing


def classified(listing: Listing, where: Path, suffixes: tuple[str, ...]) -> tuple[dict[str, Labelled], tuple[str, ...]]:
    """The files of each split, in order, and the classes' sorted names; ``where`` and ``suffixes`` are for messages."""
    if "train" not in listing:
        found = ", ".join(sorted(listing)) or "none of them"
        raise DataError(
            f"{where} has no train/ (of train, val and test it has {found}): arrange the files as "
            f"train/<class>/*{suffixes[0]}, and likewise val/ and test/ if there are such."
        )
    if {"val", "validation"} <= listing.keys():
        raise DataError(f"{where} has both val and validation: keep one of them.")
    class_names = tuple(sorted(listing["train"]))
    found_splits = {}
    for folder, kinds in listing.items():
        if not kinds:
            raise DataError(f"{where}/{folder} has no class folders: put the files into {folder}/<class>/.")
        if odd := sorted(set(kinds) ^ set(class_names)):
            raise DataError(
                f"{where}/{folder} does not have the classes that train has (they differ in {', '.join(odd)}): make "
                "them the same."
            )
        for name in class_names:
            if not kinds[name]:
                raise DataError(f"{where}/{folder}/{name} holds no {' or '.join(suffixes)}: add some or remove it.")
        names = [f"{name}/{file}" for name in class_names for file in sorted(kinds[name])]
        counts = [len(kinds[name]) for name in class_names]
        labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        found_splits[SPLIT_FOLDERS[folder]] = folder, names, labels
    return found_splits, class_names


def check_file(path: Path) -> None:
    """Raises DataError if ``path`` is not a file: opening a pipe, for one, would wait forever."""
    if not path.is_file():
        raise DataError(f"{path} is a broken link, or a folder or the like, instead of a file: remove or replace it.")


class _Limited:
    """A decompressed stream of at most ``most_bytes``: a small archive may announce, or grow to, any size."""

    def __init__(self, file: gzip.GzipFile, most_bytes: int, path: Path) -> None:
        self._file, self._most_bytes, self._path = file, most_bytes, path

    def read(self, size: int) -> bytes:
        self.check(size)
        return self._file.read(size)

    def check(self, size: int) -> None:
        """Raises DataError if ``size`` bytes more exceed the limit."""
        if self._file.tell() + size > self._most_bytes + tarfile.RECORDSIZE:
            raise DataError(
                f"{self._path} announces more than {self._most_bytes:,} bytes, too many for what it should hold: "
                "download it again."
            )


def read_members(
    path: Path, wanted: Callable[[tuple[str, ...]], bool], most_bytes: int
) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """The parts of the path and the content of each wanted member of a gzipped tar archive; nothing is written.

    DataError for an archive that is truncated, damaged or larger than ``most_bytes`` decompressed, or has a member with
    a path outside of the archive, or a link or the like instead of a file.
    """
    try:
        with gzip.open(path) as file:
            limited = _Limited(file, most_bytes, path)
            # As a stream: a header that leads back to itself, or announces more than there is, is an error.
            with tarfile.open(fileobj=cast(Any, limited), mode="r|") as archive:
                for member in archive:
                    limited.check(member.size)
                    parts = PurePosixPath(member.name).parts
                    if member.name.startswith("/") or ".." in parts:
                        raise DataError(
                            f"{path} has a member {member.name!r}, which would be outside of it: download it again."
                        )
                    if wanted(parts):
                        is_plain = member.isfile() and not member.issparse()
                        content = archive.extractfile(member) if is_plain else None
                        if content is None:
                            raise DataError(
                                f"{path} has a link or the like at {member.name} instead of a file: download it again."
                            )
                        yield parts, content.read()
            # To the end, where the checksum is.
            while limited.read(1 << 16):
                pass
    except DataError:
        raise
    # A damaged archive makes tarfile fail in any of many ways.
    except Exception as error:
        raise DataError(f"{path} is truncated or damaged ({error}): download it again.") from error
