"""Texts become ids: tokenizers, labelled texts in lists, folders, archives and tables, windows of tokens."""

import dataclasses
import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn.data import Tokenizer, char_corpus, encode_text, read_csv, text_arrays, text_folder, vocabulary, word_corpus
from jaxnn.types import DataError, Splits


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file and its folders; text in UTF-8, with surrogates for bytes that are not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
    return path


def write_all(root: Path, files: dict[str, str]) -> Path:
    """Writes ``files``, texts by their path in ``root``, and returns it."""
    for name, text in files.items():
        write(root / name, text)
    return root


SENTENCES = ["The cat sat.", "the dog; the CAT's dog", "a-cat"]
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
    vocabulary = Tokenizer(length=5).fit(SENTENCES)
    # "the" three times, "cat" and "dog" twice, "a", "cat's" and "sat" once; ties by code point.
    assert vocabulary.tokens == ("", UNKNOWN, "the", "cat", "dog", "a", "cat's", "sat") and len(vocabulary) == 8
    rows = vocabulary.encode([*SENTENCES, "a bird sat", ""])
    assert rows.dtype == np.int32
    assert rows.tolist() == [[2, 3, 7, 0, 0], [2, 4, 2, 6, 4], [5, 3, 0, 0, 0], [5, 1, 7, 0, 0], [0] * 5]
    assert vocabulary.encode([]).shape == (0, 5)
    vocabulary = Tokenizer(vocabulary_size=4, length=5).fit(SENTENCES)
    assert vocabulary.tokens == ("", UNKNOWN, "the", "cat")
    assert vocabulary.encode(SENTENCES).tolist() == [[2, 3, 1, 0, 0], [2, 1, 2, 1, 1], [1, 3, 0, 0, 0]]
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
    # Of equal frequency and length by ids.
    assert Tokenizer(ngrams=2, length=3).fit(["b a", "a b"]).encode(["b a"]).tolist() == [[3, 2, 5]]
    # Twice: "a a" (4), "a b" (5), "a a b" (6); once: "b a" (7), "a b a" (8).
    settings, texts = Tokenizer(ngrams=3, length=9), ["a a b a", "a a b"]
    vocabulary = settings.fit(texts)
    assert len(vocabulary) == 9
    rows = vocabulary.encode(["a a b a", "b a a x"])
    assert rows.tolist() == [[2, 2, 3, 2, 4, 5, 7, 6, 8], [3, 2, 2, 1, 7, 4, 0, 0, 0]]
    few = dataclasses.replace(settings, max_ngrams=2).fit(texts)
    assert few.encode(["a a b a"]).tolist() == [[2, 2, 3, 2, 4, 5, 0, 0, 0]]
    assert len(dataclasses.replace(settings, max_ngrams=0).fit(texts)) == 4


@pytest.mark.parametrize("pad", ["start", "end"])
@pytest.mark.parametrize("ngrams", [1, 2])
def test_decode_inverts_encode_except_for_case_and_punctuation(pad, ngrams):
    vocabulary = Tokenizer(length=20, pad=pad, ngrams=ngrams).fit(SENTENCES)
    assert vocabulary.decode(vocabulary.encode(SENTENCES)) == ["the cat sat", "the dog the cat's dog", "a cat"]
    assert vocabulary.decode(vocabulary.encode(["", "A bird?"])) == ["", f"a {UNKNOWN}"]


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
    with pytest.warns(UserWarning, match=r"files are left out .1., such as .*a\.md: they do not end in \.txt"):
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
    check(splits := jn.data.imdb(SHORT, data_dir=tmp_path))
    assert splits.name == "imdb"
    parts = jn.data.imdb(SHORT, validation=0.3, data_dir=tmp_path).named()
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
            jn.data.imdb(SHORT, data_dir=tmp_path)


@pytest.mark.slow
def test_real_reviews(data_dir):
    splits: Any = jn.data.imdb(Tokenizer(ngrams=2, length=400, pad="start"), data_dir=data_dir)
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
    splits = jn.data.read_tsv(path, Tokenizer(unit="characters", length=20), quoting=False, **PLACES)
    assert texts(splits) == ['"so', "it's, \"\u2028x"]
    with pytest.raises(DataError, match="line 1 of .* is malformed"):
        jn.data.read_tsv(path, FOUR, **PLACES)


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
        assert jn.data.decode_text(ids, splits.class_names) == text
        np.testing.assert_array_equal(ids[:9], splits.train.examples.inputs[:9, 0])
    assert encode_text("a dog", ("a", "<unk>")).tolist() == [0, 1] and encode_text("ab", ("a", "\ufffd"))[1] == 1


def test_words_without_an_id_are_unknown(tmp_path):
    for train, test, size, names, targets in (
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
        assert (splits.class_names, rows(splits.test)[1]) == (names, targets), train


def test_real_texts(data_dir):
    splits: Any = char_corpus(data_dir=data_dir)
    # 1,115,394 characters: 1,003,854 train, whose successors fill 15,685 windows; 111,540 test, 1,742.
    assert repr(splits) == "Splits(tinyshakespeare: 15,685 train, 1,742 test, inputs int32 [64], 65 classes)"
    keras = char_corpus(length=40, stride=3, targets="last", lowercase=True, data_dir=data_dir)
    # ceil((1,003,854 - 40) / 3) and ceil((111,540 - 40) / 3); without capitals 39 characters.
    assert repr(keras) == "Splits(tinyshakespeare: 334,605 train, 37,167 test, inputs int32 [40], 39 classes)"
    # A window of one word for each word but the last.
    splits = jn.data.ptb(length=1, data_dir=data_dir)
    expected = "Splits(ptb: 929,588 train, 73,759 validation, 82,429 test, inputs int32 [1], 10,000 classes)"
    assert repr(splits) == expected
    first = " ".join(splits.class_names[i] for i in splits.test.examples.inputs[:7, 0])
    assert first == "no it was n't black monday <eos>"
