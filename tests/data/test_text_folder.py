"""Folders of texts and IMDb's archive: order, labels, and each defect by its name; nothing is ever unpacked."""

from __future__ import annotations

import gzip
import io
import os
import pathlib
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxnn.data import Tokenizer, imdb, text_folder, vocabulary
from jaxnn.types import DataError

HOW = Tokenizer(length=2)
REVIEWS = {
    "train/neg/0_2.txt": "bad film",
    "train/neg/10_1.txt": "bad bad",
    "train/pos/1_9.txt": "good film",
    "test/neg/0_3.txt": "film",
    "test/pos/2_8.txt": "good new",
}
# In the training texts "bad" is 2 (three times), "film" 3 (twice), "good" 4.
TRAIN_ROWS, TRAIN_LABELS = [[2, 3], [2, 2], [4, 3]], [0, 0, 1]
TEST_ROWS = [[3, 0], [4, 1]]


def write_folder(root: Path, files: dict[str, str] = REVIEWS) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return root


def write_archive(path: Path, files: dict[str, str] = REVIEWS, extra: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    """An archive whose members come in no order, with a folder, a readme and reviews without labels among them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    more = {"README": "of the whole", "train/unsup/0_0.txt": "what", "train/urls_pos.txt": "http://"}
    more |= {"train/neg/._a.txt": "what some systems leave behind"}
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(directory("aclImdb/train"))
        for name, text in reversed({**files, **more}.items()):
            data = text.encode()
            member = tarfile.TarInfo(f"aclImdb/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in extra:
            archive.addfile(member)
    return path


def directory(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = tarfile.DIRTYPE
    return member


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def test_texts_come_by_class_then_by_name(tmp_path: Path) -> None:
    splits = text_folder(write_folder(tmp_path / "films"), HOW)
    np.testing.assert_array_equal(splits.train.examples.inputs, TRAIN_ROWS)
    np.testing.assert_array_equal(splits.train.targets, TRAIN_LABELS)
    assert splits.test is not None and splits.validation is None
    np.testing.assert_array_equal(splits.test.examples.inputs, TEST_ROWS)
    assert (splits.name, splits.class_names) == ("films", ("neg", "pos"))
    assert vocabulary(splits).tokens[2:] == ("bad", "film", "good")


def test_the_order_is_not_that_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, listed = write_folder(tmp_path), pathlib.Path.iterdir
    for reverse in (False, True):
        monkeypatch.setattr(
            pathlib.Path, "iterdir", lambda path, reverse=reverse: iter(sorted(listed(path), reverse=reverse))
        )
        np.testing.assert_array_equal(text_folder(root, HOW).train.examples.inputs, TRAIN_ROWS)


@pytest.mark.parametrize("name", ["val", "validation"])
def test_validation_is_found_by_either_name(name: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path, {**REVIEWS, f"{name}/neg/a.txt": "bad", f"{name}/pos/a.txt": "good"})
    splits = text_folder(root, HOW)
    assert splits.validation is not None
    np.testing.assert_array_equal(splits.validation.examples.inputs, [[2, 0], [4, 0]])


def test_other_and_hidden_files_are_no_texts(tmp_path: Path) -> None:
    write_folder(tmp_path, {**REVIEWS, "train/neg/a.md": "x", "train/neg/._a.txt": "x", "train/.cache/a.txt": "x"})
    assert text_folder(tmp_path, HOW).train.num_examples == 3


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_text(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"train/a/a.txt": "x"})
    (root / "train" / "a" / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
    splits = text_folder(root, Tokenizer(unit="characters"))
    assert vocabulary(splits).decode(splits.train.examples.inputs) == ["one\ntwo\nthree"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "films is not a folder: give the one that holds train/"),
        (
            {"test/a/a.txt": "x"},
            r"has no train/ \(of train, val and test it has test\): arrange the files as train/<class>",
        ),
        (
            {"train/a/a.txt": "x", "val/a/a.txt": "x", "validation/a/a.txt": "x"},
            "has both val and validation: keep one",
        ),
        ({"train/a.txt": "x"}, "train has no class folders: put the files into train/<class>/"),
        ({**REVIEWS, "test/so/a.txt": "x"}, r"test does not have the classes that train has \(they differ in so\)"),
        ({**REVIEWS, "train/none/a.md": "x", "test/none/a.txt": "x"}, r"train/none holds no \.txt"),
        ({"train/a/a.txt": "caf\udce9"}, r"a/a\.txt is no text in UTF-8 \(unexpected end of data at byte 3\)"),
    ],
)
def test_other_layouts_are_named(files: dict[str, str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        text_folder(write_folder(tmp_path / "films", files), HOW)


@pytest.mark.parametrize("below", ["imdb", "."])
@pytest.mark.parametrize("name", ["aclImdb", "aclImdb_labeled.tar.gz", "aclImdb_v1.tar.gz"])
def test_reviews_are_the_same_from_folder_and_archive(name: str, below: str, tmp_path: Path) -> None:
    write = write_archive if name.endswith("gz") else write_folder
    write(tmp_path / below / name)
    if name == "aclImdb":
        write_folder(tmp_path / below / name, {"train/unsup/0_0.txt": "what"})
    splits = imdb(HOW, data_dir=tmp_path)
    np.testing.assert_array_equal(splits.train.examples.inputs, TRAIN_ROWS)
    np.testing.assert_array_equal(splits.train.targets, TRAIN_LABELS)
    assert splits.test is not None
    np.testing.assert_array_equal(splits.test.examples.inputs, TEST_ROWS)
    assert (splits.name, splits.class_names) == ("imdb", ("neg", "pos"))


def test_reviews_held_out_to_validate_give_the_vocabulary_nothing(tmp_path: Path) -> None:
    write_archive(
        tmp_path / "aclImdb_v1.tar.gz", {**REVIEWS, **{f"train/pos/5{i:02}_9.txt": f"w{i}" for i in range(20)}}
    )
    splits = imdb(HOW, validation=0.3, seed=1, data_dir=tmp_path)
    assert splits.validation is not None
    assert (splits.train.num_examples, splits.validation.num_examples) == (16, 7)  # of 23
    assert np.isin(splits.validation.examples.inputs, range(len(vocabulary(splits)))).all()
    assert (splits.validation.examples.inputs == 1).any()
    again, other = (imdb(HOW, validation=0.3, seed=seed, data_dir=tmp_path) for seed in (1, 2))
    assert vocabulary(again).tokens == vocabulary(splits).tokens != vocabulary(other).tokens


def test_without_files_and_network_the_standard_archive_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with pytest.raises(DataError, match=r"aclImdb_v1\.tar\.gz of imdb is not in .* put https://ai\.stanford\.edu/"):
        imdb(HOW, data_dir=tmp_path)


def only(part: str) -> dict[str, str]:
    return {name: text for name, text in REVIEWS.items() if part in name}


def cut_short(path: Path) -> None:
    data = write_archive(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])


def one_byte_changed(path: Path) -> None:
    """Stored without compression, so that nothing but the checksum tells."""
    write_archive(path)
    data = gzip.compress(gzip.decompress(path.read_bytes()).replace(b"good film", b"good fill"), 0)
    path.write_bytes(data.replace(b"good fill", b"good film"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut_short, "is truncated or damaged"),
        (one_byte_changed, r"is truncated or damaged \(CRC check failed"),
        (lambda path: path.write_bytes(b"<html>not found</html>"), "is truncated or damaged"),
        (lambda path: write_archive(path, {"notes.txt": "x"}), "has no train/"),
        (lambda path: write_archive(path, only("train")), "does not hold aclImdb/{train,test}/{neg,pos}"),
        (lambda path: write_archive(path, only("neg")), "does not hold aclImdb/{train,test}/{neg,pos}"),
    ],
)
def test_a_damaged_archive_is_named(damage: Callable[[Path], None], sentence: str, tmp_path: Path) -> None:
    damage(tmp_path / "aclImdb_v1.tar.gz")
    with pytest.raises(DataError, match=rf"aclImdb_v1\.tar\.gz {sentence}"):
        imdb(HOW, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("member", "sentence"),
    [
        (directory("../evil"), r"has a member that would be outside of it, '\.\./evil'"),
        (directory("aclImdb/train/../../../evil"), "would be outside of it"),
        (directory("/etc/evil"), "has a member that would be outside of it, '/etc/evil'"),
        (link("aclImdb/train/pos/5_5.txt", "/etc/passwd"), r"has a link or the like at aclImdb/train/pos/5_5\.txt"),
        (directory("aclImdb/train/pos/6_6.txt"), r"has a link or the like at aclImdb/train/pos/6_6\.txt"),
    ],
)
def test_a_member_that_leads_outside_is_refused(member: tarfile.TarInfo, sentence: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "aclImdb_v1.tar.gz", extra=(member,))
    with pytest.raises(DataError, match=sentence):
        imdb(HOW, data_dir=tmp_path)
    assert list(tmp_path.rglob("*")) == [path]


def test_a_review_that_is_not_utf8_is_named_with_its_archive(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("aclImdb/train/pos/5_5.txt")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"a\xffb"))
    with pytest.raises(DataError, match=r"pos/5_5\.txt in .*v1\.tar\.gz is no text in UTF-8 .*at byte 1"):
        imdb(HOW, data_dir=tmp_path)


@pytest.mark.slow
def test_real_reviews(data_dir: Path) -> None:
    splits = imdb(Tokenizer(ngrams=2, length=400, pad="start"), data_dir=data_dir)
    for source in (splits.train, splits.test):
        assert source is not None
        assert np.bincount(source.targets).tolist() == [12_500, 12_500]
        assert source.examples.inputs.shape == (25_000, 400)
    known = vocabulary(splits)
    assert known.tokens[2:8] == ("the", "and", "a", "of", "to", "is")
    # Keras's example says 1.2 million.
    assert (len(known.tokens), len(known)) == (20_000, 1_203_034)
    (first,) = known.decode(splits.train.examples.inputs[:1])
    assert first.startswith("story of a man who has unnatural feelings for a pig")
    assert splits.train.examples.inputs.max() == len(known) - 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (os.mkfifo, "is a broken link"),
        (os.mkdir, "is a broken link"),
        (lambda path: path.symlink_to("nowhere"), "is a broken link"),
        (lambda path: path.write_text(" \n"), "has no text"),
    ],
)
def test_a_file_without_text_is_named(make: Callable[[Path], object], sentence: str, tmp_path: Path) -> None:
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    (folder / "good.txt").write_text("good")
    make(folder / "odd.txt")
    with pytest.raises(DataError, match=rf"odd\.txt {sentence}"):
        text_folder(tmp_path, HOW)
