"""Bytes become text: in UTF-8, with one kind of line end, or a sentence says where they are not."""

from __future__ import annotations

from pathlib import Path

from jaxnn.types import DataError


def read_text(path: Path) -> str:
    r"""The text in a file, as `decoded` gives it.

    Raises:
        DataError: a file that cannot be read or is not UTF-8; it is named.
    """
    try:
        data = path.read_bytes()
    # ValueError: a name with a zero byte, as of a text that is taken for one.
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    return decoded(data, str(path))


def decoded(data: bytes, where: str) -> str:
    r"""``data`` as text, without a byte order mark, its lines ended by ``\n`` alone.

    Args:
        data: in UTF-8.
        where: what file it is, for the message.

    Raises:
        DataError: it is not UTF-8; the file and the byte are named.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is no text in UTF-8 ({error.reason} at byte {error.start}): convert it.") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
