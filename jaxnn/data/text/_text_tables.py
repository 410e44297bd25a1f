"""Tables of texts (CSV, TSV): each row is an example."""

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data._arrays import split_by_fraction
from jaxnn.data._examples import distinct
from jaxnn.data._files import PathLike, fetch, folder_with, read_columns
from jaxnn.data.text._text_sets import text_arrays
from jaxnn.data.text._tokenizer import Tokenizer
from jaxnn.types import DataError, Splits, suggest

_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/test.csv"
_AG_NEWS_SHA256 = "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699"
_SMS_SPAM = "SMSSpamCollection.tsv"

type Column = int | str


def read_csv(
    path: PathLike,
    tokenizer: Tokenizer | None = None,
    *,
    text: Column | Sequence[Column],
    label: Column,
    header: bool = True,
    quoting: bool = True,
    delimiter: str = ",",
    test: float | PathLike = 0.0,
    validation: float | PathLike = 0.0,
    seed: int = 0,
) -> Splits:
    r"""Reads texts and labels from columns of a CSV table in UTF-8. For numbers and categories: `jaxnn.data.table`.

    Labels number the distinct entries of the label column, in numerical order if all are integers, else
    alphabetically; the entries become ``class_names``. Blank lines are ignored. Inputs and ``tokenizer`` are those of
    `text_arrays`. Raises DataError, with file and line, for a file that cannot be read or is not UTF-8, a row with
    another number of columns, a missing column, an empty text, a label that is empty or missing in the training table,
    or fractions that leave nothing to train on.

    >>> _ = Path("mail.csv").write_text("kind,words\nham,so long\nspam,buy now\n")
    >>> jn.data.read_csv("mail.csv", text="words", label="kind").class_names
    ('ham', 'spam')

    Args:
        path: the table of the training examples.
        tokenizer: the settings of tokens and rows; None: ``Tokenizer()``.
        text: the column of the text, or several, joined by spaces.
        label: the column of the label.
        header: whether the first row has column names. Columns are then given by name, otherwise by index from 0.
        quoting: whether a field may be enclosed in quotation marks, and may then contain delimiters, line ends, and
            quotation marks written twice (RFC 4180). Otherwise quotation marks are ordinary characters.
        delimiter: the character between columns.
        test: a table with the same columns, or the fraction of the examples for ``test``: random, not stratified.
        validation: the same for ``validation``.
        seed: the seed of that random choice.
    """
    columns = (text,) if isinstance(text, str) or not isinstance(text, Iterable) else tuple(text)
    if not columns:
        raise DataError("text is empty: give the name or index of at least one column.")

    dialect: Any = {"delimiter": delimiter, "quoting": csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE}

    def read(file: PathLike) -> tuple[list[str], list[str]]:
        given, lines = read_columns(Path(file), header, "set another delimiter or quoting=False", **dialect)
        for column in (*columns, label):
            if column not in given:
                advice = f"with header=False, columns are 0 to {len(given) - 1}"
                if header:
                    advice = (
                        f"{suggest(column, given)}; use names of its first row, or header=False if that is an example"
                    )
                raise DataError(f"{file} has no column {column!r}: {advice}.")
        texts = [" ".join(parts) for parts in zip(*(given[column] for column in columns), strict=True)]
        labels = [entry.strip() for entry in given[label]]
        for what, entries in (("label", labels), ("text", texts)):
            for line, entry in zip(lines, entries, strict=True):
                if not entry.strip():
                    raise DataError(f"line {line} of {file} has no {what}: fill it in or remove the row.")
        return texts, labels

    lines, entries = read(path)
    class_names, labels = distinct(entries), np.array(entries, object)
    given = {"test": test, "validation": validation}
    files = {split: value for split, value in given.items() if isinstance(value, str | os.PathLike)}
    fractions: Any = {split: value for split, value in given.items() if split not in files}
    pairs = split_by_fraction(lines, labels, fractions, seed)
    pairs |= {split: read(file) for split, file in files.items()}
    return text_arrays(**pairs, tokenizer=tokenizer, name=Path(path).stem, class_names=class_names)


def read_tsv(
    path: PathLike,
    tokenizer: Tokenizer | None = None,
    *,
    text: Column | Sequence[Column],
    label: Column,
    **options: Any,
) -> Splits:
    r"""Reads texts and labels from columns of a tab-separated table; arguments and errors as for `read_csv`.

    >>> _ = Path("mail.tsv").write_text("ham\tso long\nspam\tbuy now\n")
    >>> jn.data.read_tsv("mail.tsv", text=1, label=0, header=False).class_names
    ('ham', 'spam')
    """
    return read_csv(path, tokenizer, text=text, label=label, delimiter="\t", **options)


def ag_news(
    tokenizer: Tokenizer | None = None,
    *,
    test: float = 0.1,
    validation: float = 0.0,
    seed: int = 0,
    data_dir: PathLike | None = None,
) -> Splits:
    """The 7,600 articles of AG News' test file, titles and descriptions, in 4 classes of 1,900.

    Zhang, Zhao & LeCun, "Character-level Convolutional Networks for Text Classification" (2015). The 120,000 training
    articles are not included, so accuracies do not compare with published ones. Reads ``ag_news_test/test.csv`` in the
    data directory, and downloads 2 MB if it is missing.

    ``test`` and ``validation`` are fractions of the examples, chosen at random by ``seed``; other arguments and errors
    as for `imdb`.

    >>> jn.data.ag_news().class_names
    ('World', 'Sports', 'Business', 'Sci/Tech')
    """
    path = fetch("ag_news_test", "test.csv", _AG_NEWS, _AG_NEWS_SHA256, data_dir)
    splits = read_csv(path, tokenizer, text=(1, 2), label=0, header=False, test=test, validation=validation, seed=seed)
    if splits.class_names != ("1", "2", "3", "4"):
        raise DataError(f"{path} has classes {', '.join(splits.class_names)} instead of 1 to 4: download it again.")
    return splits._replace(name="ag_news", class_names=("World", "Sports", "Business", "Sci/Tech"))


def sms_spam(
    tokenizer: Tokenizer | None = None,
    *,
    test: float = 0.2,
    validation: float = 0.0,
    seed: int = 0,
    data_dir: PathLike | None = None,
) -> Splits:
    """5,574 text messages, of which 747 are spam (label 1); 403 are duplicates, so splits share some.

    Almeida, Gómez Hidalgo & Yamakami, "Contributions to the Study of SMS Spam Filtering" (2011). Reads
    ``sms_spam/SMSSpamCollection.tsv`` in the data directory; if it is missing, the DataError says where to get it.
    Arguments and other errors as for `ag_news`.

    >>> jn.data.sms_spam(test=0.1)
    Splits(sms_spam: 5,017 train, 557 test, inputs int32 [100], 2 classes)
    """
    advice = "get SMSSpamCollection from the UCI Machine Learning Repository and put it there under that name"
    path = folder_with("sms_spam", [_SMS_SPAM], advice, data_dir) / _SMS_SPAM
    fractions = {"test": test, "validation": validation}
    splits = read_tsv(path, tokenizer, text=1, label=0, header=False, quoting=False, seed=seed, **fractions)
    return splits._replace(name="sms_spam")
