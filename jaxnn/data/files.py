"""The data directory, and how a file gets there: found, or downloaded and checked, or explained."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxnn.types import DataError

_TIMEOUT_SECONDS = 30


def data_dir(argument: str | os.PathLike[str] | None = None) -> Path:
    """Where data sets lie: ``argument``, else the environment's ``JAXNN_DATA``, else a cache."""
    chosen = argument or os.environ.get("JAXNN_DATA")
    if chosen:
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("jaxnn"))


@contextlib.contextmanager
def refusals_named() -> Iterator[None]:
    """What the system refuses inside the block, such as a folder that may not be listed, becomes a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror or error}.") from error


@refusals_named()
def fetch(
    dataset: str,
    file_name: str,
    url: str | Sequence[str],
    sha256: str,
    directory: str | os.PathLike[str] | None = None,
) -> Path:
    """The path of ``<data directory>/<dataset>/<file_name>``, downloaded if it is not there.

    A file that is there is used as it is. A download is written beside it, checked, and only then
    given its name, so that no part of a file is ever taken for one.

    Args:
        dataset: the data set's folder.
        file_name: the file in it.
        url: where it is to be had, or several such places, tried in turn.
        sha256: the checksum that a download must have, in hexadecimal.
        directory: the data directory, see `data_dir`.

    Raises:
        DataError: the file is not there and cannot be downloaded; it says why, and how to put it
            there by hand.
    """
    folder = data_dir(directory) / dataset
    path = folder / file_name
    if path.is_file():
        return path
    urls = [url] if isinstance(url, str) else list(url)
    print(f"jaxnn: downloading {file_name} from {urls[0]} to {folder}", file=sys.stderr)
    failures = []
    for place in urls:
        try:
            _download(place, path, sha256)
        except (OSError, ValueError) as error:
            failures.append(_reason(error))
        else:
            return path
    raise DataError(
        f"{file_name} of {dataset} is not in {folder} and could not be downloaded "
        f"({'; '.join(dict.fromkeys(failures))}): put {' or '.join(urls)} into that folder by "
        "hand, or set JAXNN_DATA to a folder that has it."
    )


def _download(url: str, path: Path, sha256: str) -> None:
    """Writes what ``url`` gives to ``path``, atomically, if its checksum is right."""
    import pooch

    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS, chunk_size=1 << 20)
    with _quiet(pooch.get_logger()):
        pooch.retrieve(url, f"sha256:{sha256}", path.name, path.parent, downloader=downloader)
    # Pooch leaves it readable by its owner alone, as temporary files are; data directories are shared.
    path.chmod(0o644)


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Mutes a logger's news inside the block."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: OSError | ValueError) -> str:
    """Why a download failed, in a few words."""
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, exceptions.ChunkedEncodingError):
        return "the transfer broke off"
    if isinstance(error, exceptions.Timeout):
        return f"no answer within {_TIMEOUT_SECONDS} seconds"
    if isinstance(error, exceptions.ConnectionError):
        return "the connection failed, is there a network?"
    if isinstance(error, exceptions.RequestException):
        return f"the request failed with {type(error).__name__}"
    if isinstance(error, OSError):
        return f"it cannot be written there: {error.strerror or type(error).__name__}"
    return "what came has another sha256 checksum"
