"""How text becomes ids: a `Tokenizer` says how, and fitted to training texts it is a `Vocabulary`, which does it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, Literal

import numpy as np

from jaxnn.data.text.ngrams import NGrams, fit_ngrams, lookup
from jaxnn.data.text.ragged import Ragged, joined, padded, ragged
from jaxnn.types import Array, ConfigError, DataError, suggest

PADDING, UNKNOWN = 0, 1
_SPECIAL = ("", "\N{REPLACEMENT CHARACTER}")
_FILTERED = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_TO_SPACES = str.maketrans(_FILTERED, " " * len(_FILTERED))
_CHOICES = {"unit": ("words", "characters"), "keep": ("start", "end"), "pad": ("start", "end")}


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    r"""How texts become rows of token ids; a value, which may be a field of a config.

    Id 0 is padding, 1 a token that the training texts do not have or have too seldom; from 2 on stand the tokens of
    the training texts, the most frequent first, equals by code point. Behind them stand the n-grams. A text's n-grams
    follow its tokens, as in Keras's example ``imdb_fasttext``: they are runs of ids, 1 among them, and one that the
    training texts do not have is left out.

    The words of a text are what white space separates after the characters ``!"#$%&()*+,-./:;<=>?@[\]^_`{|}~`` have
    become spaces; apostrophes stay. That is the rule of Keras's ``text_to_word_sequence``.

    A text without tokens, such as ``":-)"``, becomes nothing but padding; an empty text in a data set is an error.

    Attributes:
        unit: what a token is, "words" or "characters".
        lowercase: whether texts are lowered first.
        ngrams: the length of the longest runs of tokens that get an id too; 1: none do.
        max_ngrams: how many n-grams get an id, the most frequent; None: all in the training texts.
        vocabulary_size: how many ids there are at most for single tokens, padding and the unknown among them.
        length: how many ids a row has.
        keep: which end of a longer text is kept.
        pad: where a shorter one is filled up. Keras's ``pad_sequences`` does so at the start.

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
            _check_choice(name, getattr(self, name), known)
        for name, least in (("ngrams", 1), ("vocabulary_size", len(_SPECIAL) + 1), ("length", 1)):
            _check_integer(name, getattr(self, name), least)
        if self.max_ngrams is not None:
            _check_integer("max_ngrams", self.max_ngrams, 0)

    def tokens(self, text: str) -> Sequence[str]:
        """The tokens of a text, in order."""
        text = text.lower() if self.lowercase else text
        return text.translate(_TO_SPACES).split() if self.unit == "words" else text

    def fit(self, texts: Sequence[str]) -> Vocabulary:
        """The vocabulary of training texts, a function of what tokens they hold and not of their order.

        Raises:
            DataError: not texts, or no token in them.
        """
        counts: Counter[str] = Counter()
        for text in checked_texts("the training texts", texts):
            counts.update(self.tokens(text))
        counts.pop(_SPECIAL[UNKNOWN], None)
        if not counts:
            raise DataError(
                f"the {len(texts):,} training texts hold no {self.unit} to learn a vocabulary from: give others."
            )
        ranked = sorted(counts, key=lambda token: (-counts[token], token))[: self.vocabulary_size - len(_SPECIAL)]
        single = Vocabulary(self, (*_SPECIAL, *ranked))
        if self.ngrams == 1:
            return single
        ngrams = fit_ngrams(single.singles(texts), self.ngrams, len(single), self.max_ngrams)
        return dataclasses.replace(single, ngrams=ngrams)


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """What each id stands for; ``len()`` is how many ids there are, n-grams' among them.

    Attributes:
        tokenizer: how texts become tokens.
        tokens: what each id of a single token stands for: "" for 0, padding, and U+FFFD for 1, unknown.
        ngrams: the table of runs of tokens, whose ids follow; or None.
    """

    tokenizer: Tokenizer
    tokens: tuple[str, ...] = dataclasses.field(repr=False)
    ngrams: NGrams | None = dataclasses.field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.tokens) + (0 if self.ngrams is None else self.ngrams.num_ids)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token that has one of its own."""
        return {token: index for index, token in enumerate(self.tokens) if index > UNKNOWN}

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Texts to rows of ids ``[texts, length]`` int32, as the tokenizer says; no text changes another's row.

        A text without tokens becomes nothing but padding.

        Raises:
            DataError: not texts.
        """
        rows = self.singles(texts)
        if self.ngrams is not None:
            rows = joined([rows, *lookup(self.ngrams, rows)])
        how = self.tokenizer
        return padded(rows, how.length, keep_end=how.keep == "end", pad_start=how.pad == "start")

    def decode(self, ids: Array) -> list[str]:
        """Rows of ids ``[texts, length]`` to texts: words with a space between them, characters without.

        Padding and n-grams are left out, an unknown token is U+FFFD.

        Raises:
            DataError: not integers ``[texts, length]``, or an id that there is not.
        """
        rows = np.asarray(ids)
        if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
            raise DataError(f"decode needs integers [texts, length], not {rows.dtype} {list(rows.shape)}.")
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise DataError(f"ids of this vocabulary are 0 to {len(self) - 1:,}, not {rows.min()} to {rows.max()}.")
        between = " " if self.tokenizer.unit == "words" else ""
        shown = (rows != PADDING) & (rows < len(self.tokens))
        return [between.join(self.tokens[i] for i in row[keep]) for row, keep in zip(rows, shown, strict=True)]

    def singles(self, texts: Sequence[str]) -> Ragged:
        """The ids of each text's tokens, whole and without n-grams.

        Raises:
            DataError: not texts.
        """
        find, split = self.ids.get, self.tokenizer.tokens
        found = map(split, checked_texts("what is encoded", texts))
        return ragged([np.fromiter(map(find, text, repeat(UNKNOWN)), np.int32, len(text)) for text in found])


def checked_texts(where: str, texts: Any) -> Sequence[str]:
    """``texts`` if it is a sequence of strings; ``where`` says which, for the message.

    Raises:
        DataError: it is something else; the first that is no text is named.
    """
    if isinstance(texts, str | bytes) or not hasattr(texts, "__len__"):
        raise DataError(f"{where} must be a list of texts, not one {type(texts).__name__}: put it into a list.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"text {index} of {where} is a {type(text).__name__}, not a str: decode or convert it.")
    known: Sequence[str] = texts
    return known


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"Tokenizer: {name} is {value!r}: {suggest(value, known)}.")


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"Tokenizer: {name} must be an integer of at least {least}, not {value!r}.")
