"""Running text as windows of words: by hand for short texts, and each defect by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxnn.data import ptb, words
from jaxnn.types import DataError


def written(folder: Path, text: str, name: str = "tale.txt") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_windows_of_three_files_by_hand(tmp_path: Path) -> None:
    paths = {
        "train": written(tmp_path, " a b a \n b b c a", "ptb.train.txt"),
        "validation": written(tmp_path, "a\nb\n", "valid.txt"),
        "test": written(tmp_path, "c b a b c", "test.txt"),
    }
    splits = words(paths, length=2)
    # a and b three times each, c and the line's end once.
    assert splits.class_names == ("a", "b", "<eos>", "c")
    assert splits.name == "ptb.train"
    # a b a <eos> b b c a
    np.testing.assert_array_equal(splits.train.examples.inputs, [[0, 1], [0, 2], [1, 1]])
    np.testing.assert_array_equal(splits.train.targets, [[1, 0], [2, 1], [1, 3]])
    assert splits.validation is not None and splits.test is not None
    np.testing.assert_array_equal(splits.validation.examples.inputs, [[0, 2]])  # a <eos> b <eos>
    np.testing.assert_array_equal(splits.validation.targets, [[2, 1]])
    np.testing.assert_array_equal(splits.test.targets, [[1, 0], [1, 3]])
    assert splits.train.targets.dtype == splits.train.examples.inputs.dtype == np.int32


def test_one_file_is_cut_at_nine_tenths_of_its_words(tmp_path: Path) -> None:
    splits = words(written(tmp_path, " ".join(f"w{i:02}" for i in range(40))), length=3, stride=1)
    assert splits.test is not None
    # 36 words hold 33 windows of 3 and a target more; of the 4 others none is known.
    assert (splits.train.num_examples, splits.test.num_examples) == (33, 1)
    assert splits.class_names[:2] == ("w00", "w01") and splits.class_names[-1] == "<unk>"
    assert len(splits.class_names) == 37
    np.testing.assert_array_equal(splits.test.examples.inputs, [[36, 36, 36]])


@pytest.mark.parametrize(
    ("train", "test", "size", "vocabulary", "targets"),
    [
        # All words have an id.
        ("b a a b a c", "a b c", 3, ("a", "b", "c"), [[1, 2]]),
        # One more than there is room for: with the unknown two must go.
        ("b a a b a c", "a b c", 2, ("a", "<unk>"), [[1, 1]]),
        # The text's own sign of the unknown keeps its place.
        ("b a a b <unk> <unk> <unk> c", "a b c", 3, ("<unk>", "a", "b"), [[2, 0]]),
        # It is too seldom for a place of its own, and gets the last.
        ("b a a b a b <unk> c", "a b c", 2, ("a", "<unk>"), [[1, 1]]),
        # Only the test has what is unknown.
        ("b a a b a", "a x b", 3, ("a", "b", "<unk>"), [[2, 1]]),
        ("b a a b a", "a x b", 2, ("a", "<unk>"), [[1, 1]]),
    ],
)
def test_words_without_an_id_are_the_unknown(
    train: str, test: str, size: int, vocabulary: tuple[str, ...], targets: list[list[int]], tmp_path: Path
) -> None:
    paths = {"train": written(tmp_path, train, "train.txt"), "test": written(tmp_path, test, "test.txt")}
    splits = words(paths, length=2, vocabulary_size=size)
    assert splits.class_names == vocabulary
    assert splits.test is not None
    np.testing.assert_array_equal(splits.test.targets, targets)


def test_case_is_kept_or_not(tmp_path: Path) -> None:
    path = written(tmp_path, "The the " * 20)
    assert words(path, length=2).class_names == ("The", "the")
    assert words(path, length=2, lowercase=True).class_names == ("the",)


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (None, {}, "tale.txt cannot be read: No such file"),
        (b"ab \xff" * 500, {}, "tale.txt is no text in UTF-8 .*at byte 3"),
        (b"", {}, "train has 0 words of .*tale.txt, which do not fill a window of 4"),
        (b"a " * 40, {}, "test has 4 words of .*tale.txt, which do not fill a window of 4"),
        (b"a " * 90, {"length": 0}, "words: length and stride must be integers of at least 1, not 0 and 0"),
        (b"a " * 90, {"length": "4"}, "must be integers of at least 1, not '4' and '4'"),
        (b"a " * 90, {"stride": 0}, "words: length and stride must be integers of at least 1, not 4 and 0"),
        (b"a " * 90, {"vocabulary_size": 1}, "vocabulary_size must be an integer of at least 2, not 1"),
        (b"a " * 90, {"path": {"test": "tale.txt"}}, "no file is named as 'train'"),
        (b"a " * 90, {"path": {"train": "tale.txt", "valid": ""}}, "no split 'valid': did you mean 'validation'"),
    ],
)
def test_what_cannot_be_used_is_named(
    content: bytes | None, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tale.txt").write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        words(**{"path": tmp_path / "tale.txt", "length": 4, **options})


def test_penn_treebank_that_is_not_there_says_how_to_put_it_there(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    written(tmp_path / "ptb", "a b", "ptb.train.txt")
    with pytest.raises(DataError, match=r"ptb lacks ptb\.valid\.txt, ptb\.test\.txt of Penn Treebank, which may not"):
        ptb(data_dir=tmp_path)


def test_real_penn_treebank(data_dir: Path) -> None:
    splits = ptb(length=1, data_dir=data_dir)
    # A window of one word for each word but the last.
    counts = {name: source.num_examples + 1 for name, source in splits.named().items()}
    assert counts == {"train": 929_589, "validation": 73_760, "test": 82_430}
    assert (len(splits.class_names), splits.name) == (10_000, "ptb")
    assert splits.class_names[:5] == ("the", "<unk>", "<eos>", "N", "of")
    assert splits.test is not None
    beginning = " ".join(splits.class_names[i] for i in splits.test.examples.inputs[:7, 0])
    assert beginning == "no it was n't black monday <eos>"
