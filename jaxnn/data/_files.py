"""Files of data sets: found or downloaded, sorted into classes by their folders, read from disk or from archives."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import sys
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from jaxnn.types import DataError

type PathLike = str | os.PathLike[str]
# The names of files by the split's folder and by class.
type Listing = dict[str, dict[str, list[str]]]

_SPLIT_FOLDERS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
_TIMEOUT_SECONDS = 30


def data_dir(argument: PathLike | None = None) -> Path:
    """The data directory: ``argument``, else the environment's ``JAXNN_DATA``, else the user's cache."""
    if chosen := argument or os.environ.get("JAXNN_DATA"):
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("jaxnn"))


@contextlib.contextmanager
def os_errors_named() -> Iterator[None]:
    """Turns an OSError inside the block, such as a folder that may not be listed, into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror or error}.") from error


@os_errors_named()
def find(dataset: str, names: Sequence[str], directory: PathLike | None) -> Path | None:
    """The first of ``names`` that exists in the data set's folder, or else in the data directory itself; or None."""
    root = data_dir(directory)
    places = (parent / name for parent in (root / dataset, root) for name in names)
    return next((place for place in places if place.exists()), None)


@os_errors_named()
def folder_with(dataset: str, names: Sequence[str], advice: str, directory: PathLike | None) -> Path:
    """The folder of a data set that may not be redistributed; DataError, with ``advice``, if ``names`` are missing."""
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
    """The path of ``<data directory>/<dataset>/<file_name>``, downloaded if it is not there.

    A file that is there is used as it is. A download is written beside it, checked, and only then renamed, so that a
    partial file is never used.

    Args:
        dataset: the data set's folder.
        file_name: the file in it.
        url: the file's address, or several, tried in turn.
        sha256: the checksum that a download must have, in hexadecimal.
        directory: the data directory, see `data_dir`.

    Raises:
        DataError: the file is not there and cannot be downloaded; with the reason and what to do by hand.
    """
    folder = data_dir(directory) / dataset
    path = folder / file_name
    if path.is_file():
        return path
    urls = [url] if isinstance(url, str) else list(url)
    print(f"jaxnn: downloading {file_name} from {urls[0]} to {folder}", file=sys.stderr)
    import pooch

    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS, chunk_size=1 << 20)
    logger = pooch.get_logger()
    level = logger.level
    failures = []
    for address in urls:
        logger.setLevel(logging.ERROR)
        try:
            pooch.retrieve(address, f"sha256:{sha256}", file_name, folder, downloader=downloader)
        except (OSError, ValueError) as error:
            failures.append(_reason(error))
        else:
            # Pooch leaves it readable by its owner alone, as temporary files are; data directories are shared.
            path.chmod(0o644)
            return path
        finally:
            logger.setLevel(level)
    raise DataError(
        f"{file_name} of {dataset} is not in {folder} and could not be downloaded ({'; '.join(dict.fromkeys(failures))}"
        f"): put {' or '.join(urls)} into that folder by hand, or set JAXNN_DATA to a folder that has it."
    )


def _reason(error: OSError | ValueError) -> str:
    """Why a download failed, in a few words."""
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return f"HTTP status {error.response.status_code}"
    reasons = {
        exceptions.ChunkedEncodingError: "the transfer broke off",
        exceptions.Timeout: f"no answer within {_TIMEOUT_SECONDS} seconds",
        exceptions.ConnectionError: "the connection failed, is there a network?",
        exceptions.RequestException: f"the request failed with {type(error).__name__}",
        OSError: f"it cannot be written there: {getattr(error, 'strerror', None) or type(error).__name__}",
        ValueError: "the downloaded file has another sha256 checksum",
    }
    return next(reason for kind, reason in reasons.items() if isinstance(error, kind))


def read_text(path: Path) -> str:
    """The text of a file, see `decoded`; DataError, which names it, if it cannot be read."""
    try:
        data = path.read_bytes()
    # ValueError: a name with a zero byte, as of a text that is passed as a path.
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    return decoded(data, str(path))


def decoded(data: bytes, where: str) -> str:
    r"""UTF-8 ``data`` as text without byte order mark, line ends as ``\n``; DataError names ``where`` and the byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is no text in UTF-8 ({error.reason} at byte {error.start}): convert it.") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


@os_errors_named()
def list_folder(root: Path, suffixes: tuple[str, ...], classes: Collection[str] = ()) -> Listing:
    """The files ``root/{train,val,validation,test}/<class>/*`` with these suffixes, of all or some ``classes``."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give the one that holds train/.")

    def visible(folder: Path) -> list[Path]:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]

    listing: Listing = {}
    for split in _SPLIT_FOLDERS:
        if (root / split).is_dir():
            listing[split] = {}
            for kind in visible(root / split):
                if kind.is_dir() and (not classes or kind.name in classes):
                    names = [file.name for file in visible(kind)]
                    listing[split][kind.name] = [name for name in names if name.lower().endswith(suffixes)]
    return listing


def classified(
    listing: Listing, where: Path, suffixes: tuple[str, ...]
) -> tuple[dict[str, tuple[str, list[str], np.ndarray]], tuple[str, ...]]:
    """The files of each split and the classes' sorted names; ``where`` and ``suffixes`` are for messages.

    A split has its folder, the files ``<class>/<file>`` in it, sorted by class and then by name, and their labels
    ``[examples]`` int32.
    """
    if "train" not in listing:
        found = ", ".join(sorted(listing)) or "none of them"
        raise DataError(
            f"{where} has no train/ (of train, val and test it has {found}): arrange the files as "
            f"train/<class>/*{suffixes[0]}, and likewise val/ and test/ if there are such."
        )
    if {"val", "validation"} <= listing.keys():
        raise DataError(f"{where} has both val and validation: keep one of them.")
    class_names = tuple(sorted(listing["train"]))
    splits = {}
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
        splits[_SPLIT_FOLDERS[folder]] = folder, names, labels
    return splits, class_names


def check_file(path: Path) -> None:
    """Raises DataError if ``path`` is not a file: opening a pipe, for one, would wait forever."""
    if not path.is_file():
        raise DataError(f"{path} is a broken link, or a folder or the like, instead of a file: remove or replace it.")


class _Limited(gzip.GzipFile):
    """A gzip file of at most ``most_bytes`` decompressed: a small archive may announce, or grow to, any size."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(path)
        self._path, self._most_bytes = path, most_bytes

    def read(self, size: int | None = -1) -> bytes:
        self.check(size or 0)
        return super().read(size)

    def check(self, size: int) -> None:
        """Raises DataError if the next ``size`` bytes exceed the limit."""
        if self.tell() + size > self._most_bytes + tarfile.RECORDSIZE:
            raise DataError(f"{self._path} announces more than {self._most_bytes:,} bytes: download it again.")


def read_members(path: Path, wanted: Callable[[str], object], most_bytes: int) -> Iterator[tuple[str, bytes]]:
    """The name and the content of each wanted member of a gzipped tar archive; nothing is written.

    DataError for an archive that is truncated, damaged or larger than ``most_bytes`` decompressed, or has a member with
    a path outside of the archive, or a link or the like instead of a file.
    """
    try:
        # As a stream: a header that leads back to itself, or announces more than there is, is an error.
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
            # To the end, where the checksum is.
            while file.read(1 << 16):
                pass
    except DataError:
        raise
    # A damaged archive makes tarfile fail in any of many ways.
    except Exception as error:
        raise DataError(f"{path} is truncated or damaged ({error}): download it again.") from error
