"""A text file as sequences of characters, to predict each one's successor."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from jaxnn.data.files import fetch
from jaxnn.data.text.reading import read_text
from jaxnn.data.text.windows import Targets, check_windows, windowed
from jaxnn.types import DataError, Splits

_TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def characters(
    path: str | os.PathLike[str] | None = None,
    length: int = 64,
    *,
    stride: int | None = None,
    targets: Targets = "all",
    lowercase: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
) -> Splits:
    """Windows of a text: inputs ``[length]`` characters as ids, targets the same one character on, or the next alone.

    The first 90 % of the text are ``train``, the rest is ``test``, as in Karpathy's nanoGPT. Ids number the
    characters of ``train`` in the order of their code points; those that only ``test`` has become one id more, U+FFFD.
    Characters at either split's end that fill no window are left out.

    Args:
        path: a file in UTF-8; None: the plays known as tiny Shakespeare (Karpathy, 2015), from
            ``tinyshakespeare/input.txt`` in the data directory, downloaded (1 MB) if it is not there.
        length: characters of a window.
        stride: from the start of one training window to the next; None: ``length``. On the device a character
            takes ``8 * length / stride`` bytes.
        targets: "all": each next character, ``[length]``, to be trained as `jaxnn.tasks.next_token`, and the windows
            of ``test`` follow one another; "last": the one character behind the window, ``[]``, to be classified, and
            the windows of ``test`` are ``stride`` apart too. With ``length=40, stride=3, lowercase=True`` the latter
            is Keras's example ``lstm_text_generation``.
        lowercase: whether the text is lowered first.
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.

    Returns:
        Token ids int32; ``class_names`` is the vocabulary.

    Raises:
        DataError: a file that cannot be read, is not UTF-8 or is too short for one window in each split;
            a length or stride below 1, or unknown targets.
    """
    stride = length if stride is None else stride
    check_windows("characters", length, stride, targets)
    name = "tinyshakespeare" if path is None else Path(path).stem
    if path is None:
        path = fetch(name, "input.txt", _TINY_SHAKESPEARE, _TINY_SHAKESPEARE_SHA256, data_dir)
    text = read_text(Path(path))
    text = text.lower() if lowercase else text
    cut = len(text) * 9 // 10
    train, test = text[:cut], text[cut:]
    if len(test) <= length:
        raise DataError(
            f"{path} holds {len(text):,} characters, of which a tenth does not fill a window of {length} and its "
            "targets: give a longer text or a smaller length."
        )
    known = sorted(set(train))
    vocabulary = (*known, _UNKNOWN) if set(test) - set(known) else tuple(known)
    ids = {"train": _encode(train, vocabulary), "test": _encode(test, vocabulary)}
    return windowed(ids, length, stride, targets, name=name, vocabulary=vocabulary)


def _encode(text: str, vocabulary: tuple[str, ...]) -> np.ndarray:
    """Each character's place in ``vocabulary``, or the last place: int32 ``[len(text)]``."""
    ids = {character: index for index, character in enumerate(vocabulary)}
    return np.fromiter((ids.get(character, len(vocabulary) - 1) for character in text), np.int32, len(text))
