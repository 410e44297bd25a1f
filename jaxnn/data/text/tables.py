"""Tables of texts: a row is an example, its columns are apart by commas or tabs."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from csv import Error as CsvError
from csv import field_size_limit
from csv import reader as csv_reader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxnn.data.text.reading import read_text
from jaxnn.data.text.shares import split_off
from jaxnn.data.text.source import texts
from jaxnn.data.text.tokenizer import Tokenizer
from jaxnn.types import DataError, Splits, suggest

type Column = int | str
type PathLike = str | os.PathLike[str]


class Layout(NamedTuple):
    """How a table is written, and which of its columns are read.

    Attributes:
        delimiter: what stands between two columns.
        quoting: whether quotation marks enclose a column.
        header: whether the first row names the columns.
        text: the columns that make up the text.
        label: the column of the label.
    """

    delimiter: str
    quoting: bool
    header: bool
    text: tuple[Column, ...]
    label: Column


def csv(
    path: PathLike,
    tokenizer: Tokenizer | None = None,
    *,
    text: Column | Sequence[Column],
    label: Column,
    header: bool = True,
    quoting: bool = True,
    test: float | PathLike = 0.0,
    validation: float | PathLike = 0.0,
    seed: int = 0,
) -> Splits:
    """Texts and labels in the columns of a table, with commas between them, in UTF-8.

    Labels number the different entries of the label's column, in the order of numbers if all are integers, else of
    the alphabet. Blank lines are left out. A first row that is not what ``header`` says is an error: a header is short
    names and no numbers, and its label is that of no example.

    Args:
        path: the table of the training examples.
        tokenizer: how texts become ids; None: ``Tokenizer()``.
        text: the column of the text, or several, joined by spaces: places from 0, or names if there is a header.
        label: the column of the label.
        header: whether the first row names the columns.
        quoting: whether a column may stand between quotation marks, and then hold commas, line ends, and each of
            its own quotation marks twice (RFC 4180); else they are characters like others.
        test: a table of the same columns, or the share of the examples held out: shuffled, whatever their classes.
        validation: likewise.
        seed: of the shuffle.

    Returns:
        Inputs int32 ``[length]``, labels int32, and the labels' entries as classes' names;
        `jaxnn.data.vocabulary` gives the tokens.

    Raises:
        DataError: a file that cannot be read, is not UTF-8 or no such table, a row with another number of columns, a
            column that is not there, a text that is empty, a label that is empty or not among those of training, a
            header taken for an example or the reverse, shares that cannot be held out; the file and the line are named.
    """
    chosen = Layout(",", quoting, header, _columns(text), label)
    return table(Path(path), tokenizer, chosen, {"test": test, "validation": validation}, seed)


def tsv(
    path: PathLike,
    tokenizer: Tokenizer | None = None,
    *,
    text: Column | Sequence[Column],
    label: Column,
    header: bool = True,
    quoting: bool = True,
    test: float | PathLike = 0.0,
    validation: float | PathLike = 0.0,
    seed: int = 0,
) -> Splits:
    """Texts and labels in the columns of a table with tabs between them; arguments and errors as of `csv`."""
    chosen = Layout("\t", quoting, header, _columns(text), label)
    return table(Path(path), tokenizer, chosen, {"test": test, "validation": validation}, seed)


def table(
    path: Path, tokenizer: Tokenizer | None, chosen: Layout, held_out: dict[str, float | PathLike], seed: int
) -> Splits:
    """A table as a data set, see `csv`.

    Args:
        path: the table of the training examples.
        tokenizer: how texts become ids.
        chosen: how the table is written, and what is read of it.
        held_out: for each other split a table, or the share of the examples held out for it.
        seed: of the shuffle before that.
    """
    lines, entries = _read(path, chosen)
    class_names = _ordered(set(entries))
    files = {split: Path(other) for split, other in held_out.items() if isinstance(other, str | os.PathLike)}
    shares: Any = {split: share for split, share in held_out.items() if split not in files}
    labels = _labels(entries, class_names, path)
    pairs: dict[str, Any] = {
        split: ([lines[i] for i in part], labels[part]) for split, part in split_off(len(lines), shares, seed).items()
    }
    for split, other in files.items():
        lines, entries = _read(other, chosen)
        pairs[split] = lines, _labels(entries, class_names, other)
    return texts(**pairs, tokenizer=tokenizer, name=path.stem, class_names=class_names)


def _read(path: Path, chosen: Layout) -> tuple[list[str], list[str]]:
    """The texts of a table, and their labels' entries."""
    rows = list(_rows(path, chosen))
    if len(rows) <= chosen.header:
        below = " below its header" if rows else ""
        raise DataError(f"{path} has no row{below}: give a table with a row an example.")
    first = rows[0][1]
    names = first if chosen.header else None
    columns = [_place(column, names, len(first), path) for column in chosen.text]
    label = _place(chosen.label, names, len(first), path)
    lines, entries, empty = [], [], []
    for number, row in rows[chosen.header :]:
        if len(row) != len(first):
            raise DataError(
                f"line {number} of {path} has {len(row)} columns where the first row has {len(first)}: mend it, or "
                "use the other of jn.data.csv and tsv, or another quoting."
            )
        if not row[label].strip():
            raise DataError(
                f"line {number} of {path} has no label in column {chosen.label!r}: fill it in or remove it."
            )
        lines.append(" ".join(row[column] for column in columns))
        entries.append(row[label].strip())
        if not lines[-1].strip():
            empty.append(number)
    if empty:
        raise DataError(
            f"line {empty[0]} of {path} has no text in {' and '.join(f'column {column!r}' for column in chosen.text)} "
            f"(rows without text: {len(empty):,}): fill it in or remove the row."
        )
    _check_header(path, chosen, rows[0], columns, label, entries)
    return lines, entries


def _check_header(
    path: Path, chosen: Layout, first: tuple[int, list[str]], columns: list[int], label: int, entries: list[str]
) -> None:
    """Raises DataError if ``header`` is not as the first row looks."""
    number, row = first
    entry = row[label].strip()
    if chosen.header:
        # A label that is found by name has a header.
        if isinstance(chosen.label, int) and entry in entries:
            raise DataError(
                f"line {number} of {path} is an example and no header, with the label {entry!r} as rows below it: give "
                f"header=False; or, if it is a header, label={entry!r}."
            )
        return
    others = Counter(entries[1:])
    is_alone = entry not in others and (
        min(others.values(), default=0) > 1 or (others and all(map(_is_number, others)))
    )
    has_names = not any(map(_is_number, row)) and all(len(row[column].split()) <= 3 for column in columns)
    if is_alone and has_names:
        raise DataError(
            f"line {number} of {path} looks like a header, for no other row has its label {entry!r}: give header=True; "
            "or, if it is an example, put it below another row."
        )


def _is_number(entry: str) -> bool:
    try:
        float(entry)
    except ValueError:
        return False
    return True


def _rows(path: Path, chosen: Layout) -> Iterator[tuple[int, list[str]]]:
    """The number of the line that each row begins in, from 1, and the row's columns."""
    content = read_text(path)
    if not chosen.quoting:
        plain = enumerate(content.split("\n"), start=1)
        yield from ((number, line.split(chosen.delimiter)) for number, line in plain if line.strip())
        return
    rows = csv_reader(io.StringIO(content, newline=""), delimiter=chosen.delimiter, strict=True)
    begin = 1
    # Python reads no field of more than 131,072 characters otherwise.
    limit = field_size_limit(len(content) + 1)
    try:
        for row in rows:
            if row:
                yield begin, row
            begin = rows.line_num + 1
    except CsvError as error:
        raise DataError(
            f"the row that begins in line {begin} of {path} is no row of a table ({error}): mend its quotation marks, "
            "or give quoting=False."
        ) from error
    finally:
        field_size_limit(limit)


def _columns(text: Column | Sequence[Column]) -> tuple[Column, ...]:
    """The columns of the text, of which there must be one."""
    columns = (text,) if isinstance(text, str) or not isinstance(text, Iterable) else tuple(text)
    if not columns:
        raise DataError("text names no column: give the place or the name of at least one.")
    return columns


def _place(column: Column, names: list[str] | None, count: int, path: Path) -> int:
    """Where a column stands."""
    if isinstance(column, int) and not isinstance(column, bool) and 0 <= column < count:
        return column
    if isinstance(column, str) and names and column in names:
        return names.index(column)
    known = suggest(column, names) if names else f"columns are 0 to {count - 1}, for header=False gives them no names"
    raise DataError(f"{path} has no column {column!r}: {known}.")


def _ordered(entries: set[str]) -> tuple[str, ...]:
    """Class names in order: 2 before 10 if all are integers, else by the alphabet."""
    try:
        # Equal numbers, such as 1 and 01, in an order too.
        return tuple(sorted(sorted(entries), key=int))
    except ValueError:
        return tuple(sorted(entries))


def _labels(entries: list[str], class_names: tuple[str, ...], path: Path) -> np.ndarray:
    """The number of each entry, ``[examples]`` int32."""
    numbers = {name: index for index, name in enumerate(class_names)}
    for entry in entries:
        if entry not in numbers:
            raise DataError(
                f"{path} has the label {entry!r}, which the training table lacks: add examples or remove it."
            )
    return np.array([numbers[entry] for entry in entries], np.int32)
