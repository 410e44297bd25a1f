"""Files of data sets: search, download, class folders, archives."""

import contextlib
import csv
import gzip
import io
import logging
import os
import sys
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np

from jaxnn.types import DataError, warn

type PathLike = str | os.PathLike[str]
type Listing = dict[str, dict[str, list[str]]]  # the names of files by the split's folder and by class

FLAT = "."  # the folder of the training split if there is no train/
_SPLIT_FOLDERS = {FLAT: "train", "train": "train", "val": "validation", "validation": "validation", "test": "test"}
_TIMEOUT_SECONDS = 30
# Addresses that could not be reached, with the reason and the time: the cases of a benchmark, or the members of a
# sweep, ask for the same file again, and each attempt may wait for the network.
_REFUSALS: dict[str, tuple[str, float]] = {}
_REFUSED_MINUTES = 10


def data_dir(argument: PathLike | None = None) -> Path:
    """Returns the data directory: ``argument``, else the environment's ``JAXNN_DATA``, else the user's cache.

    >>> jn.data.data_dir("/datasets")
    PosixPath('/datasets')
    """
    if chosen := argument or os.environ.get("JAXNN_DATA"):
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("jaxnn"))


@contextlib.contextmanager
def os_errors_named() -> Iterator[None]:
    """Converts an OSError inside the block, such as a missing permission, into a DataError."""
    try:
        yield
    except OSError as error:
        name = name if len(name := str(error.filename)) <= 500 else f"{name[:60]}…"  # a text in the place of its path
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error


@os_errors_named()
def find(dataset: str, names: Sequence[str], directory: PathLike | None) -> Path | None:
    """Returns the first of ``names`` in the data set's folder, else in the data directory itself, else None."""
    root = data_dir(directory)
    places = (parent / name for parent in (root / dataset, root) for name in names)
    return next((place for place in places if place.exists()), None)


@os_errors_named()
def folder_with(dataset: str, names: Sequence[str], advice: str, directory: PathLike | None) -> Path:
    """Returns the folder of a data set that is not downloaded; DataError with ``advice`` if ``names`` are missing."""
    folder = data_dir(directory) / dataset
    if missing := [name for name in names if not (folder / name).exists()]:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}, which jaxnn may not download: {advice}, or set JAXNN_DATA to a "
            f"folder that has {dataset}/."
        )
    return folder


@os_errors_named()
def fetch(
    dataset: str, file_name: str, url: str | Sequence[str], sha256: str, directory: PathLike | None = None
) -> Path:
    """Returns the path ``<data directory>/<dataset>/<file_name>`` and downloads the file if it does not exist.

    An existing file is used unchecked. A download is checked against ``sha256`` before it is renamed, so that a partial
    file is never used. Several addresses ``url`` are tried in order; one that could not be reached is not tried again
    for ten minutes in this process. Raises DataError if the file is missing and cannot be downloaded, with the reason
    and what to do by hand.
    """
    folder = data_dir(directory) / dataset
    path = folder / file_name
    if path.is_file():
        return path
    urls = [url] if isinstance(url, str) else list(url)
    known = {address: _REFUSALS[address] for address in urls if address in _REFUSALS}
    since = time.monotonic() - 60 * _REFUSED_MINUTES
    refused = {address: reason for address, (reason, when) in known.items() if when > since}
    untried = [address for address in urls if address not in refused]
    if untried:
        print(f"jaxnn: downloading {file_name} from {untried[0]} to {folder}", file=sys.stderr)
    for address in untried:
        try:
            _download(address, folder, file_name, sha256)
        except (OSError, ValueError) as error:
            refused[address] = _reason(error, address)
        else:
            # Pooch creates files readable by their owner only; data directories are shared.
            path.chmod(0o644)
            return path
    reasons = "; ".join(dict.fromkeys(refused.values()))
    raise DataError(
        f"{file_name} of {dataset} is not in {folder} and could not be downloaded ({reasons}): put "
        f"{' or '.join(urls)} into that folder by hand, or set JAXNN_DATA to a folder that has it."
    )


def _download(address: str, folder: Path, file_name: str, sha256: str) -> None:
    """Downloads ``address`` to ``folder/file_name``, silently; raises OSError or ValueError."""
    import pooch

    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS, chunk_size=1 << 20)
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        pooch.retrieve(address, f"sha256:{sha256}", file_name, folder, downloader=downloader)
    finally:
        logger.setLevel(level)


def _reason(error: OSError | ValueError, address: str) -> str:
    """Returns why a download from ``address`` failed, in a few words; remembers it if the network was the reason."""
    from requests import exceptions

    answer = getattr(error, "response", None)
    reasons = {
        exceptions.HTTPError: f"HTTP status {getattr(answer, 'status_code', 'unknown')}",
        exceptions.ChunkedEncodingError: "the transfer was cut off",
        exceptions.Timeout: f"no answer within {_TIMEOUT_SECONDS} seconds",
        exceptions.ConnectionError: "the connection failed, is there a network?",
        exceptions.RequestException: f"the request failed with {type(error).__name__}",
        OSError: f"it cannot be written there: {getattr(error, 'strerror', None) or type(error).__name__}",
        ValueError: "the downloaded file has another sha256 checksum",
    }
    found = next(reason for kind, reason in reasons.items() if isinstance(error, kind))
    if isinstance(error, exceptions.RequestException):
        found += f" (tried again after {_REFUSED_MINUTES} minutes)"
        _REFUSALS[address] = found, time.monotonic()
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading, decompressed if its content is gzipped; DataError if that is damaged."""
    with path.open("rb") as file:
        # By its content: a browser may have decompressed what is called .gz. Pipes cannot be read twice.
        is_gzip = file.peek(2)[:2] == b"\x1f\x8b"
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be decompressed ({error}): download it again.") from error


@os_errors_named()
def read_text(path: Path) -> str:
    """Returns the text of a file, which may be gzipped, see `decoded`; DataError with its path if it cannot be read."""
    with opened(path) as file:
        return decoded(file.read(), str(path))


def decoded(data: bytes, where: str) -> str:
    r"""Decodes UTF-8 without byte order mark, line ends as ``\n``; DataError names ``where`` and the first bad byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start}): convert it.") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def read_columns(
    path: Path, header: bool | Sequence[str], advice: str, **dialect: Any
) -> tuple[dict[Any, tuple[str, ...]], Sequence[int]]:
    """Returns the columns of a CSV file by name, and the number of each row's first line, from 1.

    ``header``: whether the first row has the names; or the names. Without them columns are numbered from 0. ``advice``
    is for messages, ``dialect`` for `csv.reader`. Blank lines are ignored. DataError with the line for a row that is
    malformed or has another number of columns; also for equal names, or no row.
    """
    numbered = list(_read_rows(path, advice, **dialect))
    if len(numbered) <= (header is True):
        below = " below its header" if numbered else ""
        raise DataError(f"{path} has no row{below}: give a table with a row per example.")
    names: Sequence[Any]
    if header is True:
        names = [name.strip() for name in numbered.pop(0)[1]]
    else:
        names = range(len(numbered[0][1])) if header is False else header
    for name, count in Counter(names).items():
        if name != "" and count > 1:
            raise DataError(f"{path} has {count} columns called {name!r}: rename them.")
    for line, row in numbered:
        if len(row) != len(names):
            known = "the first row has" if isinstance(header, bool) else "its names are"
            raise DataError(
                f"line {line} of {path} has {len(row)} columns, but {known} {len(names)}: fix it, or {advice}."
            )
    lines, rows = zip(*numbered, strict=True)
    return dict(zip(names, zip(*rows, strict=True), strict=True)), lines


def _read_rows(path: Path, advice: str, **dialect: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the first line and the fields of each row that is not blank."""
    content = read_text(path)
    first_line = 1
    # By default Python limits a field to 131,072 characters.
    limit = csv.field_size_limit(len(content) + 1)
    try:
        rows = csv.reader(io.StringIO(content, newline=""), strict=True, **dialect)
        for row in rows:
            if len(row) > 1 or "".join(row).strip():
                yield first_line, row
            first_line = rows.line_num + 1
    except (csv.Error, TypeError, ValueError) as error:  # also of a separator that is no character
        raise DataError(
            f"the row that starts in line {first_line} of {path} is malformed ({error}): fix its quotation marks, or "
            f"{advice}."
        ) from error
    finally:
        csv.field_size_limit(limit)


@os_errors_named()
def list_folder(root: Path, suffixes: tuple[str, ...], classes: Collection[str] = ()) -> Listing:
    """Lists the files ``root/{train,val,validation,test}/<class>/**`` with ``suffixes``, of all or some ``classes``.

    Without these folders ``root/<class>/**``, as those of `FLAT`. Warns of files that are left out.
    """
    if not root.is_dir():
        raise DataError(f"{root.absolute()} is not a folder: give the folder that contains train/ or class folders.")

    def visible(folder: Path) -> list[Path]:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]

    listing: Listing = {}
    left_out: list[Path] = []
    for split in [split for split in _SPLIT_FOLDERS if split != FLAT and (root / split).is_dir()] or [FLAT]:
        listing[split] = {}
        for kind in visible(root / split):
            if kind.is_dir() and (not classes or kind.name in classes):
                paths = [path for path in kind.rglob("*") if not path.is_dir()]
                seen = [path for path in paths if not any(part[0] == "." for part in path.relative_to(kind).parts)]
                files = listing[split][kind.name] = []
                for path in seen:
                    if path.name.lower().endswith(suffixes):
                        files.append(path.relative_to(kind).as_posix())
                    else:
                        left_out.append(path)
    # A class without any file is an error, which says as much.
    if left_out and all(files for kinds in listing.values() for files in kinds.values()):
        warn(
            f"files are left out ({len(left_out):,}), such as {left_out[0]}: they do not end in {', '.join(suffixes)}."
        )
    return listing


def classified(
    listing: Listing, where: Path, suffixes: tuple[str, ...]
) -> tuple[dict[str, tuple[str, list[str], np.ndarray]], tuple[str, ...]]:
    """Returns the folder, files ``<class>/<file>`` and labels of each split, sorted, and the sorted class names."""
    if not {"train", FLAT} & listing.keys():
        raise DataError(
            f"{where} has no train/ (of train, val and test it has {', '.join(sorted(listing))}): arrange the files as "
            f"train/<class>/*{suffixes[0]}, and likewise for val/ and test/."
        )
    if {"val", "validation"} <= listing.keys():
        raise DataError(f"{where} has both val and validation: keep one of them.")
    class_names = tuple(sorted(next(iter(listing.values()))))
    splits = {}
    for folder, kinds in listing.items():
        if not kinds:
            raise DataError(f"{where / folder} has no class folders: put the files into {folder}/<class>/.")
        if odd := sorted(set(kinds) ^ set(class_names)):
            raise DataError(
                f"{where / folder} does not have the classes of train (they differ in {', '.join(odd)}): give all "
                "splits the same class folders."
            )
        for name in class_names:
            if not kinds[name]:
                raise DataError(f"{where / folder / name} has no {' or '.join(suffixes)}: add files or remove it.")
        names = [f"{name}/{file}" for name in class_names for file in sorted(kinds[name])]
        counts = [len(kinds[name]) for name in class_names]
        labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        splits[_SPLIT_FOLDERS[folder]] = folder, names, labels
    return splits, class_names


def checked_file(path: Path) -> Path:
    """Returns ``path``; DataError if it is not a file: for example, opening a pipe would block forever."""
    if not os.path.lexists(path):
        raise DataError(f"{path} does not exist: correct the path.")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file but a broken link, folder or pipe: remove or replace it.")
    return path


class _Limited(gzip.GzipFile):
    """A gzip file of at most ``most_bytes`` decompressed: a small archive may decompress to any size."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(path)
        self._path, self._most_bytes = path, most_bytes

    def read(self, size: int | None = -1) -> bytes:
        self.check(size or 0)
        return super().read(size)

    def check(self, size: int) -> None:
        """Raises DataError if the next ``size`` bytes exceed the limit."""
        if self.tell() + size > self._most_bytes + tarfile.RECORDSIZE:
            raise DataError(f"{self._path} decompresses to over {self._most_bytes:,} bytes: download it again.")


def read_members(path: Path, wanted: Callable[[str], object], most_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yields the name and content of each wanted member of a gzipped tar archive; nothing is written.

    Raises DataError for an archive that is damaged, exceeds ``most_bytes`` decompressed, or has unsafe members.
    """
    try:
        # As a stream, headers that point back to themselves or claim too many bytes raise errors.
        with _Limited(path, most_bytes) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                file.check(member.size)
                name = PurePosixPath(member.name)
                if name.is_absolute() or ".." in name.parts:
                    raise DataError(f"{path} has a member that would be outside of it, {member.name!r}: get it again.")
                if wanted(str(name)):
                    content = archive.extractfile(member) if member.isfile() and not member.issparse() else None
                    if content is None:
                        raise DataError(f"{path} has a link or the like at {member.name}: download it again.")
                    yield str(name), content.read()
            # The checksum is at the end.
            while file.read(1 << 16):
                pass
    except DataError:
        raise
    # tarfile raises many kinds of errors for damaged archives.
    except Exception as error:
        raise DataError(f"{path} is truncated or damaged ({error}): download it again.") from error
