"""Labelled texts: lists, folders, IMDb's archive and tables become ids of the training vocabulary."""

import dataclasses
import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn.data import Tokenizer, imdb, read_csv, read_tsv, text_arrays, text_folder, vocabulary
from jaxnn.record import data_fingerprint
from jaxnn.types import DataError, Splits
from tests.data.written import write, write_all

SHORT = Tokenizer(length=2)
TRAIN = (["bad film", "bad bad", "good film"], [0, 0, 1])
TEST = (["film", "good new"], [0, 1])
# In the training texts "bad" is 2 (three times), "film" 3 (twice), "good" 4.
TRAIN_ROWS, TEST_ROWS = [[2, 3], [2, 2], [4, 3]], [[3, 0], [4, 1]]
NAMES = ("train/neg/0_2.txt", "train/neg/10_1.txt", "train/pos/1_9.txt", "test/neg/0_3.txt", "test/pos/2_8.txt")
REVIEWS = dict(zip(NAMES, TRAIN[0] + TEST[0], strict=True))


def check(splits: Splits) -> None:
    for source, rows, labels in ((splits.train, TRAIN_ROWS, TRAIN[1]), (splits.test, TEST_ROWS, TEST[1])):
        assert source is not None and source.examples is not None
        assert source.examples.inputs.dtype == source.targets.dtype == np.int32
        assert (source.examples.inputs.tolist(), source.targets.tolist()) == (rows, labels)
    assert splits.validation is None and splits.class_names == ("neg", "pos")
    assert vocabulary(splits).tokens[2:] == ("bad", "film", "good")


def test_lists_become_ids_of_the_training_vocabulary():
    splits = text_arrays(TRAIN, TEST, tokenizer=SHORT, name="films", class_names=("neg", "pos"))
    check(splits)
    assert vocabulary(splits).decode(TEST_ROWS) == ["film", "good \N{REPLACEMENT CHARACTER}"]
    assert vocabulary(jn.data.with_augmentation(splits, lambda key, batch: batch)) is vocabulary(splits)


def test_fingerprints_differ_by_texts_labels_and_tokenizers():
    other = (["bad film", "bad bad", "good bad"], TRAIN[1])
    made = [
        *(text_arrays(train, tokenizer=SHORT) for train in (TRAIN, TRAIN, other, (TRAIN[0], [1, 1, 1]))),
        text_arrays(TRAIN, tokenizer=dataclasses.replace(SHORT, keep="start", length=1)),
    ]
    first, again, *rest = map(data_fingerprint, made)
    assert first == again and len({first, *rest}) == 4


def write_archive(path: Path, files: dict[str, str] = REVIEWS) -> Path:
    """Writes an archive with unordered members, a readme, unlabelled reviews and a hidden file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    more = {"README": "x", "train/unsup/0_0.txt": "what", "train/urls_pos.txt": "http://", "train/neg/._a.txt": "x"}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in reversed({**files, **more}.items()):
            member = tarfile.TarInfo(f"aclImdb/{name}")
            data = text.encode(errors="surrogateescape")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_folders_are_read_by_class_then_by_name(tmp_path, monkeypatch):
    # Other files are left out with a warning, hidden ones without.
    ignored = {"train/neg/a.md": "x", "train/neg/._a.txt": "x", "train/.cache/a.txt": "x"}
    root, listed = write_all(tmp_path / "films", REVIEWS | ignored), Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), reverse=True)))
    with pytest.warns(UserWarning, match=r"1 files are left out, such as .*a\.md: they do not end in \.txt"):
        check(splits := text_folder(root, SHORT))
    assert splits.name == "films"


@pytest.mark.parametrize("name", ["val", "validation"])
def test_validation_may_have_either_name(name, tmp_path):
    # Byte order marks and Windows line ends are removed.
    texts = {f"{name}/neg/a.txt": "bad", f"{name}/pos/a.txt": "\ufefffilm\r\ngood\rgood"}
    splits: Any = text_folder(write_all(tmp_path, REVIEWS | texts), Tokenizer(unit="characters", length=15))
    found = vocabulary(splits).decode(splits.validation.examples.inputs)
    assert found == ["bad", "film\N{REPLACEMENT CHARACTER}good\N{REPLACEMENT CHARACTER}good"]


@pytest.mark.parametrize("name", ["imdb/aclImdb", "aclImdb_labeled.tar.gz", "imdb/aclImdb_v1.tar.gz"])
def test_imdb_is_the_same_from_folder_and_archive(name, tmp_path):
    if name.endswith("gz"):
        write_archive(tmp_path / name)
    else:
        write_all(tmp_path / name, {**REVIEWS, "train/unsup/0_0.txt": "what"})
    check(splits := imdb(SHORT, data_dir=tmp_path))
    assert splits.name == "imdb"
    parts = imdb(SHORT, validation=0.3, data_dir=tmp_path).named()
    assert {name: source.num_examples for name, source in parts.items()} == {"train": 2, "validation": 1, "test": 2}


def change_one_byte(path: Path) -> None:
    """Writes an archive, without compression, in which only the checksum shows the damage."""
    data = gzip.decompress(write_archive(path).read_bytes())
    path.write_bytes(gzip.compress(data.replace(b"good film", b"good fill"), 0).replace(b"good fill", b"good film"))


def test_damaged_archives_raise(tmp_path):
    for damage, message in (
        (change_one_byte, r"is truncated or damaged \(CRC check failed"),
        (lambda path: write_archive(path, {NAMES[0]: "x", NAMES[3]: "x"}), "does not have aclImdb/{train,test}/{neg,p"),
        (lambda path: write_archive(path, {NAMES[0]: "a\udcffb"}), "is not UTF-8 text .*at byte 1"),
    ):
        damage(tmp_path / "aclImdb_v1.tar.gz")
        with pytest.raises(DataError, match=rf"aclImdb_v1\.tar\.gz {message}"):
            imdb(SHORT, data_dir=tmp_path)


@pytest.mark.slow
def test_real_reviews(data_dir):
    splits: Any = imdb(Tokenizer(ngrams=2, length=400, pad="start"), data_dir=data_dir)
    assert repr(splits) == "Splits(imdb: 25,000 train, 25,000 test, inputs int32 [400], 2 classes)"
    known = vocabulary(splits)
    # Keras's example says 1.2 million.
    assert (len(known.tokens), len(known)) == (20_000, 1_203_034) and splits.train.examples.inputs.max() == 1_203_033


FOUR = Tokenizer(length=4)
PLACES: dict[str, Any] = {"text": 1, "label": 0, "header": False}


def texts(splits: Any, split: str = "train") -> list[str]:
    return vocabulary(splits).decode(splits.named()[split].examples.inputs)


def test_columns_are_joined_and_labels_ordered_by_number(tmp_path):
    path = write(tmp_path / "news.csv", '3,"Stocks, up","Two ""big"" gains"\n10,Match,won\n3,Oil,"over\ntwo lines"\n')
    splits = read_csv(path, FOUR, **{**PLACES, "text": (1, 2)})
    assert texts(splits) == ["up two big gains", "match won", "oil over two lines"]  # the last four words of each
    assert (splits.name, splits.class_names) == ("news", ("3", "10"))
    assert list(splits.named()) == ["train"] and splits.train.targets.tolist() == [0, 1, 0]
    splits = read_csv(
        write(tmp_path / "news.csv", f'1,"{"a " * 70_000}word"\n01,other\n2,two\n10,ten\n'), FOUR, **PLACES
    )
    assert splits.class_names == ("01", "1", "2", "10") and texts(splits)[0].endswith("word")


def test_a_header_names_columns(tmp_path):
    path = write(tmp_path / "news.csv", "\ufeffkind,words\nham,so long\n\nspam , buy now\nham,hi\n")
    splits = read_csv(path, FOUR, text="words", label="kind")
    assert texts(splits) == ["so long", "buy now", "hi"] and splits.class_names == ("ham", "spam")
    assert splits.train.targets.tolist() == [0, 1, 0]


def test_without_quoting_a_quotation_mark_is_a_character(tmp_path):
    path = write(tmp_path / "sms.tsv", 'ham\t"so\nspam\tit\'s, "\u2028x\r\n\n')
    splits = read_tsv(path, Tokenizer(unit="characters", length=20), quoting=False, **PLACES)
    assert texts(splits) == ['"so', "it's, \"\u2028x"]
    with pytest.raises(DataError, match="line 1 of .* is malformed"):
        read_tsv(path, FOUR, **PLACES)


def test_fractions_are_random_by_seed_and_disjoint(tmp_path):
    path = write(tmp_path / "news.csv", "".join(f"{number},common w{number}\n" for number in range(50)))
    options: dict[str, Any] = {**PLACES, "test": 0.1, "validation": 0.25}
    splits = read_csv(path, FOUR, **options)
    parts = {name: source.targets.tolist() for name, source in splits.named().items()}
    assert {name: len(part) for name, part in parts.items()} == {"train": 33, "test": 5, "validation": 12}
    assert sorted(sum(parts.values(), [])) == list(range(50))
    # The vocabulary is that of train, and a label stays with its text.
    assert texts(splits) == [f"common w{label}" for label in parts["train"]]
    assert texts(splits, "test") == ["common \N{REPLACEMENT CHARACTER}"] * 5
    again, other = (read_csv(path, FOUR, seed=seed, **options) for seed in (0, 1))
    assert again.train.targets.tolist() == parts["train"] != other.train.targets.tolist()
    assert list(read_csv(path, FOUR, test=0.0, **PLACES).named()) == ["train"]
    assert read_csv(path, FOUR, test=0.001, **PLACES).train.num_examples == 49


def test_other_splits_may_be_other_tables(tmp_path):
    train = write(tmp_path / "train.csv", "b,one two\na,two\n")
    splits: Any = read_csv(train, FOUR, test=write(tmp_path / "news.csv", "a,two three\n"), **PLACES)
    assert splits.test.examples.inputs.tolist() == [[2, 1, 0, 0]]
    assert (splits.test.targets.tolist(), splits.train.targets.tolist()) == ([0], [1, 0])
