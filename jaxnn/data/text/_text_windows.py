"""Running text as windows of characters or words, whose next token is to be predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxnn.data._arrays import arrays, check_integer
from jaxnn.data._files import PathLike, fetch, folder_with, read_text
from jaxnn.types import DataError, Splits, suggest

_TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_END, _UNKNOWN = "<eos>", "<unk>"
_SPLITS = ("train", "validation", "test")
_PTB = {"train": "ptb.train.txt", "validation": "ptb.valid.txt", "test": "ptb.test.txt"}

type Targets = Literal["all", "last"]


def char_corpus(
    path: PathLike | None = None,
    length: int = 64,
    *,
    stride: int | None = None,
    targets: Targets = "all",
    lowercase: bool = False,
    data_dir: PathLike | None = None,
) -> Splits:
    """Windows of a text: inputs ``[length]`` characters as ids, targets shifted by one character, or the next alone.

    The first 90 % of the text are ``train``, the rest is ``test``, as in Karpathy's nanoGPT. Ids number the
    characters of ``train`` in the order of their code points; those that only ``test`` has share one more id, U+FFFD.
    Characters at either split's end that fill no window are left out. ``class_names`` is the vocabulary.

    Args:
        path: a file in UTF-8; None: the plays known as tiny Shakespeare (Karpathy, 2015), from
            ``tinyshakespeare/input.txt`` in the data directory, downloaded (1 MB) if it is not there.
        length: characters of a window.
        stride: from the start of one training window to the next; None: ``length``. On the device a character
            takes ``8 * length / stride`` bytes.
        targets: "all": each next character, ``[length]``, to be trained as `jaxnn.tasks.next_token`, and the windows
            of ``test`` follow one another; "last": the one character after the window, ``[]``, to be classified, and
            the windows of ``test`` are ``stride`` apart too. With ``length=40, stride=3, lowercase=True`` the latter
            is Keras's example ``lstm_text_generation``.
        lowercase: whether the text is lowered first.
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.

    Raises:
        DataError: a file that cannot be read, is not UTF-8 or is too short for one window in each split;
            a length or stride below 1, or unknown targets.
    """
    if targets not in ("all", "last"):
        raise DataError(f"char_corpus: targets is {targets!r}: {suggest(targets, ('all', 'last'))}.")
    stride = _checked_stride("char_corpus", length, stride)
    name = "tinyshakespeare" if path is None else Path(path).stem
    if path is None:
        path = fetch(name, "input.txt", _TINY_SHAKESPEARE, _TINY_SHAKESPEARE_SHA256, data_dir)
    text = read_text(Path(path))
    text = text.lower() if lowercase else text
    cut = len(text) * 9 // 10
    train, test = text[:cut], text[cut:]
    known = sorted(set(train))
    if set(test) - set(known):
        known.append(_UNKNOWN_CHARACTER)
    found = {"train": train, "test": test}
    return _windows(name, "characters", found, known, len(known) - 1, length, stride, targets)


def word_corpus(
    path: PathLike | Mapping[str, PathLike],
    length: int = 32,
    vocabulary_size: int = 10_000,
    *,
    stride: int | None = None,
    lowercase: bool = False,
) -> Splits:
    """Windows of a text: inputs ``[length]`` words as ids, targets ``[length]`` shifted by one word.

    Words are separated by white space, and ``<eos>`` stands for each end of a line, as Penn Treebank's text is read.
    Ids number the words of ``train``, the most frequent first, ties by code point. Words without an id, in ``train`` or
    in the others, are ``<unk>``: the text's own if it has it, else the last id. The windows of splits other than
    ``train`` follow one another; words at a split's end that fill no window are left out. ``class_names`` is the
    vocabulary.

    Args:
        path: a file in UTF-8, whose first 90 % of words are ``train`` and the rest ``test``; or a file for each split,
            ``{"train": …, "validation": …, "test": …}``.
        length: words of a window.
        vocabulary_size: the largest number of ids, ``<eos>`` and ``<unk>`` included.
        stride: from the start of one training window to the next; None: ``length``.
        lowercase: whether the text is lowered first.

    Raises:
        DataError: a file that cannot be read, is not UTF-8 or is too short for one window in each split; an unknown
            split, or none to train on; a length or stride below 1, a vocabulary below 2.
    """
    check_integer("word_corpus: vocabulary_size", vocabulary_size, 2)
    stride = _checked_stride("word_corpus", length, stride)
    paths = path if isinstance(path, Mapping) else {"train": path}
    for split in paths:
        if split not in _SPLITS:
            raise DataError(f"word_corpus: there is no split {split!r}: {suggest(split, _SPLITS)}.")
    if "train" not in paths:
        raise DataError("word_corpus: no file is named as 'train', and there is nothing to train on: name one.")
    found = {}
    for split, file in paths.items():
        text = read_text(Path(file))
        found[split] = (text.lower() if lowercase else text).replace("\n", f" {_END} ").split()
    if not isinstance(path, Mapping):
        cut = len(found["train"]) * 9 // 10
        found = {"train": found["train"][:cut], "test": found["train"][cut:]}
    counts = Counter(found["train"])
    known = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary_size]
    if _UNKNOWN not in known and not set(known).issuperset(chain(*found.values())):
        known[vocabulary_size - 1 :] = [_UNKNOWN]
    unknown = known.index(_UNKNOWN) if _UNKNOWN in known else -1
    return _windows(Path(paths["train"]).stem, "words", found, known, unknown, length, stride, "all")


def ptb(length: int = 32, *, data_dir: PathLike | None = None) -> Splits:
    """Penn Treebank's newspaper text: 929,589 words to train, 73,760 to validate, 82,430 to test; 10,000 different.

    Marcus, Santorini & Marcinkiewicz (1993), as prepared by Mikolov et al., "Recurrent neural network based language
    model" (2010): ``<unk>`` stands for rare words and ``N`` for numbers. Read from ``ptb/`` in the data directory; its
    licence forbids redistribution: if it is not there, the DataError says where to get it. Other errors as of
    `word_corpus`.
    """
    advice = "take them from Mikolov's simple-examples.tgz and put them there"
    folder = folder_with("ptb", list(_PTB.values()), advice, data_dir)
    return word_corpus({split: folder / name for split, name in _PTB.items()}, length)._replace(name="ptb")


def _checked_stride(unit: str, length: int, stride: int | None) -> int:
    """The stride, by default the length, if both are positive integers; else DataError, before any file is read."""
    stride = length if stride is None else stride
    check_integer(f"{unit}: length", length, 1)
    check_integer(f"{unit}: stride", stride, 1)
    return stride


def _windows(
    name: str,
    unit: str,
    found: Mapping[str, Sequence[str]],
    vocabulary: Sequence[str],
    unknown: int,
    length: int,
    stride: int,
    targets: Targets,
) -> Splits:
    """Running text, ``found`` by split, as a data set of windows; tokens not in ``vocabulary`` get ``unknown``.

    If ``targets`` are "all", windows of other splits than train follow one another: each token is predicted once.
    """
    ids = {token: index for index, token in enumerate(vocabulary)}
    pairs: dict[str, Any] = {}
    for split, tokens in found.items():
        if len(tokens) <= length:
            raise DataError(
                f"{split} of {name} has {len(tokens):,} {unit}, which do not fill a window of {length} and its "
                "targets: give a longer text or a smaller length."
            )
        numbers = np.fromiter(map(ids.get, tokens, repeat(unknown)), np.int32, len(tokens))
        apart = stride if split == "train" or targets == "last" else length
        windows = np.lib.stride_tricks.sliding_window_view(numbers, length + 1)[::apart]
        pairs[split] = windows[:, :-1], windows[:, 1:] if targets == "all" else windows[:, -1]
    return arrays(**pairs, name=name, class_names=tuple(vocabulary))
