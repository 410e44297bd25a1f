"""Tokenizer and Vocabulary: ids and n-grams of short texts by hand, invariants."""

import dataclasses

import numpy as np
import pytest

from jaxnn.data import Tokenizer

TRAIN = ["The cat sat.", "the dog; the CAT's dog", "a-cat"]
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def test_words_are_split_as_by_keras():
    for text, words in {
        "It's <br /><br />well-made; 10/10!!": "it's br br well made 10 10",
        "tabs\tand\nlines\r\nand\u00a0spaces": "tabs and lines and spaces",
        "ÉTÉ naïve_café 'quoted'": "été naïve café 'quoted'",
        '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~': "",
    }.items():
        assert list(Tokenizer().tokens(text)) == words.split()


def test_ids_by_hand():
    vocabulary = Tokenizer(length=5).fit(TRAIN)
    # "the" three times, "cat" and "dog" twice, "a", "cat's" and "sat" once; ties by code point.
    assert vocabulary.tokens == ("", UNKNOWN, "the", "cat", "dog", "a", "cat's", "sat") and len(vocabulary) == 8
    rows = vocabulary.encode([*TRAIN, "a bird sat", ""])
    assert rows.dtype == np.int32
    assert rows.tolist() == [[2, 3, 7, 0, 0], [2, 4, 2, 6, 4], [5, 3, 0, 0, 0], [5, 1, 7, 0, 0], [0] * 5]
    assert vocabulary.encode([]).shape == (0, 5)
    vocabulary = Tokenizer(vocabulary_size=4, length=5).fit(TRAIN)
    assert vocabulary.tokens == ("", UNKNOWN, "the", "cat")
    assert vocabulary.encode(TRAIN).tolist() == [[2, 3, 1, 0, 0], [2, 1, 2, 1, 1], [1, 3, 0, 0, 0]]
    assert Tokenizer(lowercase=False).fit(["The CAT"]).tokens[2:] == ("CAT", "The")
    # U+FFFD itself is unknown.
    vocabulary = Tokenizer(length=2).fit([f"{UNKNOWN} a {UNKNOWN}"])
    assert (vocabulary.tokens[2:], vocabulary.encode([UNKNOWN]).tolist()) == (("a",), [[1, 0]])


def test_either_end_is_kept_or_padded():
    for keep, pad, rows in (
        ("end", "end", [[3, 2, 2], [4, 0, 0], [3, 2, 4]]),
        ("end", "start", [[3, 2, 2], [0, 0, 4], [3, 2, 4]]),
        ("start", "end", [[4, 3, 2], [4, 0, 0], [3, 2, 4]]),
    ):
        vocabulary = Tokenizer(length=3, keep=keep, pad=pad).fit(["c c c b b a"])
        assert vocabulary.encode(["a b c c", "a", "b c a"]).tolist() == rows, (keep, pad)


def test_characters_by_hand():
    vocabulary = Tokenizer(unit="characters", length=4).fit(["Aba", "b b"])
    # "b" three times, "a" twice, the space once.
    assert vocabulary.tokens == ("", UNKNOWN, "b", "a", " ")
    rows = vocabulary.encode(["ab c", "BA"])
    assert rows.tolist() == [[3, 2, 4, 1], [2, 3, 0, 0]]
    assert vocabulary.decode(rows) == [f"ab {UNKNOWN}", "ba"]


def test_ngrams_by_hand():
    vocabulary = Tokenizer(ngrams=2, length=4).fit(["a b a b"])
    assert vocabulary.encode(["a b a b", "b"]).tolist() == [[3, 4, 5, 4], [3, 0, 0, 0]]
    assert len(Tokenizer(ngrams=3).fit(["a", "b", ""])) == 4
    # Twice: "a a" (4), "a b" (5), "a a b" (6); once: "b a" (7), "a b a" (8).
    settings, texts = Tokenizer(ngrams=3, length=9), ["a a b a", "a a b"]
    vocabulary = settings.fit(texts)
    assert len(vocabulary) == 9
    rows = vocabulary.encode(["a a b a", "b a a x"])
    assert rows.tolist() == [[2, 2, 3, 2, 4, 5, 7, 6, 8], [3, 2, 2, 1, 7, 4, 0, 0, 0]]
    few = dataclasses.replace(settings, max_ngrams=2).fit(texts)
    assert few.encode(["a a b a"]).tolist() == [[2, 2, 3, 2, 4, 5, 0, 0, 0]]
    assert len(dataclasses.replace(settings, max_ngrams=0).fit(texts)) == 4


@pytest.mark.parametrize("settings", [Tokenizer(length=9, ngrams=3), Tokenizer(unit="characters")])
def test_rows_depend_on_neither_order_nor_other_texts(settings):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(list("aaaabbcdefgh"), size)) for size in rng.integers(0, 12, 80)]
    vocabulary, reversed_vocabulary = settings.fit(texts[:40]), settings.fit(texts[39::-1])
    assert vocabulary.tokens == reversed_vocabulary.tokens
    rows = vocabulary.encode(texts[40:])
    np.testing.assert_array_equal(rows, reversed_vocabulary.encode(texts[40:]))
    np.testing.assert_array_equal(vocabulary.encode(["new words", *texts[40:]])[1:], rows)


@pytest.mark.parametrize("pad", ["start", "end"])
@pytest.mark.parametrize("ngrams", [1, 2])
def test_decode_inverts_encode_except_for_case_and_punctuation(pad, ngrams):
    vocabulary = Tokenizer(length=20, pad=pad, ngrams=ngrams).fit(TRAIN)
    assert vocabulary.decode(vocabulary.encode(TRAIN)) == ["the cat sat", "the dog the cat's dog", "a cat"]
    assert vocabulary.decode(vocabulary.encode(["", "A bird?"])) == ["", f"a {UNKNOWN}"]
