"""Tables of texts: columns, labels and fractions by hand; errors name the file and the line."""

from pathlib import Path
from typing import Any

import pytest

from jaxnn.data import Tokenizer, read_csv, read_tsv, vocabulary
from jaxnn.types import DataError

SHORT = Tokenizer(length=4)
PLACES: dict[str, Any] = {"text": 1, "label": 0, "header": False}


def write(folder: Path, content: str, name: str = "news.csv") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def texts(splits: Any, split: str = "train") -> list[str]:
    return vocabulary(splits).decode(splits.named()[split].examples.inputs)


def test_columns_are_joined_and_labels_ordered_by_number(tmp_path: Path) -> None:
    path = write(tmp_path, '3,"Stocks, up","Two ""big"" gains"\n10,Match,won\n3,Oil,"over\ntwo lines"\n')
    splits = read_csv(path, SHORT, **{**PLACES, "text": (1, 2)})
    assert texts(splits) == ["up two big gains", "match won", "oil over two lines"]  # the last four words of each
    assert (splits.name, splits.class_names) == ("news", ("3", "10"))
    assert list(splits.named()) == ["train"] and splits.train.targets.tolist() == [0, 1, 0]
    splits = read_csv(write(tmp_path, f'1,"{"a " * 70_000}word"\n01,other\n2,two\n10,ten\n'), SHORT, **PLACES)
    assert splits.class_names == ("01", "1", "2", "10") and texts(splits)[0].endswith("word")


def test_a_header_names_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffkind,words\nham,so long\n\nspam , buy now\nham,hi\n")
    splits = read_csv(path, SHORT, text="words", label="kind")
    assert texts(splits) == ["so long", "buy now", "hi"] and splits.class_names == ("ham", "spam")
    assert splits.train.targets.tolist() == [0, 1, 0]


def test_without_quoting_a_quotation_mark_is_a_character(tmp_path: Path) -> None:
    path = write(tmp_path, 'ham\t"so\nspam\tit\'s, "\u2028x\r\n\n', "sms.tsv")
    splits = read_tsv(path, Tokenizer(unit="characters", length=20), quoting=False, **PLACES)
    assert texts(splits) == ['"so', "it's, \"\u2028x"]
    with pytest.raises(DataError, match="line 1 of .* is malformed"):
        read_tsv(path, SHORT, **PLACES)


def test_fractions_are_random_by_seed_and_disjoint(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f"{number},common w{number}\n" for number in range(50)))
    options: dict[str, Any] = {**PLACES, "test": 0.1, "validation": 0.25}
    splits = read_csv(path, SHORT, **options)
    parts = {name: source.targets.tolist() for name, source in splits.named().items()}
    assert {name: len(part) for name, part in parts.items()} == {"train": 33, "test": 5, "validation": 12}
    assert sorted(sum(parts.values(), [])) == list(range(50))
    # The vocabulary is that of train, and a label stays with its text.
    assert texts(splits) == [f"common w{label}" for label in parts["train"]]
    assert texts(splits, "test") == ["common \N{REPLACEMENT CHARACTER}"] * 5
    again, other = (read_csv(path, SHORT, seed=seed, **options) for seed in (0, 1))
    assert again.train.targets.tolist() == parts["train"] != other.train.targets.tolist()
    assert list(read_csv(path, SHORT, test=0.0, **PLACES).named()) == ["train"]
    assert read_csv(path, SHORT, test=0.001, **PLACES).train.num_examples == 49


def test_other_splits_may_be_other_tables(tmp_path: Path) -> None:
    train = write(tmp_path, "b,one two\na,two\n", "train.csv")
    splits: Any = read_csv(train, SHORT, test=write(tmp_path, "a,two three\n"), **PLACES)
    assert splits.test.examples.inputs.tolist() == [[2, 1, 0, 0]]
    assert (splits.test.targets.tolist(), splits.train.targets.tolist()) == ([0], [1, 0])


ROWS = "kind,words\nham,so long\nspam,buy\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "news.csv has no row: give"),
        (ROWS + "ham\n", {}, "line 4 of .*news.csv has 1 columns, but the first row has 2"),
        (ROWS + " ,so\n", {}, "line 4 of .*news.csv has no label"),
        (ROWS + "ham, \n", {}, r"line 4 of .*news.csv has no text"),
        (ROWS + 'ham,"so\nham,x\n', {}, r"the row that starts in line 4 of .*news.csv is .*quoting=False"),
        (ROWS, {"label": "kin"}, "has no column 'kin': did you mean 'kind'"),
        (ROWS, {"text": (1, 2)}, "has no column 1: .*Known are 'kind', 'words'; .*header=False"),
        (ROWS, {"header": False}, "has no column 'words': with header=False, columns are 0 to 1"),
        (ROWS, {"text": ()}, "text is empty"),
        (ROWS, {"test": 1.0}, "test must be a fraction of the examples, at least 0 and below 1, not 1.0"),
        (ROWS, {"test": 0.5, "validation": 0.5}, "1 for test and 1 for validation leaves none of 2 examples"),
        (ROWS, {"test": "other.csv"}, "other.csv has the label 'eggs', which the training table lacks"),
        ("kind,words\nham,caf\udce9!\n", {}, r"news\.csv is not UTF-8 text .*at byte 18"),
    ],
)
def test_bad_tables_raise(content: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "news.csv").write_bytes(content.encode(errors="surrogateescape"))
    write(tmp_path, "kind,words\neggs,x\n", "other.csv")
    paths = {key: tmp_path / value for key, value in options.items() if str(value).endswith(".csv")}
    with pytest.raises(DataError, match=message):
        read_csv(tmp_path / "news.csv", SHORT, **{"text": "words", "label": "kind", **options, **paths})
