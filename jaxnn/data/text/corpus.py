"""Text files as sequences of words, to predict each one's successor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from jaxnn.data.checks import check_integer
from jaxnn.data.files import data_dir as find_data_dir
from jaxnn.data.files import refusals_named
from jaxnn.data.text.reading import read_text
from jaxnn.data.text.windows import check_windows, windowed
from jaxnn.types import DataError, Splits, suggest

_END, _UNKNOWN = "<eos>", "<unk>"
_SPLITS = ("train", "validation", "test")
_PTB = {"train": "ptb.train.txt", "validation": "ptb.valid.txt", "test": "ptb.test.txt"}

type PathLike = str | os.PathLike[str]


def words(
    path: PathLike | Mapping[str, PathLike],
    length: int = 32,
    vocabulary_size: int = 10_000,
    *,
    stride: int | None = None,
    lowercase: bool = False,
) -> Splits:
    """Windows of a text: inputs ``[length]`` words as ids, targets ``[length]`` the same one word on.

    Words are what white space separates, and ``<eos>`` for each end of a line, as Penn Treebank's text is read. Ids
    number the words of ``train``, the most frequent first, equals by code point. Where there are more words, in
    ``train`` or in the others, than have an id, they are ``<unk>``: the text's own if it has such, else the last id.
    The windows of splits other than ``train`` follow one another; words at a split's end that fill no window are left
    out.

    Args:
        path: a file in UTF-8, whose first 90 % of words are ``train`` and the rest ``test``; or a file for each split,
            ``{"train": …, "validation": …, "test": …}``.
        length: words of a window.
        vocabulary_size: how many ids there are at most, ``<eos>`` and ``<unk>`` among them.
        stride: from the start of one training window to the next; None: ``length``.
        lowercase: whether the text is lowered first.

    Returns:
        Token ids int32; ``class_names`` is the vocabulary.

    Raises:
        DataError: a file that cannot be read, is not UTF-8 or is too short for one window in each split; an unknown
            split, or none to train on; a length or stride below 1, a vocabulary below 2.
    """
    stride = length if stride is None else stride
    check_windows("words", length, stride, "all")
    check_integer("words: vocabulary_size", vocabulary_size, 2)
    paths = _paths(path)
    texts = {split: _split_words(Path(file), lowercase) for split, file in paths.items()}
    if not isinstance(path, Mapping):
        cut = len(texts["train"]) * 9 // 10
        texts = {"train": texts["train"][:cut], "test": texts["train"][cut:]}
    for split, found in texts.items():
        if len(found) <= length:
            raise DataError(
                f"{split} has {len(found):,} words of {paths.get(split, paths['train'])}, which do not fill a window "
                f"of {length} and its targets: give a longer text or a smaller length."
            )
    vocabulary = _vocabulary(texts, vocabulary_size)
    ids = {split: _encode(found, vocabulary) for split, found in texts.items()}
    return windowed(ids, length, stride, "all", name=Path(paths["train"]).stem, vocabulary=vocabulary)


@refusals_named()
def ptb(length: int = 32, *, data_dir: PathLike | None = None) -> Splits:
    """Penn Treebank's newspaper text: 929,589 words to train, 73,760 to validate, 82,430 to test; 10,000 different.

    Marcus, Santorini & Marcinkiewicz (1993), as prepared by Mikolov et al., "Recurrent neural network based language
    model" (2010): ``<unk>`` stands for rare words and ``N`` for numbers. Read from ``ptb/`` in the data directory; it
    may not be passed on and is not downloaded.

    Args:
        length: words of a window.
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.

    Raises:
        DataError: the files are not there; it says how to put them there. Else as `words`.
    """
    folder = find_data_dir(data_dir) / "ptb"
    missing = [name for name in _PTB.values() if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing)} of Penn Treebank, which may not be passed on: take them from "
            "Mikolov's simple-examples.tgz and put them there, or set JAXNN_DATA to a folder that has ptb/."
        )
    return words({split: folder / name for split, name in _PTB.items()}, length)._replace(name="ptb")


def _paths(path: PathLike | Mapping[str, PathLike]) -> dict[str, PathLike]:
    """The file of each split."""
    if not isinstance(path, Mapping):
        return {"train": path}
    for split in path:
        if split not in _SPLITS:
            raise DataError(f"words: there is no split {split!r}: {suggest(split, _SPLITS)}.")
    if "train" not in path:
        raise DataError("words: no file is named as 'train', and there is nothing to train on: name one.")
    return dict(path)


def _split_words(path: Path, lowercase: bool) -> list[str]:
    text = read_text(path)
    return (text.lower() if lowercase else text).replace("\n", f" {_END} ").split()


def _vocabulary(texts: dict[str, list[str]], size: int) -> tuple[str, ...]:
    """The words that have an id, at most ``size``, with one for all others if there are any."""
    counts = Counter(texts["train"])
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    known = ranked[:size]
    if set(known).issuperset(chain(*texts.values())) or _UNKNOWN in known:
        return tuple(known)
    return (*known[: size - 1], _UNKNOWN)


def _encode(found: list[str], vocabulary: tuple[str, ...]) -> np.ndarray:
    """Each word's place in ``vocabulary``, or that of the unknown: int32 ``[len(found)]``."""
    ids = {word: index for index, word in enumerate(vocabulary)}
    return np.fromiter(map(ids.get, found, repeat(ids.get(_UNKNOWN))), np.int32, len(found))
