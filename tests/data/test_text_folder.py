"""Text folders and IMDb's archive: order and labels; bad files raise, and nothing is unpacked."""

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
from jaxnn.types import DataError, Splits

SHORT = Tokenizer(length=2)
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
        (root / name).write_bytes(text.encode(errors="surrogateescape"))
    return root


def write_archive(path: Path, files: dict[str, str] = REVIEWS, extra: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    """Writes an archive with unordered members, a folder, a readme and unlabelled reviews."""
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


def check(splits: Splits) -> None:
    np.testing.assert_array_equal(splits.train.examples.inputs, TRAIN_ROWS)
    np.testing.assert_array_equal(splits.train.targets, TRAIN_LABELS)
    assert splits.test is not None and splits.validation is None
    np.testing.assert_array_equal(splits.test.examples.inputs, TEST_ROWS)
    assert splits.class_names == ("neg", "pos")


def test_texts_are_ordered_by_class_then_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other and hidden files are ignored.
    ignored = {"train/neg/a.md": "x", "train/neg/._a.txt": "x", "train/.cache/a.txt": "x"}
    root, listed = write_folder(tmp_path / "films", REVIEWS | ignored), pathlib.Path.iterdir
    for reverse in (False, True):
        monkeypatch.setattr(
            pathlib.Path, "iterdir", lambda path, reverse=reverse: iter(sorted(listed(path), reverse=reverse))
        )
        check(splits := text_folder(root, SHORT))
    assert splits.name == "films" and vocabulary(splits).tokens[2:] == ("bad", "film", "good")


@pytest.mark.parametrize("name", ["val", "validation"])
def test_validation_may_have_either_name(name: str, tmp_path: Path) -> None:
    splits = text_folder(
        write_folder(tmp_path, {**REVIEWS, f"{name}/neg/a.txt": "bad", f"{name}/pos/a.txt": "good"}), SHORT
    )
    assert splits.validation is not None
    np.testing.assert_array_equal(splits.validation.examples.inputs, [[2, 0], [4, 0]])


def test_byte_order_marks_and_windows_line_ends_are_removed(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"train/a/a.txt": "\ufeffone\r\ntwo\rthree"})
    splits = text_folder(root, Tokenizer(unit="characters"))
    assert vocabulary(splits).decode(splits.train.examples.inputs) == ["one\ntwo\nthree"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "films is not a folder: give the folder that contains train/"),
        ({"test/a/a.txt": "x"}, r"no train/ \(of train, val and test it has test\): arrange .* train/<class>/\*\.txt"),
        ({"train/a/a.txt": "x", "val/a/a.txt": "x", "validation/a/a.txt": "x"}, "has both val and validation"),
        ({"train/a.txt": "x"}, "train has no class folders: put the files into train/<class>/"),
        ({**REVIEWS, "test/so/a.txt": "x"}, r"test does not have the classes of train \(they differ in so\)"),
        ({**REVIEWS, "train/none/a.md": "x", "test/none/a.txt": "x"}, r"train/none has no \.txt"),
        ({"train/a/a.txt": "caf\udce9"}, r"a/a\.txt is not UTF-8 text \(unexpected end of data at byte 3\)"),
        ({"train/a/a.txt": "x", "train/a/b.txt": " \n"}, r"b\.txt has no text \(empty files: 1\)"),
    ],
)
def test_other_layouts_raise(files: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        text_folder(write_folder(tmp_path / "films", files), SHORT)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_irregular_files_raise(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(write_folder(tmp_path) / "train" / "neg" / "odd.txt")
    with pytest.raises(DataError, match=r"odd\.txt is not a regular file"):
        text_folder(tmp_path, SHORT)


@pytest.mark.parametrize(
    ("name", "below"), [("aclImdb", "imdb"), ("aclImdb_labeled.tar.gz", "."), ("aclImdb_v1.tar.gz", "imdb")]
)
def test_reviews_are_the_same_from_folder_and_archive(name: str, below: str, tmp_path: Path) -> None:
    if name.endswith("gz"):
        write_archive(tmp_path / below / name)
    else:
        write_folder(tmp_path / below / name, {**REVIEWS, "train/unsup/0_0.txt": "what"})
    check(splits := imdb(SHORT, data_dir=tmp_path))
    assert splits.name == "imdb"


def test_validation_reviews_do_not_enter_the_vocabulary(tmp_path: Path) -> None:
    write_archive(
        tmp_path / "aclImdb_v1.tar.gz", {**REVIEWS, **{f"train/pos/5{i:02}_9.txt": f"w{i}" for i in range(20)}}
    )
    splits = imdb(SHORT, validation=0.3, seed=1, data_dir=tmp_path)
    assert splits.validation is not None
    assert (splits.train.num_examples, splits.validation.num_examples) == (16, 7)  # of 23
    assert np.isin(splits.validation.examples.inputs, range(len(vocabulary(splits)))).all()
    assert (splits.validation.examples.inputs == 1).any()
    again, other = (imdb(SHORT, validation=0.3, seed=seed, data_dir=tmp_path) for seed in (1, 2))
    assert vocabulary(again).tokens == vocabulary(splits).tokens != vocabulary(other).tokens


def only(part: str) -> dict[str, str]:
    return {name: text for name, text in REVIEWS.items() if part in name}


def cut_short(path: Path) -> None:
    data = write_archive(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])


def one_byte_changed(path: Path) -> None:
    """Writes an archive, without compression, in which only the checksum shows the damage."""
    write_archive(path)
    data = gzip.compress(gzip.decompress(path.read_bytes()).replace(b"good film", b"good fill"), 0)
    path.write_bytes(data.replace(b"good fill", b"good film"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "is truncated or damaged"),
        (one_byte_changed, r"is truncated or damaged \(CRC check failed"),
        (lambda path: path.write_bytes(b"<html>not found</html>"), "is truncated or damaged"),
        (lambda path: write_archive(path, {"notes.txt": "x"}), "has no train/"),
        (lambda path: write_archive(path, only("train")), "does not have aclImdb/{train,test}/{neg,pos}"),
    ],
)
def test_damaged_archives_raise(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    damage(tmp_path / "aclImdb_v1.tar.gz")
    with pytest.raises(DataError, match=rf"aclImdb_v1\.tar\.gz {message}"):
        imdb(SHORT, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (directory("../evil"), r"has a member that would be outside of it, '\.\./evil'"),
        (directory("aclImdb/train/../../../evil"), "would be outside of it"),
        (directory("/etc/evil"), "has a member that would be outside of it, '/etc/evil'"),
        (link("aclImdb/train/pos/5_5.txt", "/etc/passwd"), r"has a link or the like at aclImdb/train/pos/5_5\.txt"),
    ],
)
def test_members_outside_of_the_archive_raise(member: tarfile.TarInfo, message: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "aclImdb_v1.tar.gz", extra=(member,))
    with pytest.raises(DataError, match=message):
        imdb(SHORT, data_dir=tmp_path)
    assert list(tmp_path.rglob("*")) == [path]


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
