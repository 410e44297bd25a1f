"""Tokenizer and Vocabulary: ids and n-grams of short texts by hand, invariants, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxnn.data import Tokenizer
from jaxnn.types import ConfigError, DataError

TRAIN = ["The cat sat.", "the dog; the CAT's dog", "a-cat"]
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def random_texts(seed: int, count: int = 40, words: str = "abcdefgh") -> list[str]:
    """Texts of 0 to 11 words, some words far more frequent than others."""
    rng = np.random.default_rng(seed)
    chances = 1.0 / np.arange(1, len(words) + 1)
    return [" ".join(rng.choice(list(words), n, p=chances / chances.sum())) for n in rng.integers(0, 12, count)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat sat.", ["the", "cat", "sat"]),
        ("It's <br /><br />well-made; 10/10!!", ["it's", "br", "br", "well", "made", "10", "10"]),
        ("tabs\tand\nlines\r\nand\u00a0spaces", ["tabs", "and", "lines", "and", "spaces"]),
        ("ÉTÉ naïve_café", ["été", "naïve", "café"]),
        ('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~', []),
        ("'quoted'", ["'quoted'"]),
        ("", []),
    ],
)
def test_words_are_split_as_by_keras(text: str, words: list[str]) -> None:
    assert list(Tokenizer().tokens(text)) == words


def test_case_and_characters_may_be_kept() -> None:
    assert list(Tokenizer(lowercase=False).tokens("The CAT")) == ["The", "CAT"]
    assert list(Tokenizer(unit="characters").tokens("A b.")) == ["a", " ", "b", "."]


def test_ids_by_hand() -> None:
    vocabulary = Tokenizer(length=5).fit(TRAIN)
    # "the" three times, "cat" and "dog" twice, "a", "cat's" and "sat" once; of equals the first of the alphabet.
    assert vocabulary.tokens == ("", UNKNOWN, "the", "cat", "dog", "a", "cat's", "sat")
    assert len(vocabulary) == 8
    rows = vocabulary.encode(TRAIN)
    np.testing.assert_array_equal(rows, [[2, 3, 7, 0, 0], [2, 4, 2, 6, 4], [5, 3, 0, 0, 0]])
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(vocabulary.encode(["a bird sat", ""]), [[5, 1, 7, 0, 0], [0, 0, 0, 0, 0]])
    assert vocabulary.encode([]).shape == (0, 5)

    vocabulary = Tokenizer(vocabulary_size=4, length=5).fit(TRAIN)
    assert vocabulary.tokens == ("", UNKNOWN, "the", "cat")
    np.testing.assert_array_equal(vocabulary.encode(TRAIN), [[2, 3, 1, 0, 0], [2, 1, 2, 1, 1], [1, 3, 0, 0, 0]])


@pytest.mark.parametrize(
    ("keep", "pad", "rows"),
    [
        ("end", "end", [[3, 2, 2], [4, 0, 0], [3, 2, 4]]),
        ("end", "start", [[3, 2, 2], [0, 0, 4], [3, 2, 4]]),
        ("start", "end", [[4, 3, 2], [4, 0, 0], [3, 2, 4]]),
        ("start", "start", [[4, 3, 2], [0, 0, 4], [3, 2, 4]]),
    ],
)
def test_either_end_is_kept_or_padded(keep: Any, pad: Any, rows: list[list[int]]) -> None:
    vocabulary = Tokenizer(length=3, keep=keep, pad=pad).fit(["c c c b b a"])
    np.testing.assert_array_equal(vocabulary.encode(["a b c c", "a", "b c a"]), rows)


def test_characters_by_hand() -> None:
    vocabulary = Tokenizer(unit="characters", length=4).fit(["Aba", "b b"])
    # "b" three times, "a" twice, the space once.
    assert vocabulary.tokens == ("", UNKNOWN, "b", "a", " ")
    np.testing.assert_array_equal(vocabulary.encode(["ab c", "BA"]), [[3, 2, 4, 1], [2, 3, 0, 0]])
    assert vocabulary.decode(vocabulary.encode(["ab c", "BA"])) == [f"ab {UNKNOWN}", "ba"]


def test_bigrams_by_hand() -> None:
    # a is 2, b is 3; "a b" and "b a" occur twice and get 4 and 5.
    vocabulary = Tokenizer(ngrams=2, length=7).fit(["a b a b", "b a"])
    assert len(vocabulary) == 6
    rows = vocabulary.encode(["a b a b", "b b a", "c a b"])
    np.testing.assert_array_equal(rows, [[2, 3, 2, 3, 4, 5, 4], [3, 3, 2, 5, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0]])
    # The end is kept of n-grams too; texts without any have none.
    vocabulary = Tokenizer(ngrams=2, length=4).fit(["a b a b"])
    np.testing.assert_array_equal(vocabulary.encode(["a b a b", "b"]), [[3, 4, 5, 4], [3, 0, 0, 0]])
    assert len(Tokenizer(ngrams=3).fit(["a", "b", ""])) == 4


def test_trigrams_by_hand() -> None:
    # a is 2, b is 3. Twice: "a a" (4), "a b" (5), "a a b" (6); once: "b a" (7), "a b a" (8).
    settings = Tokenizer(ngrams=3, length=9)
    vocabulary = settings.fit(["a a b a", "a a b"])
    assert len(vocabulary) == 9
    np.testing.assert_array_equal(vocabulary.encode(["a a b a"]), [[2, 2, 3, 2, 4, 5, 7, 6, 8]])
    np.testing.assert_array_equal(vocabulary.encode(["b a a x"]), [[3, 2, 2, 1, 7, 4, 0, 0, 0]])
    few = dataclasses.replace(settings, max_ngrams=2).fit(["a a b a", "a a b"])
    np.testing.assert_array_equal(few.encode(["a a b a"]), [[2, 2, 3, 2, 4, 5, 0, 0, 0]])
    assert len(dataclasses.replace(settings, max_ngrams=0).fit(["a a b a"])) == 4


@pytest.mark.parametrize("settings", [Tokenizer(length=9, ngrams=3), Tokenizer(unit="characters")])
def test_rows_depend_on_neither_order_nor_other_texts(settings: Tokenizer) -> None:
    train, test = random_texts(0), random_texts(1)
    vocabulary, reversed_vocabulary = settings.fit(train), settings.fit(train[::-1])
    assert vocabulary.tokens == reversed_vocabulary.tokens
    rows = vocabulary.encode(test)
    np.testing.assert_array_equal(rows, reversed_vocabulary.encode(test))
    np.testing.assert_array_equal(vocabulary.encode(["new words", *test])[1:], rows)
    np.testing.assert_array_equal(np.concatenate([vocabulary.encode([text]) for text in test]), rows)


@pytest.mark.parametrize("pad", ["start", "end"])
@pytest.mark.parametrize("ngrams", [1, 2])
def test_decode_inverts_encode_except_for_case_and_punctuation(pad: Any, ngrams: int) -> None:
    vocabulary = Tokenizer(length=20, pad=pad, ngrams=ngrams).fit(TRAIN)
    assert vocabulary.decode(vocabulary.encode(TRAIN)) == ["the cat sat", "the dog the cat's dog", "a cat"]
    assert vocabulary.decode(vocabulary.encode(["", "A bird?"])) == ["", f"a {UNKNOWN}"]

    # U+FFFD itself is unknown.
    vocabulary = Tokenizer(length=2).fit([f"{UNKNOWN} a {UNKNOWN}"])
    assert vocabulary.tokens == ("", UNKNOWN, "a")
    np.testing.assert_array_equal(vocabulary.encode([UNKNOWN]), [[1, 0]])


FITTED = Tokenizer().fit(TRAIN)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Tokenizer().fit([]), "0 training texts have no words"),
        (lambda: Tokenizer().fit(["", "?! ..."]), "2 training texts have no words"),
        (lambda: Tokenizer().fit("one text"), "must be a list of texts, not one str"),
        (lambda: Tokenizer().fit(5), "must be a list of texts, not one int"),
        (lambda: Tokenizer().fit(["a", None]), "text 1 of the training texts is a NoneType, not a str"),
        (lambda: FITTED.encode("one text"), "must be a list of texts, not one str"),
        (lambda: FITTED.encode([b"a"]), "text 0 of the texts to encode is a bytes, not a str: decode"),
        (lambda: FITTED.decode(np.zeros((2, 3))), r"integers \[texts, length\], not float64 \[2, 3\]"),
        (lambda: FITTED.decode(np.zeros(3, int)), r"integers \[texts, length\], not int64 \[3\]"),
        (lambda: FITTED.decode([[0, 8]]), "are 0 to 7, not 0 to 8"),
        (lambda: FITTED.decode([[-1, 2]]), "are 0 to 7, not -1 to 2"),
    ],
)
def test_bad_texts_and_ids_raise(call: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unit": "word"}, "unit is 'word': did you mean 'words'"),
        ({"keep": "left"}, "keep is 'left': .*Known are 'end', 'start'"),
        ({"pad": None}, "pad is None"),
        ({"length": 0}, "length must be an integer of at least 1, not 0"),
        ({"length": 5.0}, r"length must be an integer of at least 1, not 5\.0"),
        ({"ngrams": 0}, "ngrams must be an integer of at least 1, not 0"),
        ({"vocabulary_size": 2}, "vocabulary_size must be an integer of at least 3, not 2"),
        ({"max_ngrams": -1}, "max_ngrams must be an integer of at least 0, not -1"),
    ],
)
def test_bad_fields_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^Tokenizer: {message}"):
        Tokenizer(**fields)
