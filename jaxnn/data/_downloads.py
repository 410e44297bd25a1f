"""The data directory and its files: where they are, how they are downloaded, checked and read as text."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxnn.types import DataError

type PathLike = str | os.PathLike[str]

_TIMEOUT_SECONDS = 30


def data_dir(argument: PathLike | None = None) -> Path:
    """The data directory: ``argument``, else the environment's ``JAXNN_DATA``, else the user's cache."""
    chosen = argument or os.environ.get("JAXNN_DATA")
    if chosen:
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
    r"""UTF-8 ``data`` as text, without byte order mark, line ends as ``\n``; DataError names ``where`` and the byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is no text in UTF-8 ({error.reason} at byte {error.start}): convert it.") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
