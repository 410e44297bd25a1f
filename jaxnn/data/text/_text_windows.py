"""Language modelling: windows of characters or words, with each next token as the target."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxnn.data._arrays import arrays
from jaxnn.data._examples import ids_of
from jaxnn.data._files import PathLike, fetch, folder_with, read_text
from jaxnn.types import Array, DataError, Splits, check_int, suggest

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
    """Cuts a text into windows of ``length`` character ids; targets are the same shifted by one, or the next character.

    The first 90 % of the text are ``train``, the rest is ``test``, as in Karpathy's nanoGPT. Ids number the
    characters of ``train`` by code point; characters that only ``test`` has share one more id, U+FFFD. Characters at
    the end of a split that do not fill a window are dropped. ``class_names`` is the vocabulary.

    >>> _ = Path("tale.txt").write_text("abcd" * 10)
    >>> splits = jn.data.char_corpus("tale.txt", length=3)
    >>> splits.train.examples.inputs[0].tolist(), splits.train.targets[0].tolist()
    ([0, 1, 2], [1, 2, 3])

    Args:
        path: a file in UTF-8; None: tiny Shakespeare (Karpathy, 2015), ``tinyshakespeare/input.txt`` in the data
            directory, downloaded (1 MB) if it is missing.
        length: characters per window.
        stride: distance between the starts of training windows; None: ``length``. On the device a character takes
            ``8 * length / stride`` bytes.
        targets: "all": each next character, ``[length]``, for `jaxnn.tasks.next_token`, and windows of ``test`` do not
            overlap. "last": only the character after the window, ``[]``, for classification, and windows of ``test``
            are ``stride`` apart too; with ``length=40, stride=3, lowercase=True`` it is Keras's example
            ``lstm_text_generation``.
        lowercase: whether to lowercase the text.
        data_dir: as for `mnist`.

    Raises DataError for a file that cannot be read, is not UTF-8 or is too short for one window per split.
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
    return _windows(name, "characters", {"train": train, "test": test}, known, len(known) - 1, length, stride, targets)


def word_corpus(
    path: PathLike | Mapping[str, PathLike],
    length: int = 32,
    vocabulary_size: int = 10_000,
    *,
    stride: int | None = None,
    lowercase: bool = False,
) -> Splits:
    """Cuts a text into windows of ``length`` word ids; targets ``[length]`` are the same shifted by one word.

    Words are separated by white space, and each line ends with the word ``<eos>``, as usual for Penn Treebank. Ids
    number the words of ``train`` by falling frequency, ties by code point. Words without an id become ``<unk>``: that
    of the text if it has one, else the last id. Windows of splits other than ``train`` do not overlap; words at the end
    of a split that do not fill a window are dropped. ``class_names`` is the vocabulary.

    >>> _ = Path("tale.txt").write_text("the cat and the dog " * 8)
    >>> jn.data.word_corpus("tale.txt", length=3, vocabulary_size=3).class_names
    ('the', 'and', '<unk>')

    ``path`` is a file in UTF-8, whose first 90 % of words are ``train`` and the rest ``test``, or a file per split,
    ``{"train": …, "validation": …, "test": …}``. ``vocabulary_size`` is the largest number of ids, including ``<eos>``
    and ``<unk>``. Other arguments and errors as for `char_corpus`.
    """
    check_int("word_corpus: vocabulary_size", vocabulary_size, 2)
    stride = _checked_stride("word_corpus", length, stride)
    paths = path if isinstance(path, Mapping) else {"train": path}
    for split in paths:
        if split not in _SPLITS:
            raise DataError(f"word_corpus: there is no split {split!r}: {suggest(split, _SPLITS)}.")
    if "train" not in paths:
        raise DataError("word_corpus: path has no 'train' split: add its file.")
    words = {}
    for split, file in paths.items():
        text = read_text(Path(file))
        words[split] = _words(text.lower() if lowercase else text)
    if not isinstance(path, Mapping):
        cut = len(words["train"]) * 9 // 10
        words = {"train": words["train"][:cut], "test": words["train"][cut:]}
    counts = Counter(words["train"])
    known = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary_size]
    if _UNKNOWN not in known and not set(known).issuperset(chain(*words.values())):
        known[vocabulary_size - 1 :] = [_UNKNOWN]
    unknown = known.index(_UNKNOWN) if _UNKNOWN in known else -1
    return _windows(Path(paths["train"]).stem, "words", words, known, unknown, length, stride, "all")


def ptb(length: int = 32, *, data_dir: PathLike | None = None) -> Splits:
    """Penn Treebank: newspaper text of 929,589 training, 73,760 validation and 82,430 test words; 10,000 are distinct.

    Marcus, Santorini & Marcinkiewicz (1993), as prepared by Mikolov et al., "Recurrent neural network based language
    model" (2010): ``<unk>`` replaces rare words and ``N`` numbers. Reads ``ptb/`` in the data directory; its licence
    forbids redistribution, so if it is missing, the DataError says where to get it. Other errors as for `word_corpus`.

    >>> jn.data.ptb(length=35).class_names[:3]
    ('the', '<unk>', '<eos>')
    """
    advice = "take them from Mikolov's simple-examples.tgz and put them there"
    folder = folder_with("ptb", list(_PTB.values()), advice, data_dir)
    return word_corpus({split: folder / name for split, name in _PTB.items()}, length)._replace(name="ptb")


def encode_text(text: str, vocabulary: Sequence[str]) -> np.ndarray:
    """Converts a text to token ids ``[time]`` int32, as `char_corpus` and `word_corpus` do.

    ``vocabulary`` is their ``class_names``; with a token of several characters it is one of words. Raises DataError for
    a token that it lacks, unless it has one for unknown tokens.

    >>> jn.data.encode_text("cab", ("a", "b", "c"))
    array([2, 0, 1], dtype=int32)
    """
    is_words = max(map(len, vocabulary), default=0) > 1
    tokens = _words(text) if is_words else text
    (unknown,) = ids_of([_UNKNOWN if is_words else _UNKNOWN_CHARACTER], vocabulary)
    if unknown < 0 and (missing := sorted(set(tokens) - set(vocabulary))):
        raise DataError(f"the vocabulary of {len(vocabulary):,} tokens lacks {missing[0]!r}: leave it out of the text.")
    return ids_of(tokens, vocabulary, unknown)


def decode_text(ids: Array, vocabulary: Sequence[str]) -> str:
    r"""Converts token ids ``[time]`` to text; ``vocabulary`` is that of `encode_text`.

    A space follows each word, and ``<eos>`` becomes a new line, so texts of parts can be joined.

    >>> jn.data.decode_text(np.array([0, 1, 2]), ("the", "cat", "<eos>"))
    'the cat \n'
    """
    after = " " if max(map(len, vocabulary), default=0) > 1 else ""
    return "".join("\n" if (token := vocabulary[index]) == _END else token + after for index in np.asarray(ids))


def _words(text: str) -> list[str]:
    return text.replace("\n", f" {_END} ").split()


def _checked_stride(unit: str, length: int, stride: int | None) -> int:
    """Returns the stride, by default the length, if both are positive integers, else raises DataError."""
    check_int(f"{unit}: length", length)
    check_int(f"{unit}: stride", stride := length if stride is None else stride)
    return stride


def _windows(
    name: str,
    unit: str,
    texts: Mapping[str, Sequence[str]],
    vocabulary: Sequence[str],
    unknown: int,
    length: int,
    stride: int,
    targets: Targets,
) -> Splits:
    """Makes a data set of windows of the tokens of each split; tokens not in ``vocabulary`` get the id ``unknown``."""
    pairs: dict[str, Any] = {}
    for split, tokens in texts.items():
        if len(tokens) <= length:
            raise DataError(
                f"{split} of {name} has {len(tokens):,} {unit}, too few for a window of {length} and its targets: "
                "use a longer text or a smaller length."
            )
        numbers = ids_of(tokens, vocabulary, unknown)
        apart = stride if split == "train" or targets == "last" else length
        windows = np.lib.stride_tricks.sliding_window_view(numbers, length + 1)[::apart]
        pairs[split] = windows[:, :-1], windows[:, 1:] if targets == "all" else windows[:, -1]
    return arrays(**pairs, name=name, class_names=tuple(vocabulary))
