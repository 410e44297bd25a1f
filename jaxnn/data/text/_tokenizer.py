"""Tokenization: a `Tokenizer` has the settings; fitted to training texts it gives a `Vocabulary`, which encodes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np

from jaxnn._fields import bounded, check_fields
from jaxnn.types import Array, DataError

_PADDING, _UNKNOWN = 0, 1
_SPECIAL = ("", "\N{REPLACEMENT CHARACTER}")
_FILTERED = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_TO_SPACES = str.maketrans(_FILTERED, " " * len(_FILTERED))


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    r"""Settings for converting texts to rows of token ids; a frozen dataclass, which may be a field of a config.

    Id 0 is padding and 1 any unknown token: one that is missing or too rare in the training texts. From 2 on follow
    the tokens of the training texts by falling frequency, ties by code point, and then their n-grams. The n-grams of a
    text follow its tokens, as in Keras's example ``imdb_fasttext``: they are runs of ids, which may include 1, and
    those that the training texts do not have are dropped.

    Words are separated by white space after the characters ``!"#$%&()*+,-./:;<=>?@[\]^_`{|}~`` are replaced by
    spaces; apostrophes stay. This is the rule of Keras's ``text_to_word_sequence``. A text without tokens, such as
    ``":-)"``, becomes only padding; an empty text in a data set is an error.

    >>> vocabulary = jn.data.Tokenizer(length=4).fit(["the cat sat", "the dog"])
    >>> vocabulary.encode(["The dog sat.", "a cat"])
    array([[2, 4, 5, 0], [1, 3, 0, 0]], dtype=int32)

    Raises ConfigError for a field with another value.
    """

    unit: Literal["words", "characters"] = bounded("words", choices=("words", "characters"))
    lowercase: bool = True  # whether to lowercase texts
    ngrams: int = bounded(1, least=1)  # the longest n-grams that get ids; 1: none
    # Number of n-grams that get ids, the most frequent; None: all in the training texts.
    max_ngrams: int | None = bounded(None, least=0)
    # The largest number of ids of single tokens, including padding and unknown.
    vocabulary_size: int = bounded(20_000, least=len(_SPECIAL) + 1)
    length: int = bounded(100, least=1)  # ids per row
    keep: Literal["start", "end"] = bounded("end", choices=("start", "end"))  # which end of a longer text is kept
    # Which end of a shorter text is padded; Keras's `pad_sequences`: the start.
    pad: Literal["start", "end"] = bounded("end", choices=("start", "end"))

    def __post_init__(self) -> None:
        check_fields(self, "Tokenizer")

    def tokens(self, text: str) -> Sequence[str]:
        """Returns the tokens of a text, in order."""
        text = text.lower() if self.lowercase else text
        return text.translate(_TO_SPACES).split() if self.unit == "words" else text

    def fit(self, texts: Sequence[str]) -> Vocabulary:
        """Returns the vocabulary of training texts, the same for any order; DataError if they have no token."""
        counts: Counter[str] = Counter()
        for text in checked_texts("the training texts", texts):
            counts.update(self.tokens(text))
        counts.pop(_SPECIAL[_UNKNOWN], None)
        if not counts:
            raise DataError(f"the {len(texts):,} training texts have no {self.unit}: add texts with {self.unit}.")
        ranked = sorted(counts, key=lambda token: (-counts[token], token))[: self.vocabulary_size - len(_SPECIAL)]
        single = Vocabulary(self, (*_SPECIAL, *ranked))
        runs: Counter[tuple[int, ...]] = Counter()
        for text in texts if self.ngrams > 1 else ():
            runs.update(_runs(single.token_ids(text), self.ngrams))
        # By falling frequency, then by length, then by ids.
        kept = sorted(runs, key=lambda run: (-runs[run], len(run), run))[: self.max_ngrams]
        return dataclasses.replace(single, ngrams={run: len(single) + place for place, run in enumerate(kept)})


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The token of each id; ``len()`` is the number of ids, including those of n-grams.

    >>> vocabulary = jn.data.Tokenizer(length=4).fit(["the cat sat", "the dog"])
    >>> vocabulary.decode(vocabulary.encode(["The dog sat."]))
    ['the dog sat']
    """

    tokenizer: Tokenizer
    tokens: tuple[str, ...] = dataclasses.field(repr=False)  # of each id: "" for 0, padding, U+FFFD for 1, unknown
    # The id of each n-gram, a tuple of token ids, that has one.
    ngrams: Mapping[tuple[int, ...], int] = dataclasses.field(default=MappingProxyType({}), repr=False)

    def __len__(self) -> int:
        return len(self.tokens) + len(self.ngrams)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each known token."""
        return {token: index for index, token in enumerate(self.tokens) if index > _UNKNOWN}

    def token_ids(self, text: str) -> list[int]:
        """Returns the ids of all tokens of a text, without n-grams."""
        find = self.ids.get
        return [find(token, _UNKNOWN) for token in self.tokenizer.tokens(text)]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Converts texts to rows of ids ``[texts, length]`` int32; a text's row does not depend on the others."""
        settings, texts = self.tokenizer, checked_texts("the texts to encode", texts)
        rows = np.full((len(texts), settings.length), _PADDING, np.int32)
        for row, text in zip(rows, texts, strict=True):
            ids = self.token_ids(text)
            if self.ngrams:
                ids += [self.ngrams[run] for run in _runs(ids, settings.ngrams) if run in self.ngrams]
            ids = ids[-settings.length :] if settings.keep == "end" else ids[: settings.length]
            if ids:
                row[slice(-len(ids), None) if settings.pad == "start" else slice(len(ids))] = ids
        return rows

    def decode(self, ids: Array) -> list[str]:
        """Converts rows of ids ``[texts, length]`` to texts: words with a space between them, characters without.

        Padding and n-grams are dropped; an unknown token becomes U+FFFD. Raises DataError for ids out of range.
        """
        rows = np.asarray(ids)
        if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
            raise DataError(f"decode takes integers [texts, length], not {rows.dtype} {list(rows.shape)}.")
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise DataError(f"ids of this vocabulary are 0 to {len(self) - 1:,}, not {rows.min()} to {rows.max()}.")
        between = " " if self.tokenizer.unit == "words" else ""
        shown = (rows != _PADDING) & (rows < len(self.tokens))
        return [between.join(self.tokens[i] for i in row[keep]) for row, keep in zip(rows, shown, strict=True)]


def checked_texts(where: str, texts: Sequence[str]) -> Sequence[str]:
    """Returns ``texts`` if it is a sequence of strings, else raises DataError; ``where`` is for the message."""
    if isinstance(texts, str | bytes) or not hasattr(texts, "__len__"):
        raise DataError(f"{where} must be a list of texts, not one {type(texts).__name__}: put it into a list.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"text {index} of {where} is a {type(text).__name__}, not a str: decode or convert it.")
    return texts


def _runs(ids: list[int], longest: int) -> Iterator[tuple[int, ...]]:
    """Yields the n-grams of 2 ids in order, then those of 3, up to ``longest``."""
    for size in range(2, longest + 1):
        yield from zip(*(ids[start:] for start in range(size)), strict=False)
