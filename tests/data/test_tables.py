"""Tables of texts: columns, labels and shares by hand, and each defect with its file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxnn.data import Tokenizer, ag_news, read_csv, read_tsv, sms_spam, vocabulary
from jaxnn.types import DataError

HOW = Tokenizer(length=4)
NEWS = '3,"Stocks, up","Two ""big"" gains"\n10,Match,won\n3,Oil,"over\ntwo lines"\n'


def written(folder: Path, content: str, name: str = "news.csv") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def shown(splits: Any, split: str = "train") -> list[str]:
    return vocabulary(splits).decode(splits.named()[split].examples.inputs)


def test_columns_are_joined_and_labels_numbered(tmp_path: Path) -> None:
    splits = read_csv(written(tmp_path, NEWS), HOW, text=(1, 2), label=0, header=False)
    assert shown(splits) == ["up two big gains", "match won", "oil over two lines"]  # the last four words of each
    # As numbers 3 comes before 10.
    assert (splits.name, splits.class_names) == ("news", ("3", "10"))
    np.testing.assert_array_equal(splits.train.targets, [0, 1, 0])
    assert list(splits.named()) == ["train"]


def test_labels_of_one_number_have_one_order(tmp_path: Path) -> None:
    splits = read_csv(written(tmp_path, "1,one\n01,other\n2,two\n10,ten\n"), HOW, text=1, label=0, header=False)
    assert splits.class_names == ("01", "1", "2", "10")


def test_a_text_may_be_long(tmp_path: Path) -> None:
    long = "a " * 70_000 + "word"
    splits = read_csv(written(tmp_path, f'1,"{long}"\n2,short\n'), HOW, text=1, label=0, header=False)
    assert shown(splits)[0].endswith("word")


def test_columns_have_names_where_there_is_a_header(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffkind,words\nham,so long\n\nspam , buy now\nham,hi\n")
    splits = read_csv(path, HOW, text="words", label="kind")
    assert shown(splits) == ["so long", "buy now", "hi"]
    assert splits.class_names == ("ham", "spam")
    np.testing.assert_array_equal(splits.train.targets, [0, 1, 0])


def test_without_quoting_a_quotation_mark_is_a_character(tmp_path: Path) -> None:
    path = written(tmp_path, 'ham\t"so\tspam\tit\'s "\u2028x\n', "sms.tsv")
    with pytest.raises(DataError, match="line 1 of .* has 4 columns|the row that begins in line 1"):
        read_tsv(path, HOW, text=1, label=0, header=False)
    path = written(tmp_path, 'ham\t"so\nspam\tit\'s, "\u2028x\r\n\n', "sms.tsv")
    splits = read_tsv(path, Tokenizer(unit="characters", length=20), text=1, label=0, header=False, quoting=False)
    assert shown(splits) == ['"so', "it's, \"\u2028x"]


def test_a_share_is_held_out_by_the_seed_and_the_vocabulary_is_of_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(f"{i % 3},common w{i}\n" for i in range(40)))
    options: dict[str, Any] = {"text": 1, "label": 0, "header": False, "test": 0.25, "validation": 0.1}
    splits = read_csv(path, HOW, **options)
    assert {name: source.num_examples for name, source in splits.named().items()} == {
        "train": 26,
        "validation": 4,
        "test": 10,
    }
    assert set(vocabulary(splits).tokens[2:]) == {word for line in shown(splits) for word in line.split()}
    assert shown(splits, "test") == ["common \N{REPLACEMENT CHARACTER}"] * 10
    assert shown(read_csv(path, HOW, **options)) == shown(splits)
    assert shown(read_csv(path, HOW, seed=1, **options)) != shown(splits)


def test_a_label_keeps_its_text_when_rows_are_shuffled(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(f"c{i % 3},word{i % 3}\n" for i in range(30)))
    splits = read_csv(path, HOW, text=1, label=0, header=False, test=0.5)
    for name, source in splits.named().items():
        assert [f"word{label}" for label in source.targets] == shown(splits, name)


def test_other_splits_may_be_tables_of_their_own(tmp_path: Path) -> None:
    train = written(tmp_path, "b,one two\na,two\n", "train.csv")
    test = written(tmp_path, "a,two three\n", "test.csv")
    splits = read_csv(train, HOW, text=1, label=0, header=False, test=test)
    assert splits.test is not None
    np.testing.assert_array_equal(splits.test.examples.inputs, [[2, 1, 0, 0]])
    np.testing.assert_array_equal(splits.test.targets, [0])
    np.testing.assert_array_equal(splits.train.targets, [1, 0])


ROWS = "kind,words\nham,so long\nspam,buy\n"


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        ("", {}, "news.csv has no row: give"),
        ("kind,words\n", {}, "news.csv has no row below its header"),
        (ROWS + "ham\n", {}, "line 4 of .*news.csv has 1 columns where the first row has 2"),
        (ROWS + "ham,so,long\n", {}, "line 4 of .*news.csv has 3 columns where the first row has 2"),
        (ROWS + '"a\nb",c\nham\n', {}, "line 6 of .*news.csv has 1 columns"),
        (ROWS + " ,so\n", {}, "line 4 of .*news.csv has no label in column 'kind'"),
        (ROWS + 'ham,"so\nham,x\n', {}, r"the row that begins in line 4 of .*news.csv is no row .*quoting=False"),
        (ROWS + "ham, \nham,\n", {}, r"line 4 of .*news.csv has no text in column 'words' \(rows without text: 2\)"),
        (ROWS, {"label": "kin"}, "has no column 'kin': did you mean 'kind'"),
        (ROWS, {"text": "text"}, "has no column 'text': .*Known are 'kind', 'words'"),
        (ROWS, {"text": (1, 2)}, "has no column 1"),
        (ROWS, {"label": -1}, "has no column -1"),
        (ROWS, {"header": False}, "has no column 'words': columns are 0 to 1, for header=False gives them no names"),
        (ROWS, {"text": ()}, "text names no column"),
        (ROWS, {"text": 0.5}, "has no column 0.5"),
        (ROWS, {"seed": 0.5, "test": 0.5}, "seed must be an integer of at least 0, not 0.5"),
        (ROWS, {"test": 1.5}, "test must be a share of the examples, at least 0 and below 1, not 1.5"),
        (ROWS, {"test": 0.9}, "2 for test leaves nothing of 2 examples"),
        (ROWS, {"test": "other.csv"}, "other.csv has the label 'eggs', which the training table lacks"),
        (ROWS, {"validation": "nowhere.csv"}, "nowhere.csv cannot be read: No such file"),
        ("kind,words\nham,?\n", {}, "1 training texts hold no words"),
    ],
)
def test_what_is_no_such_table_is_named(content: str, options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    written(tmp_path, "kind,words\neggs,x\n", "other.csv")
    paths = {key: tmp_path / value for key, value in options.items() if str(value).endswith(".csv")}
    with pytest.raises(DataError, match=sentence):
        read_csv(path, HOW, **{"text": "words", "label": "kind", **options, **paths})


MORE = "ham,hi\nspam,now\n"


def test_columns_have_places_without_a_header_and_names_with_one(tmp_path: Path) -> None:
    path = written(tmp_path, MORE)
    with pytest.raises(DataError, match="has no column 1: .*header=False if that is an example"):
        read_csv(path, HOW, text=1, label=0)
    assert read_csv(path, HOW, text=1, label=0, header=False).train.num_examples == 2


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "news.csv").write_bytes(b"0,caf\xe9!\n")
    with pytest.raises(DataError, match=r"news\.csv is no text in UTF-8 .*at byte 5"):
        read_csv(tmp_path / "news.csv", HOW, text=1, label=0, header=False)


def test_a_set_that_is_not_there_says_how_to_put_it_there(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"sms_spam lacks SMSSpamCollection\.tsv, .*: get SMSSpamCollection from the UCI"
    ):
        sms_spam(HOW, data_dir=tmp_path)


def test_news_of_other_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ag_news_test").mkdir()
    written(tmp_path / "ag_news_test", "1,a,b\n5,c,d\n", "test.csv")
    with pytest.raises(DataError, match="has the classes 1, 5 instead of 1 to 4"):
        ag_news(HOW, test=0.0, data_dir=tmp_path)


def test_real_news(data_dir: Path) -> None:
    splits = ag_news(data_dir=data_dir)
    assert splits.test is not None
    assert (splits.train.num_examples, splits.test.num_examples) == (6_840, 760)
    labels = np.concatenate([splits.train.targets, splits.test.targets])
    assert np.bincount(labels).tolist() == [1_900] * 4
    assert (splits.name, splits.class_names[3]) == ("ag_news", "Sci/Tech")
    whole = ag_news(test=0.0, data_dir=data_dir)
    assert shown(whole)[0].startswith("fears for t n pension after talks unions representing workers at turner newall")
    assert whole.class_names[whole.train.targets[0]] == "Business"


def test_real_messages(data_dir: Path) -> None:
    splits = sms_spam(Tokenizer(length=20, keep="start"), data_dir=data_dir)
    assert splits.test is not None
    assert (splits.train.num_examples, splits.test.num_examples) == (4_459, 1_115)
    labels = np.concatenate([splits.train.targets, splits.test.targets])
    assert np.bincount(labels).tolist() == [5_574 - 747, 747]
    assert splits.class_names == ("ham", "spam")
    whole = sms_spam(test=0.0, data_dir=data_dir)
    assert shown(whole)[0].startswith("go until jurong point crazy available only in")
    assert whole.class_names[whole.train.targets[2]] == "spam"
