"""Text as windows of characters: by hand for a short text, and each defect by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxnn.data import characters
from jaxnn.types import DataError


def written(folder: Path, text: str) -> Path:
    path = folder / "tale.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_windows_of_a_short_text_by_hand(tmp_path: Path) -> None:
    # The first 27 of 30 characters are trained on: a newline is 0, a space 1, a 2, b 3, c 4.
    splits = characters(written(tmp_path, "ab c\n" * 6), length=2)
    assert splits.class_names == ("\n", " ", "a", "b", "c")
    assert splits.name == "tale"
    inputs, targets = splits.train.examples
    # 27 characters hold 13 windows of two inputs, each with one character more.
    assert inputs.shape == targets.shape == (13, 2)
    np.testing.assert_array_equal(inputs[:3], [[2, 3], [1, 4], [0, 2]])
    np.testing.assert_array_equal(targets[:3], [[3, 1], [4, 0], [2, 3]])
    # The last three are " c\n": one window, whose last target is the newline.
    assert splits.test is not None
    np.testing.assert_array_equal(splits.test.examples.inputs, [[1, 4]])
    np.testing.assert_array_equal(splits.test.examples.targets, [[4, 0]])
    assert inputs.dtype == targets.dtype == np.int32


def test_training_windows_may_overlap(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(map(chr, range(100, 200))))
    # Of 90 characters, windows of 4 inputs and a target more begin at 0, 3, …, 84.
    splits = characters(path, length=4, stride=3)
    np.testing.assert_array_equal(splits.train.examples.inputs[:, 0], np.arange(0, 86, 3))
    np.testing.assert_array_equal(splits.train.examples.inputs + 1, splits.train.examples.targets)
    # Of the last 10 each that has a successor in a whole window is predicted once.
    assert splits.test is not None
    assert splits.test.examples.targets.shape == (2, 4)


def test_of_the_test_each_character_is_predicted_once(tmp_path: Path) -> None:
    splits = characters(written(tmp_path, "abcdefghij" * 10), length=4, stride=3)
    assert splits.test is not None
    np.testing.assert_array_equal(splits.test.targets, [[1, 2, 3, 4], [5, 6, 7, 8]])


def test_the_vocabulary_comes_from_the_training_split(tmp_path: Path) -> None:
    splits = characters(written(tmp_path, "ab" * 9 + "zé"), length=1)
    assert splits.class_names == ("a", "b", "\N{REPLACEMENT CHARACTER}")
    assert splits.test is not None
    assert (splits.test.examples.inputs.tolist(), splits.test.examples.targets.tolist()) == ([[2]], [[2]])


def test_the_next_character_alone_as_in_keras(tmp_path: Path) -> None:
    text = "".join(map(chr, range(100, 200)))
    splits = characters(written(tmp_path, text), length=4, stride=3, targets="last")
    train, cut = splits.train.examples, 90
    # Keras's lstm_text_generation: for i in range(0, len(text) - maxlen, step).
    assert train.inputs.tolist() == [list(range(i, i + 4)) for i in range(0, cut - 4, 3)]
    assert train.targets.tolist() == list(range(4, cut, 3))
    assert train.targets.dtype == np.int32
    # The test's windows are as far apart as those of training; none of its characters is known.
    assert splits.test is not None
    assert splits.test.examples.inputs.tolist() == [[90] * 4] * 2
    assert splits.test.targets.tolist() == [90, 90]


def test_a_text_may_be_lowered(tmp_path: Path) -> None:
    path = written(tmp_path, "AbaB" * 10)
    assert characters(path, length=2).class_names == ("A", "B", "a", "b")
    assert characters(path, length=2, lowercase=True).class_names == ("a", "b")


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (None, {}, "tale.txt cannot be read: No such file"),
        (b"ab\xff\xfe" * 500, {}, "tale.txt is no text in UTF-8 .*at byte 2"),
        (b"", {}, "holds 0 characters, of which a tenth does not fill a window of 64"),
        (b"ab" * 320, {}, "holds 640 characters, of which a tenth does not fill a window of 64"),
        (b"ab" * 320, {"length": 0}, "length and stride must be integers of at least 1, not 0 and 0"),
        (b"ab" * 320, {"stride": -1}, "length and stride must be integers of at least 1, not 64 and -1"),
        (b"ab" * 320, {"targets": "next"}, "characters: targets is 'next': .*Known are 'all', 'last'"),
    ],
)
def test_what_cannot_be_used_is_named(
    content: bytes | None, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tale.txt").write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        characters(tmp_path / "tale.txt", **options)


def test_a_text_just_long_enough_passes(tmp_path: Path) -> None:
    splits = characters(written(tmp_path, "ab" * 325), length=64)
    assert splits.test is not None
    assert (splits.train.num_examples, splits.test.num_examples) == (9, 1)  # 585 // 64 and 65 - 1 characters


def test_tiny_shakespeare_without_a_path(data_dir: Path) -> None:
    splits = characters(data_dir=data_dir)
    # 1,115,394 characters: 1,003,854 to train, whose successors fill 15,685 windows; 111,540 to test, 1,742.
    assert splits.test is not None
    assert (splits.train.num_examples, splits.test.num_examples) == (15_685, 1_742)
    assert (len(splits.class_names), splits.name) == (65, "tinyshakespeare")
    beginning = "".join(splits.class_names[index] for index in splits.train.examples.inputs[0])
    assert beginning.startswith("First Citizen:\nBefore we proceed")


def test_tiny_shakespeare_as_keras_would_read_it(data_dir: Path) -> None:
    splits = characters(length=40, stride=3, targets="last", lowercase=True, data_dir=data_dir)
    assert splits.test is not None
    # ceil((1,003,854 - 40) / 3) and ceil((111,540 - 40) / 3); without capitals 39 characters.
    assert (splits.train.num_examples, splits.test.num_examples) == (334_605, 37_167)
    assert len(splits.class_names) == 39
