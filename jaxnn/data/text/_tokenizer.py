"""Text becomes ids: a `Tokenizer` holds the settings; fitted to training texts it is a `Vocabulary`, which encodes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from jaxnn.data._arrays import check_integer
from jaxnn.types import Array, ConfigError, DataError, suggest

_PADDING, _UNKNOWN = 0, 1
_SPECIAL = ("", "\N{REPLACEMENT CHARACTER}")
_FILTERED = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_TO_SPACES = str.maketrans(_FILTERED, " " * len(_FILTERED))
_CHOICES = {"unit": ("words", "characters"), "keep": ("start", "end"), "pad": ("start", "end")}


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    r"""Settings by which texts become rows of token ids; a value, which may be a field of a config.

    Id 0 is padding, 1 a token that the training texts do not have or have too rarely; from 2 on the tokens of the
    training texts, the most frequent first, ties by code point, and after them the n-grams. A text's n-grams follow
    its tokens, as in Keras's example ``imdb_fasttext``: they are runs of ids, 1 among them, and one that the training
    texts do not have is left out.

    The words of a text are separated by white space after the characters ``!"#$%&()*+,-./:;<=>?@[\]^_`{|}~`` are
    replaced by spaces; apostrophes stay. That is the rule of Keras's ``text_to_word_sequence``.

    A text without tokens, such as ``":-)"``, becomes padding only; an empty text in a data set is an error.

    Attributes:
        unit: what a token is, "words" or "characters".
        lowercase: whether texts are lowered first.
        ngrams: the length of the longest runs of tokens that get an id too; 1: none do.
        max_ngrams: how many n-grams get an id, the most frequent; None: all in the training texts.
        vocabulary_size: the largest number of ids of single tokens, padding and the unknown included.
        length: ids per row.
        keep: which end of a longer text is kept.
        pad: which end of a shorter one is padded. Keras's ``pad_sequences`` pads the start.

    Raises:
        ConfigError: a field with another value.
    """

    unit: Literal["words", "characters"] = "words"
    lowercase: bool = True
    ngrams: int = 1
    max_ngrams: int | None = None
    vocabulary_size: int = 20_000
    length: int = 100
    keep: Literal["start", "end"] = "end"
    pad: Literal["start", "end"] = "end"

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"Tokenizer: {name} is {value!r}: {suggest(value, known)}.")
        for name, least in (("ngrams", 1), ("vocabulary_size", len(_SPECIAL) + 1), ("length", 1), ("max_ngrams", 0)):
            value = getattr(self, name)
            if name != "max_ngrams" or value is not None:
                check_integer(f"Tokenizer: {name}", value, least, ConfigError)

    def tokens(self, text: str) -> Sequence[str]:
        """The tokens of a text, in order."""
        text = text.lower() if self.lowercase else text
        return text.translate(_TO_SPACES).split() if self.unit == "words" else text

    def fit(self, texts: Sequence[str]) -> Vocabulary:
        """The vocabulary of training texts, the same in any order; DataError if there is no token in them."""
        counts: Counter[str] = Counter()
        for text in checked_texts("the training texts", texts):
            counts.update(self.tokens(text))
        counts.pop(_SPECIAL[_UNKNOWN], None)
        if not counts:
            raise DataError(f"the {len(texts):,} training texts hold no {self.unit}: give texts with some.")
        ranked = sorted(counts, key=lambda token: (-counts[token], token))[: self.vocabulary_size - len(_SPECIAL)]
        single = Vocabulary(self, (*_SPECIAL, *ranked))
        runs: Counter[tuple[int, ...]] = Counter()
        for text in texts if self.ngrams > 1 else ():
            runs.update(_runs(single.token_ids(text), self.ngrams))
        # Of equally frequent ones the shorter is first, then the one whose tokens have the lower ids.
        kept = sorted(runs, key=lambda run: (-runs[run], len(run), run))[: self.max_ngrams]
        return dataclasses.replace(single, ngrams={run: len(single) + place for place, run in enumerate(kept)})


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The meaning of each id; ``len()`` is the number of ids, those of n-grams included.

    Attributes:
        tokenizer: how texts become tokens.
        tokens: the token of each id: "" for 0, padding, and U+FFFD for 1, unknown.
        ngrams: the id of each run of token ids that has one.
    """

    tokenizer: Tokenizer
    tokens: tuple[str, ...] = dataclasses.field(repr=False)
    ngrams: Mapping[tuple[int, ...], int] = dataclasses.field(default=MappingProxyType({}), repr=False)

    def __len__(self) -> int:
        return len(self.tokens) + len(self.ngrams)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token that has one of its own."""
        return {token: index for index, token in enumerate(self.tokens) if index > _UNKNOWN}

    def token_ids(self, text: str) -> list[int]:
        """The ids of all tokens of a text, without n-grams."""
        find = self.ids.get
        return [find(token, _UNKNOWN) for token in self.tokenizer.tokens(text)]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Texts to rows of ids ``[texts, length]`` int32; a text's row does not depend on the others."""
        how, texts = self.tokenizer, checked_texts("what is encoded", texts)
        rows = np.full((len(texts), how.length), _PADDING, np.int32)
        for row, text in zip(rows, texts, strict=True):
            ids = self.token_ids(text)
            if self.ngrams:
                ids += [self.ngrams[run] for run in _runs(ids, how.ngrams) if run in self.ngrams]
            ids = ids[-how.length :] if how.keep == "end" else ids[: how.length]
            if ids:
                row[slice(-len(ids), None) if how.pad == "start" else slice(len(ids))] = ids
        return rows

    def decode(self, ids: Array) -> list[str]:
        """Rows of ids ``[texts, length]`` to texts: words with a space between them, characters without.

        Padding and n-grams are left out, an unknown token is U+FFFD. DataError for other ids than of this vocabulary.
        """
        rows = np.asarray(ids)
        if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
            raise DataError(f"decode needs integers [texts, length], not {rows.dtype} {list(rows.shape)}.")
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise DataError(f"ids of this vocabulary are 0 to {len(self) - 1:,}, not {rows.min()} to {rows.max()}.")
        between = " " if self.tokenizer.unit == "words" else ""
        shown = (rows != _PADDING) & (rows < len(self.tokens))
        return [between.join(self.tokens[i] for i in row[keep]) for row, keep in zip(rows, shown, strict=True)]


def checked_texts(where: str, texts: Any) -> Sequence[str]:
    """``text_arrays`` if it is a sequence of strings, else DataError; ``where`` is its name, for the message."""
    if isinstance(texts, str | bytes) or not hasattr(texts, "__len__"):
        raise DataError(f"{where} must be a list of texts, not one {type(texts).__name__}: put it into a list.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"text {index} of {where} is a {type(text).__name__}, not a str: decode or convert it.")
    known: Sequence[str] = texts
    return known


def _runs(ids: list[int], longest: int) -> Iterator[tuple[int, ...]]:
    """The runs of 2 ids in order, then those of 3, up to ``longest``."""
    for size in range(2, longest + 1):
        yield from zip(*(ids[start:] for start in range(size)), strict=False)
