"""A text file as sequences of characters, to predict each one's successor."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from jaxnn.data.arrays import arrays
from jaxnn.data.files import fetch
from jaxnn.types import DataError, Splits

_TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def characters(
    path: str | os.PathLike[str] | None = None,
    length: int = 64,
    *,
    stride: int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
) -> Splits:
    """Windows of a text: inputs ``[length]`` characters as ids, targets the same one character on.

    The first 90 % of the text are ``train``, the rest is ``test``, as in Karpathy's nanoGPT. Ids number the
    characters of ``train`` in the order of their code points; those that only ``test`` has become one id more, U+FFFD.
    The windows of ``test`` follow one another, and characters at either split's end that fill no window are left out.

    Args:
        path: a file in UTF-8; None: the plays known as tiny Shakespeare (Karpathy, 2015), from
            ``tinyshakespeare/input.txt`` in the data directory, downloaded (1 MB) if it is not there.
        length: characters of a window.
        stride: from the start of one training window to the next; None: ``length``. On the device a character
            takes ``8 * length / stride`` bytes.
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.

    Returns:
        Token ids int32; ``class_names`` is the vocabulary.

    Raises:
        DataError: a file that cannot be read, is not UTF-8 or is too short for one window in each split;
            a length or stride below 1.
    """
    stride = length if stride is None else stride
    if length < 1 or stride < 1:
        raise DataError(f"characters: length and stride must be at least 1, not {length} and {stride}.")
    name = "tinyshakespeare" if path is None else Path(path).stem
    if path is None:
        path = fetch(name, "input.txt", _TINY_SHAKESPEARE, _TINY_SHAKESPEARE_SHA256, data_dir)
    text = _read(Path(path))
    cut = len(text) * 9 // 10
    train, test = text[:cut], text[cut:]
    if len(test) <= length:
        raise DataError(
            f"{path} holds {len(text):,} characters, of which a tenth does not fill a window of {length} and its "
            "targets: give a longer text or a smaller length."
        )
    known = sorted(set(train))
    vocabulary = (*known, _UNKNOWN) if set(test) - set(known) else tuple(known)
    return arrays(
        _windows(_encode(train, vocabulary), length, stride),
        _windows(_encode(test, vocabulary), length, length),
        name=name,
        class_names=vocabulary,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): convert it.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _encode(text: str, vocabulary: tuple[str, ...]) -> np.ndarray:
    """Each character's place in ``vocabulary``, or the last place: int32 ``[len(text)]``."""
    ids = {character: index for index, character in enumerate(vocabulary)}
    return np.fromiter((ids.get(character, len(vocabulary) - 1) for character in text), np.int32, len(text))


def _windows(ids: np.ndarray, length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets ``[windows, length]``."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, length + 1)[::stride]
    return windows[:, :-1], windows[:, 1:]
