"""Tables of texts: each row is an example, its columns separated by commas or tabs."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data._arrays import split_off
from jaxnn.data._files import PathLike, fetch, folder_with, read_text
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
    """Texts and labels in the columns of a table in UTF-8.

    Labels number the different entries of the label's column, in the order of numbers if all are integers, else of
    the alphabet. Blank lines are left out.

    Args:
        path: the table of the training examples.
        tokenizer: how texts become ids; None: ``Tokenizer()``.
        text: the column of the text, or several, joined by spaces.
        label: the column of the label.
        header: whether the first row names the columns. Then columns are given by name, else by place, from 0.
        quoting: whether a column may be enclosed in quotation marks, and then hold commas, line ends, and each of
            its own quotation marks twice (RFC 4180); else they are characters like others.
        delimiter: what separates columns.
        test: a table of the same columns, or the share of the examples held out: shuffled, not by class.
        validation: the same for ``validation``.
        seed: of the shuffle.

    Returns:
        Inputs int32 ``[length]``, labels int32, and the labels' entries as classes' names;
        `jaxnn.data.vocabulary` gives the tokens.

    Raises:
        DataError: a file that cannot be read, is not UTF-8 or no such table, a row with another number of columns, a
            column that is not there, a text that is empty, a label that is empty or not among those of training,
            shares that cannot be held out; the file and the line are named.
    """
    columns = (text,) if isinstance(text, str) or not isinstance(text, Iterable) else tuple(text)
    if not columns:
        raise DataError("text names no column: give the place or the name of at least one.")

    def read(file: PathLike) -> tuple[list[str], list[str]]:
        rows = _read_rows(Path(file), delimiter, quoting)
        return _texts_and_labels(Path(file), rows, columns, label, header)

    lines, entries = read(path)
    try:
        # By number, and equal numbers such as 1 and 01 in the order of the alphabet.
        class_names = tuple(sorted(sorted(set(entries)), key=int))
    except ValueError:
        class_names = tuple(sorted(set(entries)))
    numbers = {name: index for index, name in enumerate(class_names)}
    labels = np.array([numbers[entry] for entry in entries], np.int32)
    given = {"test": test, "validation": validation}
    shares: Any = {split: share for split, share in given.items() if not isinstance(share, str | os.PathLike)}
    pairs = split_off(lines, labels, shares, seed)
    for split, file in given.items():
        if not isinstance(file, str | os.PathLike):
            continue
        lines, entries = read(file)
        if unknown := [entry for entry in entries if entry not in numbers]:
            raise DataError(f"{file} has the label {unknown[0]!r}, which the training table lacks: remove such rows.")
        pairs[split] = lines, np.array([numbers[entry] for entry in entries], np.int32)
    return text_arrays(**pairs, tokenizer=tokenizer, name=Path(path).stem, class_names=class_names)


def read_tsv(
    path: PathLike,
    tokenizer: Tokenizer | None = None,
    *,
    text: Column | Sequence[Column],
    label: Column,
    **options: Any,
) -> Splits:
    """Texts and labels in the columns of a table with tabs between them; arguments and errors as of `read_csv`."""
    return read_csv(path, tokenizer, text=text, label=label, delimiter="\t", **options)


def ag_news(
    tokenizer: Tokenizer | None = None,
    *,
    test: float = 0.1,
    validation: float = 0.0,
    seed: int = 0,
    data_dir: PathLike | None = None,
) -> Splits:
    """The 7,600 news of AG News' test file, titles and descriptions, in 4 classes of 1,900.

    Zhang, Zhao & LeCun, "Character-level Convolutional Networks for Text Classification" (2015). Its 120,000 training
    news are not among them: accuracies do not compare with published ones. Reads ``ag_news_test/test.csv`` in the data
    directory, and downloads 2 MB if it is not there.

    ``test`` and ``validation`` are shares, held out after a shuffle by ``seed``; other arguments as of `imdb`.

    Raises:
        DataError: the file is missing and cannot be downloaded, or damaged; shares that cannot be held out.
    """
    path = fetch("ag_news_test", "test.csv", _AG_NEWS, _AG_NEWS_SHA256, data_dir)
    splits = read_csv(path, tokenizer, text=(1, 2), label=0, header=False, test=test, validation=validation, seed=seed)
    if splits.class_names != ("1", "2", "3", "4"):
        raise DataError(f"{path} has the classes {', '.join(splits.class_names)} instead of 1 to 4: get it again.")
    return splits._replace(name="ag_news", class_names=("World", "Sports", "Business", "Sci/Tech"))


def sms_spam(
    tokenizer: Tokenizer | None = None,
    *,
    test: float = 0.2,
    validation: float = 0.0,
    seed: int = 0,
    data_dir: PathLike | None = None,
) -> Splits:
    """5,574 text messages, of which 747 are spam (label 1); 403 are repetitions of others, so splits share some.

    Almeida, Gómez Hidalgo & Yamakami, "Contributions to the Study of SMS Spam Filtering" (2011). Read from
    ``sms_spam/SMSSpamCollection.tsv`` in the data directory; if it is not there, the DataError says where to get it.
    Arguments and other errors as of `ag_news`.
    """
    advice = "get SMSSpamCollection from the UCI Machine Learning Repository and put it there under that name"
    path = folder_with("sms_spam", [_SMS_SPAM], advice, data_dir) / _SMS_SPAM
    shares = {"test": test, "validation": validation}
    splits = read_tsv(path, tokenizer, text=1, label=0, header=False, quoting=False, seed=seed, **shares)
    return splits._replace(name="sms_spam")


def _read_rows(path: Path, delimiter: str, quoting: bool) -> list[tuple[int, list[str]]]:
    """The number of the line that each row begins in, from 1, and the row's columns."""
    content = read_text(path)
    kind: Any = csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE
    rows = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True, quoting=kind)
    numbered = []
    first_line = 1
    # Python reads no field of more than 131,072 characters otherwise.
    limit = csv.field_size_limit(len(content) + 1)
    try:
        for row in rows:
            if "".join(row).strip() or len(row) > 1:
                numbered.append((first_line, row))
            first_line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"the row that begins in line {first_line} of {path} is no row of a table ({error}): fix its quotation "
            "marks, or give quoting=False."
        ) from error
    finally:
        csv.field_size_limit(limit)
    return numbered


def _texts_and_labels(
    path: Path, rows: list[tuple[int, list[str]]], text: tuple[Column, ...], label: Column, header: bool
) -> tuple[list[str], list[str]]:
    """The texts of a table, and their labels' entries."""
    if len(rows) <= header:
        below = " below its header" if rows else ""
        raise DataError(f"{path} has no row{below}: give a table with a row per example.")
    first = rows[0][1]

    def place(column: Column) -> int:
        if header and column in first:
            return first.index(str(column))
        if not header and type(column) is int and 0 <= column < len(first):
            return column
        if header:
            advice = f"{suggest(column, first)}; give names of its first row, or header=False if that is an example"
        else:
            advice = f"columns are 0 to {len(first) - 1}, for header=False gives them no names"
        raise DataError(f"{path} has no column {column!r}: {advice}.")

    places, label_place = [place(column) for column in text], place(label)
    lines, entries, empty = [], [], []
    for number, row in rows[header:]:
        if len(row) != len(first):
            raise DataError(
                f"line {number} of {path} has {len(row)} columns where the first row has {len(first)}: fix it, or use "
                "the other of jn.data.read_csv and read_tsv, or another quoting."
            )
        entries.append(row[label_place].strip())
        lines.append(" ".join(row[column] for column in places))
        if not entries[-1]:
            raise DataError(f"line {number} of {path} has no label in column {label!r}: fill it in or remove it.")
        if not lines[-1].strip():
            empty.append(number)
    if empty:
        raise DataError(
            f"line {empty[0]} of {path} has no text in {' and '.join(f'column {column!r}' for column in text)} "
            f"(rows without text: {len(empty):,}): fill it in or remove the row."
        )
    return lines, entries
