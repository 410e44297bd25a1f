"""Tables of numbers and categories: CSV and Parquet files, data frames, dicts of columns."""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data._arrays import ArraySource, apply_scaling, split_by_fraction
from jaxnn.data._examples import check_resolution, distinct, ids_of
from jaxnn.data._files import os_errors_named, read_columns
from jaxnn.types import ConfigError, DataError, Examples, Splits, suggest, warn

_FEW_ROWS = 5  # from so many on, rows none of which has a known category are no chance
_ENOUGH_ROWS = 20  # from so many on, texts that are nearly all different, or pairs that always agree, are no chance
_MOST_DIFFERENT = 0.95  # the share of different texts above which a column is an id
# Texts of a CSV file that mean a missing value, as in pandas.
_MISSING_IN_FILES = (
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null".split("|")
)


@dataclasses.dataclass(frozen=True)
class Columns:
    """How the columns of a table become inputs.

    Attributes:
        numbers: names of the columns in ``inputs["numbers"]``.
        categories: by name, the categories of each column in ``inputs["categories"]``; the first has id 1.
        missing: texts that mean a missing value, and numbers as texts.
        scaling: what `standardize` learnt: mean, 1 / deviation, and whether some are missing; ``[columns]`` each.

    >>> splits = jn.data.table({"age": [25, None], "job": ["cook", "nurse"], "pay": [1.5, 2.5]}, target="pay")
    >>> splits.train.columns.apply({"age": [30], "job": ["pilot"]})
    {'numbers': array([[30.]], dtype=float32), 'categories': array([[0]], dtype=int32)}
    """

    numbers: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    scaling: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns of the inputs: numbers, marks of missing ones by `standardize`, categories."""
        marks = () if self.scaling is None else np.array(self.numbers, object)[self.scaling[2]].tolist()
        return (*self.numbers, *(f"{name} is missing" for name in marks), *self.categories)

    @property
    def num_categories(self) -> tuple[int, ...]:
        """The number of ids of each column in ``inputs["categories"]``, including 0, for `jaxnn.models.TableMLP`."""
        return tuple(len(known) + 1 for known in self.categories.values())

    def apply(self, table: Any, *, names: Sequence[str] | None = None, separator: str = ",") -> dict[str, np.ndarray]:
        """Returns the inputs of a file, a data frame or a dict, which may have more columns; DataError as `table`."""
        kinds = dict.fromkeys(self.numbers, False) | dict.fromkeys(self.categories, True)
        found = _read(table, "the table", self.missing, kinds, names=names, separator=separator)
        return self.encode(found, "the table")

    def encode(self, columns: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
        """Returns the inputs of columns that are arrays of numbers, and of texts; ``where`` names them in warnings."""
        inputs = {}
        if self.numbers:
            numbers = np.stack([columns[name] for name in self.numbers], axis=1).astype(np.float32)
            inputs["numbers"] = apply_scaling(numbers, *self.scaling) if self.scaling else numbers
        if self.categories:
            ids = {name: ids_of(columns[name], known) + 1 for name, known in self.categories.items()}
            for name, known in self.categories.items():
                given = [text for text in columns[name] if text]
                if len(given) >= _FEW_ROWS and not ids[name].any():
                    warn(
                        f"{where}: no value of column {name!r}, such as {given[0]!r}, is a category of the training "
                        f"rows, such as {known[0]!r}."
                    )
            inputs["categories"] = np.stack([*ids.values()], 1)
        return inputs


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TabularSource(ArraySource):
    """A split of a table, with the ``columns`` that encode further rows."""

    columns: Columns


def table(
    train: Any,
    *,
    target: str,
    test: Any = 0.0,
    validation: Any = 0.0,
    classification: bool | None = None,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    names: Sequence[str] | None = None,
    separator: str = ",",
    missing: Sequence[str | float] = ("?",),
    seed: int = 0,
) -> Splits:
    """Makes a data set of a table: a CSV or Parquet file, a data frame of pandas or polars, or a dict of columns.

    Inputs are a dict of ``numbers`` float32 ``[columns]``, NaN where missing, and ``categories`` int32 ``[columns]``,
    ids from 1, and 0 where missing or not in the training rows; without such columns it lacks the key. Texts, booleans
    and pandas' categories are categories; ``1.0`` is written as ``1``, and ``TRUE`` as ``True``. A column of a CSV file
    without a name, as of an index, is left out with a warning; a column that tells the target is warned of.
    `standardize` prepares the numbers for networks; `binned` takes them as they are. ``splits.train.columns`` are the
    `Columns`. Parquet files need ``pip install "jaxnn[tables]"``.

    >>> columns = {"age": [25, None, 40], "job": ["cook", "nurse", "cook"], "pay": [1.5, 2.5, 3.0]}
    >>> jn.data.table(columns, target="pay", test=0.3)
    Splits(table: 2 train, 1 test, inputs {categories: int32 [1], numbers: float32 [1]})

    Args:
        train: the table of the training examples.
        target: name of the column to predict.
        test: a table with the same columns, or the fraction of the rows for ``test``: random, not stratified.
        validation: the same for ``validation``.
        classification: whether the target is a class, and no number. None: by its type; must be given for integers.
        categorical: names of columns of numbers, or of texts and numbers, that are categories.
        drop: names of columns to leave out.
        names: names of the columns of a CSV file that has no header.
        separator: the character between the columns of a CSV file.
        missing: texts and numbers that mean a missing value, beside the empty text, nan, None, and those of pandas in a
            CSV file. A number is compared as a number: -9 also means -9.0, but 9 not the category 09.
        seed: the seed of the random choice.

    Raises:
        ConfigError: pandas or pyarrow, which read Parquet files, are not installed.
        DataError: a file that cannot be read, or has equal names or rows of different lengths; a column that cannot be
            used, such as one of texts that differ in every row; a target that is missing in some row, has one class,
            too many, or one that is not in ``train``; fractions that leave nothing to train on.
    """
    # The first are what is missing in NumPy, Python and pandas, as texts.
    categorical, drop = ([each] if isinstance(each, str) else each for each in (categorical, drop))
    absent = ("", "nan", "None", "<NA>", *map(str, [missing] if isinstance(missing, str) else missing))
    file: Any = {"names": names, "separator": separator}
    known = dict.fromkeys(categorical, True) | {target: classification}
    whole = _read(train, "train", absent, known, drop, **file)
    values = whole[target]
    if classification is None and values.dtype.kind in "iu":
        raise DataError(f"the target {target!r} is integers: say classification=True for labels, False for numbers.")
    is_class = values.dtype == object
    classes = distinct({*values.tolist()} - {""}) if is_class else ()
    if is_class and not 2 <= len(classes) <= max(20, min(1_000, len(values) // 2)):
        raise DataError(
            f"the target {target!r} has {len(classes):,} {'class' if len(classes) == 1 else 'classes'} in "
            f"{len(values):,} rows, such as {str(classes[:2]).strip('(,)'):.80}: "
            "choose another, or if it is a number, convert it and say classification=False."
        )
    given = {"test": test, "validation": validation}
    fractions: Any = {split: value or 0.0 for split, value in given.items() if isinstance(value, int | float | None)}
    index: Any = range(len(values))
    rows = {split: part for split, (_, part) in split_by_fraction(index, np.array(index), fractions, seed).items()}
    others = {name: one for name, one in whole.items() if name != target}
    columns = _determine({name: one[rows["train"]] for name, one in others.items()}, absent, known)
    if telling := [name for name, one in others.items() if _tells(one, values)]:
        warn(f"column {telling[0]!r} tells the target {target!r} in every row: drop it unless it is known beforehand.")
    tables = {"train": (whole, rows)}
    for split in given.keys() - fractions.keys():
        kinds = {name: one.dtype == object for name, one in whole.items()}
        tables[split] = _read(given[split], split, absent, kinds, **file), {split: slice(None)}
    sources: dict[str, Any] = {}
    for where, (one, parts) in tables.items():
        for name in columns.numbers:
            check_resolution(f"the values of {where}: column {name!r}", one[name])
        inputs, targets = columns.encode(one, where), _targets(one[target], f"{where}: the target {target!r}", classes)
        for split, part in parts.items():
            examples = Examples({key: array[part] for key, array in inputs.items()}, targets[part])
            sources[split] = TabularSource(examples, columns=columns)
    name = Path(train).stem if isinstance(train, str | os.PathLike) else "table"
    return Splits(**sources, name=name, class_names=classes)


def _determine(
    train: Mapping[str, np.ndarray], missing: tuple[str, ...], categorical: Mapping[str, bool | None]
) -> Columns:
    """Returns the encoding of the training rows."""
    if not train:
        raise DataError("train has no column besides the target.")
    numbers, categories = [], {}
    for name, values in train.items():
        if values.dtype != object and not np.isnan(values).all():
            numbers.append(name)
            continue
        categories[name] = found = distinct({*values.tolist()} - {""}) if values.dtype == object else ()
        num_given = int((values != "").sum()) if found else 0
        if name not in categorical and len(found) > max(_ENOUGH_ROWS, _MOST_DIFFERENT * num_given):
            raise DataError(
                f"column {name!r} has {len(found):,} different texts in {num_given:,} training rows, such as "
                f"{found[0]!r:.40}: add it to drop if it is an id, or to categorical."
            )
        if not found:
            raise DataError(f"column {name!r} has no value in any training row: add it to drop.")
        texts = [text for text in found if not _is_number(text)]
        commas = [text for text in texts if _is_number(text.replace(",", ""))]
        if name not in categorical and (0 < len(texts) < len(found) / 2 or len(commas) > len(found) / 2):
            wrong = commas[0] if commas else texts[0]
            raise DataError(
                f"column {name!r} has numbers, and texts such as {wrong!r}: fix them in a data frame, add them to "
                "missing, or name the column in categorical."
            )
    return Columns(tuple(numbers), categories, missing)


def _tells(values: np.ndarray, target: np.ndarray) -> bool:
    """Whether a column is the target in every row, or has a value of its own for each class or repeated number."""
    if len(target) <= _ENOUGH_ROWS or len(values) != len(target):
        return False
    if values.dtype == target.dtype and np.array_equal(values, target):
        return True
    pairs = {*zip(values.tolist(), target.tolist(), strict=True)}
    sizes = {len(pairs), len({*values.tolist()}), len({*target.tolist()})}
    return len(sizes) == 1 and 1 < len(pairs) < len(target) / 2


def _targets(values: np.ndarray, where: str, classes: tuple[str, ...]) -> np.ndarray:
    """Returns labels int32 ``[rows]``, or numbers float32 ``[rows]`` if there are no classes."""
    if not classes:
        check_resolution(f"the values of {where}", values)
    targets = ids_of(values, classes) if classes else values.astype(np.float32)
    wrong = targets < 0 if classes else np.isnan(targets)
    if wrong.any():
        row = wrong.argmax()
        what = (
            f"{values[row]!r}, no class of train ({', '.join(classes[:5])})," if values[row] and classes else "missing"
        )
        raise DataError(f"{where} is {what} in row {row} (such rows: {wrong.sum():,}): fix or remove them in a frame.")
    return targets


def _read(
    table: Any,
    where: str,
    missing: tuple[str, ...],
    kinds: Mapping[str, bool | None],
    drop: Sequence[str] | None = None,
    **file: Any,
) -> dict[str, np.ndarray]:
    """Returns the columns of ``kinds``, or with ``drop`` all others too, as `_convert` does."""
    if isinstance(table, str | os.PathLike):
        table = _read_file(Path(table), missing, kinds, **file)
    if not isinstance(table, Mapping) and not hasattr(table, "columns"):
        raise DataError(f"{where} must be a path, a data frame or a dict of columns, not a {type(table).__name__}.")
    given: dict[Any, None] = dict.fromkeys(getattr(table, "columns", table))  # in order, found at once among thousands
    if lacking := [name for name in (*kinds, *(drop or ())) if name not in given]:
        raise DataError(f"{where} has no column {lacking[0]!r}: {suggest(lacking[0], map(str, given))}.")
    dropped = {"", *(drop or ())} - kinds.keys()
    if drop is not None and "" in dropped & given.keys():
        at = f"column {[*given].index('') + 1} has no name, as frame.to_csv writes its index"
        warn(f"{where}: {at}, and is left out: name it in the file to use it.")
    wanted = kinds if drop is None else [name for name in given if name not in dropped]
    columns = {name: _convert(table[name], kinds.get(name), missing, f"{where}: column {name!r}") for name in wanted}
    lengths = {name: len(column) for name, column in columns.items()}
    if len({*lengths.values()}) != 1 or 0 in lengths.values():
        raise DataError(f"{where} must have rows, as many in each column, not {lengths}.")
    return columns


def _convert(given: Any, category: bool | None, missing: tuple[str, ...], where: str) -> np.ndarray:
    """Returns a column as numbers, or if ``category`` as texts, "" where missing; None: its type decides."""
    try:
        values: Any = np.asarray(given)
    except ValueError as error:
        raise DataError(f"{where} must be numbers or texts [rows]: {error}.") from error
    if values.dtype.kind == "U":
        values = np.asarray(given, object)  # a list keeps the numbers among its texts
    if values.dtype.kind == "f" and values.itemsize < 8:
        values = values.astype(str).astype(float)  # 0.1 stays that
    if values.ndim != 1 or values.dtype.kind not in "iufbO":
        raise DataError(f"{where} must be numbers or texts [rows], not {values.dtype} {list(values.shape)}.")
    absent = [number for number in map(_number, missing) if not math.isnan(number)]

    def is_missing(text: str) -> bool:
        return text in missing or (absent != [] and _number(text) in absent and not re.match(r"-?0\d", text))

    if category is None:
        texts = {str(item).strip() for item in values.tolist() if isinstance(item, str | bool)}
        category = str(getattr(given, "dtype", "")) == "category" or not all(map(is_missing, texts))
    if category or values.dtype.kind not in "iuf":
        # Integers are floats in a column where some are missing.
        items = (int(x) if isinstance(x, float) and x.is_integer() else x for x in values.tolist())
        found = ["" if is_missing(text) else _spelled(text) for text in (str(item).strip() for item in items)]
        if category:
            return np.array(found, object)
        try:
            values = np.array([float(text or "nan") for text in found])
        except ValueError as error:
            raise DataError(f"{where} is of numbers: {error}.") from error
    values = np.where(np.isin(values, absent), np.nan, values) if absent else values
    with np.errstate(over="ignore"):
        infinite = np.isinf(values.astype(np.float32))
    if infinite.any():
        raise DataError(f"{where} is infinite, as float32, in row {infinite.argmax()}: fix it, or make it missing.")
    return np.asarray(values)


def _spelled(text: str) -> str:
    """A category as Python writes it: ``1`` for ``1.0``, ``True`` for ``TRUE``; leading zeros and ``1.10`` stay."""
    if text.lower() in ("true", "false"):
        return text.capitalize()
    whole, _, decimals = text.partition(".")
    return whole if decimals and not decimals.strip("0") and _is_number(whole) else text


def _number(text: str) -> float:
    """The number that a text is, else NaN."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def _is_number(text: str) -> bool:
    return math.isfinite(_number(text))


def _as_numbers(texts: Sequence[str]) -> np.ndarray:
    """The numbers that all ``texts`` are, NaN for empty ones; else the texts."""
    if any("_" in text for text in texts):  # Python takes 1_000 for a number
        return np.array(texts, object)
    with contextlib.suppress(ValueError, OverflowError):
        return np.array([int(text) for text in texts], np.int64)
    with contextlib.suppress(ValueError):
        return np.array([float(text or "nan") for text in texts])
    return np.array(texts, object)


@os_errors_named()
def _read_file(
    path: Path,
    missing: tuple[str, ...],
    kinds: Mapping[str, bool | None],
    *,
    names: Sequence[str] | None = None,
    separator: str = ",",
) -> Any:
    path.stat()  # its error has the file's name
    if path.suffix in (".parquet", ".pq"):
        try:
            import pandas

            return pandas.read_parquet(path)
        except ImportError as error:
            raise ConfigError(f'{path.name} needs pandas and pyarrow: pip install "jaxnn[tables]".') from error
        except ValueError as error:
            raise DataError(f"{path} cannot be read ({str(error).partition('\n')[0]}): write it again.") from error
    how: Any = {"delimiter": separator, "skipinitialspace": True}
    given, _ = read_columns(path, names or True, "set another separator", **how)
    absent = {*missing, *_MISSING_IN_FILES}
    columns = {}
    for name, fields in given.items():
        texts = ["" if (text := field.strip()) in absent else text for field in fields]
        # A category keeps its leading zeros in every file.
        columns[name] = np.array(texts, object) if kinds.get(name) else _as_numbers(texts)
    return columns
