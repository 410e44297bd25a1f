"""Windows of characters or words: short texts by hand, the sizes of real ones."""

from typing import Any

import numpy as np

from jaxnn.data import char_corpus, decode_text, encode_text, ptb, word_corpus
from tests.data.written import write

ALPHABET = "".join(map(chr, range(100, 200)))


def rows(source: Any) -> tuple[list[Any], list[Any]]:
    assert source.targets.dtype == source.examples.inputs.dtype == np.int32
    return source.examples.inputs.tolist(), source.targets.tolist()


def test_windows_of_characters_by_hand(tmp_path):
    # The first 27 of 30 characters are train: a newline is 0, a space 1, a 2, b 3, c 4.
    splits = char_corpus(write(tmp_path / "tale.txt", "ab c\n" * 6), length=2)
    assert (splits.class_names, splits.name) == (("\n", " ", "a", "b", "c"), "tale")
    inputs, targets = rows(splits.train)
    # 27 characters have 13 windows of two inputs, each with one character more.
    assert len(inputs) == len(targets) == 13
    assert (inputs[:3], targets[:3]) == ([[2, 3], [1, 4], [0, 2]], [[3, 1], [4, 0], [2, 3]])
    # The last three are " c\n": one window, whose last target is the newline.
    assert rows(splits.test) == ([[1, 4]], [[4, 0]])
    # Unknown characters share an id.
    splits = char_corpus(write(tmp_path / "tale.txt", "ab" * 9 + "zé"), length=1)
    assert splits.class_names == ("a", "b", "\N{REPLACEMENT CHARACTER}")
    assert rows(splits.test) == ([[2]], [[2]])
    # 585 // 64 training and 65 - 1 test characters fill windows.
    splits = char_corpus(write(tmp_path / "tale.txt", "ab" * 325), length=64)
    assert [source.num_examples for source in splits.named().values()] == [9, 1]


def test_only_training_windows_overlap(tmp_path):
    # Of 90 characters, windows of 4 inputs and a target more start at 0, 3, …, 84.
    train: Any = char_corpus(write(tmp_path / "tale.txt", ALPHABET), length=4, stride=3).train.examples
    np.testing.assert_array_equal(train.inputs[:, 0], np.arange(0, 86, 3))
    np.testing.assert_array_equal(train.inputs + 1, train.targets)
    splits = char_corpus(write(tmp_path / "tale.txt", "abcdefghij" * 10), length=4, stride=3)
    assert rows(splits.test)[1] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    # Keras's lstm_text_generation: for i in range(0, len(text) - maxlen, step).
    splits = char_corpus(write(tmp_path / "tale.txt", ALPHABET), length=4, stride=3, targets="last")
    assert rows(splits.train) == ([list(range(i, i + 4)) for i in range(0, 86, 3)], list(range(4, 90, 3)))
    # Test windows have the same stride; here all their characters are unknown.
    assert rows(splits.test) == ([[90] * 4] * 2, [90, 90])
    splits = char_corpus(write(tmp_path / "tale.txt", "abcdefghij" * 10), length=4, stride=3, targets="last")
    assert rows(splits.test)[1] == [4, 7]


def test_windows_of_words_by_hand(tmp_path):
    paths = {
        "train": write(tmp_path / "ptb.train.txt", " a b a \n b b c a"),
        "validation": write(tmp_path / "valid.txt", "a\nb\n"),
        "test": write(tmp_path / "test.txt", "c b a b c"),
    }
    splits = word_corpus(paths, length=2)
    # a and b three times each, c and the line's end once.
    assert (splits.class_names, splits.name) == (("a", "b", "<eos>", "c"), "ptb.train")
    # a b a <eos> b b c a
    assert rows(splits.train) == ([[0, 1], [0, 2], [1, 1]], [[1, 0], [2, 1], [1, 3]])
    assert rows(splits.validation) == ([[0, 2]], [[2, 1]])  # a <eos> b <eos>
    assert rows(splits.test)[1] == [[1, 0], [1, 3]]
    # Of one file nine tenths are train; the 4 other words are unknown.
    splits = word_corpus(write(tmp_path / "tale.txt", " ".join(f"w{i:02}" for i in range(40))), length=3, stride=1)
    assert splits.train.num_examples == 33
    assert splits.class_names == (*(f"w{i:02}" for i in range(36)), "<unk>")
    assert rows(splits.test)[0] == [[36, 36, 36]]
    path = write(tmp_path / "tale.txt", "The the " * 20)
    for lowercase, names in ((False, ("The", "the")), (True, ("the",))):
        assert word_corpus(path, length=2, lowercase=lowercase).class_names == names
        assert ("T" in char_corpus(path, length=2, lowercase=lowercase).class_names) != lowercase


def test_text_to_ids_and_back(tmp_path):
    for make, text in ((char_corpus, "ab c\n" * 6), (word_corpus, "the cat \nsat " * 6)):
        splits: Any = make(write(tmp_path / "tale.txt", text), length=1, stride=1)
        ids = encode_text(text, splits.class_names)
        assert decode_text(ids, splits.class_names) == text
        np.testing.assert_array_equal(ids[:9], splits.train.examples.inputs[:9, 0])
    assert encode_text("a dog", ("a", "<unk>")).tolist() == [0, 1] and encode_text("ab", ("a", "\ufffd"))[1] == 1


def test_words_without_an_id_are_unknown(tmp_path):
    for train, test, size, vocabulary, targets in (
        # All words have ids.
        ("b a a b a c", "a b c", 3, ("a", "b", "c"), [[1, 2]]),
        # One word too many: with <unk>, two must go.
        ("b a a b a c", "a b c", 2, ("a", "<unk>"), [[1, 1]]),
        # The <unk> of the text keeps its id.
        ("b a a b <unk> <unk> <unk> c", "a b c", 3, ("<unk>", "a", "b"), [[2, 0]]),
        # If it is too rare, it gets the last id.
        ("b a a b a b <unk> c", "a b c", 2, ("a", "<unk>"), [[1, 1]]),
        # Only the test split has unknown words.
        ("b a a b a", "a x b", 3, ("a", "b", "<unk>"), [[2, 1]]),
    ):
        paths = {"train": write(tmp_path / "train.txt", train), "test": write(tmp_path / "test.txt", test)}
        splits = word_corpus(paths, length=2, vocabulary_size=size)
        assert (splits.class_names, rows(splits.test)[1]) == (vocabulary, targets), train


def test_real_texts(data_dir):
    splits: Any = char_corpus(data_dir=data_dir)
    # 1,115,394 characters: 1,003,854 train, whose successors fill 15,685 windows; 111,540 test, 1,742.
    assert repr(splits) == "Splits(tinyshakespeare: 15,685 train, 1,742 test, inputs int32 [64], 65 classes)"
    keras = char_corpus(length=40, stride=3, targets="last", lowercase=True, data_dir=data_dir)
    # ceil((1,003,854 - 40) / 3) and ceil((111,540 - 40) / 3); without capitals 39 characters.
    assert repr(keras) == "Splits(tinyshakespeare: 334,605 train, 37,167 test, inputs int32 [40], 39 classes)"
    # A window of one word for each word but the last.
    splits = ptb(length=1, data_dir=data_dir)
    assert (
        repr(splits) == "Splits(ptb: 929,588 train, 73,759 validation, 82,429 test, inputs int32 [1], 10,000 classes)"
    )
    assert (
        " ".join(splits.class_names[i] for i in splits.test.examples.inputs[:7, 0])
        == "no it was n't black monday <eos>"
    )
