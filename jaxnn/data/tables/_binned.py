"""Columns of numbers and categories as bins, a byte each, and data sets of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data._arrays import ArraySource, arrays
from jaxnn.data._examples import given_splits
from jaxnn.data.tables._tables import Columns
from jaxnn.types import Array, Batch, ConfigError, DataError, Examples, Splits, check_int, cpu_count


@dataclasses.dataclass(frozen=True)
class Bins:
    """How each column becomes bins.

    Attributes:
        edges: for each column its upper bounds, ascending: bin ``i`` holds values in ``(edges[i - 1], edges[i]]``; of a
            categorical column, its categories.
        categorical: columns whose values are categories.
        missing: the bin of NaN, and of categories that were not seen.

    >>> bins = jn.data.learn_bins(np.array([[0.5, 3], [1.5, 3], [np.nan, 7]]), categorical=(1,))
    >>> bins.apply([[1.4, 7], [np.nan, 5]]).tolist()  # 255 is missing
    [[1, 1], [255, 255]]
    """

    edges: tuple[np.ndarray, ...]
    categorical: tuple[int, ...] = ()
    missing: ClassVar[int] = 255

    @property
    def num_categories(self) -> dict[int, int]:
        """The number of categories of each categorical column, for `jaxnn.trees.boosting`."""
        return {column: len(self.edges[column]) for column in self.categorical}

    def apply(self, inputs: Array) -> np.ndarray:
        """Returns the bins ``[rows, columns]`` uint8 of ``inputs [rows, columns]``, or a table's; else a DataError."""
        values = _numbers(inputs)
        if values.shape[1] != len(self.edges):
            raise DataError(f"the inputs have {values.shape[1]} columns, and the bins are of {len(self.edges)}.")

        def apply(column: int, one: np.ndarray) -> np.ndarray:
            edges = self.edges[column]
            at, missing = np.searchsorted(edges, one), np.isnan(one)
            if column in self.categorical:
                at = np.minimum(at, len(edges) - 1)
                missing = edges[at] != one
            return np.where(missing, self.missing, at).astype(np.uint8)

        return np.stack(_by_column(apply, values), axis=1)


def learn_bins(
    inputs: Array, *, max_bins: int = 255, categorical: Sequence[int] = (), sample: int = 200_000, seed: int = 0
) -> Bins:
    """Chooses the bins of each column of ``inputs [rows, columns]``, numbers with NaN for missing ones.

    A column with at most ``max_bins`` distinct values gets a bin for each. In others, a value of more rows than a bin
    should have gets its own, the most frequent first while bins for the rows between them suffice, and bins of about as
    many rows share the rest. Of a ``categorical`` column, the ``max_bins`` most frequent values are kept, and others
    count as missing.

    Args:
        inputs: the training inputs.
        max_bins: at most 255, without that of missing values.
        categorical: columns whose values are categories.
        sample: rows that are looked at, drawn with ``seed``; all if there are not more.
        seed: of the sample.

    >>> jn.data.learn_bins(np.array([[1.0], [2.0], [4.0], [np.nan]])).edges[0].tolist()
    [1.5, 3.0]

    DataError for infinite values, a column without any value, or categories that are not integers.
    """
    check_int("learn_bins: max_bins", max_bins, least=2, most=Bins.missing)
    values = _numbers(inputs)
    for column in categorical:
        if check_int("learn_bins: a column of categorical", column, least=0) >= values.shape[1]:
            raise ConfigError(f"learn_bins: there is no categorical column {column}: the table has {values.shape[1]}.")
    if len(values) > sample:
        values = values[np.sort(np.random.default_rng(seed).choice(len(values), sample, replace=False))]

    def learn(column: int, one: np.ndarray) -> np.ndarray:
        distinct, counts = np.unique(one[~np.isnan(one)], return_counts=True)
        if not len(distinct):
            raise DataError(f"column {column} has no value in any row: leave it out.")
        if column in categorical:
            if not np.array_equal(distinct, np.round(distinct)):
                raise DataError(f"column {column} is categorical, and has values that are not integers.")
            return np.sort(distinct[np.argsort(-counts, kind="stable")[:max_bins]])
        ends = np.arange(len(distinct) - 1)
        if len(distinct) > max_bins:
            ends = _last_of_bins(counts, max_bins)
        low, high = distinct[ends], distinct[ends + 1]
        with np.errstate(over="ignore"):
            gap = high - low
        middle = np.where(np.isfinite(gap), low + gap / 2, low / 2 + high / 2)
        return np.asarray(np.where(middle < high, middle, low))  # adjacent numbers have none between them

    return Bins(tuple(_by_column(learn, values)), tuple(categorical))


def _last_of_bins(counts: np.ndarray, max_bins: int) -> np.ndarray:
    """Returns the indices, in ``counts [values]``, of the last value of each bin but the last: ``[bins - 1]``."""
    alone: list[int] = []  # values with bins of their own, between -1 and the number of values
    parts = [(0, len(counts))]  # the values between them
    rest, bins = int(counts.sum()), max_bins  # rows of the others, and bins for them
    for value in np.argsort(-counts, kind="stable")[:max_bins].tolist():
        if counts[value] * bins <= rest:
            break
        bounds = [-1, *sorted([*alone, value]), len(counts)]
        between = [(low + 1, high) for low, high in itertools.pairwise(bounds) if high - low > 1]
        if len(between) < bins:
            alone, parts = bounds[1:-1], between
            rest, bins = rest - int(counts[value]), bins - 1
    ends, before = {*alone}, 0
    for start, stop in parts:
        rows = counts[start:stop]
        after, more = before + int(rows.sum()), bins - len(parts)
        share = 1 + more * after // rest - more * before // rest
        place = (np.cumsum(rows) - rows / 2) / (after - before) * share
        ends |= {stop - 1, *(start + np.flatnonzero(np.diff(place.astype(int)))).tolist()}
        before = after
    return np.array(sorted(ends)[:-1])


def _by_column(function: Callable[[int, np.ndarray], np.ndarray], values: np.ndarray) -> list[np.ndarray]:
    """``function(column, values [rows])`` for each column of ``values [rows, columns]``, on all cores."""
    with ThreadPoolExecutor(cpu_count()) as threads:  # NumPy sorts and searches without Python's lock
        return list(
            threads.map(lambda one: function(one, np.ascontiguousarray(values[:, one])), range(values.shape[1]))
        )


def _numbers(inputs: Any) -> np.ndarray:
    if isinstance(inputs, Mapping):  # of a table: numbers, then categories, where 0 is missing
        ids = inputs.get("categories", np.zeros((len(inputs.get("numbers", ())), 0)))
        inputs = np.hstack([inputs.get("numbers", ids[:, :0]), np.where(ids > 0, ids, np.nan)])
    values = np.asarray(inputs)
    if values.ndim != 2 or values.dtype.kind not in "fiub":
        given = f"{values.dtype} {list(values.shape)}"
        raise DataError(f"a table must be numbers [rows, columns], categories as integers, not {given}.")
    values = values.astype(np.float64, copy=False)
    if np.isinf(values).any():
        row, column = np.argwhere(np.isinf(values))[0]
        raise DataError(f"the value at row {row}, column {column} is infinite: use NaN for a missing value.")
    return values


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BinnedSource(ArraySource):
    """A split of bins; a training batch is all of its rows, in order. A `table` gives ``columns`` too."""

    bins: Bins
    columns: Columns | None = None

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """All rows, in order, for each of ``steps [k]``: ``[k, batch]`` int32."""
        if batch_size != self.num_examples:
            raise ConfigError(
                f"each tree is grown on all rows: set batch_size={self.num_examples}, not {batch_size}; row_fraction "
                "samples, and jn.data.binned(multiple_of=…) pads rows for several devices."
            )
        return np.arange(batch_size, dtype=np.int32)[None] + 0 * steps[:, None]

    def as_batch(self, examples: Examples, mask: Array | None = None) -> Batch:
        """All of ``examples``, in order: bins stay bytes."""
        inputs, targets = jax.tree.map(jnp.asarray, (examples.inputs, examples.targets))
        rows = jax.tree.leaves(inputs)[0].shape[0]
        if targets is not None and isinstance(inputs, dict) and "query" in inputs and rows < self.num_examples:
            raise ConfigError(f"a batch would cut a query: set eval_batch_size={self.num_examples}, all rows.")
        return Batch(inputs, targets, np.ones(rows, np.float32) if mask is None else mask)

    def gather(self, examples: Examples, indices: Array, mask: Array | None = None) -> Batch:
        """The rows at ``indices [batch]``, which are not copied if the batch is the whole split."""
        whole = len(indices) == jax.tree.leaves(examples.inputs)[0].shape[0]
        return self.as_batch(examples, mask) if whole else super().gather(examples, indices, mask)


def binned(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    max_bins: int = 255,
    categorical: Sequence[int] = (),
    multiple_of: int = 1,
    name: str = "table",
) -> Splits:
    """Makes a data set of tables ``(inputs [rows, columns], targets [rows])`` as bins, learnt from ``train``.

    Missing values are NaN, categories integers. A third array, ``queries [rows]``, names the query of each row for an
    objective such as `jaxnn.trees.lambda_rank`; the rows of a query are side by side. ``train`` may also be a data set,
    such as of `table`: then its splits, name and classes are taken, and its categories known. The bins are
    ``splits.train.bins``. Training rows are padded, with weight 0, to a ``multiple_of`` the number of devices that are
    to share them. Raises `DataError` as `learn_bins` and `arrays`.

    >>> splits = jn.data.binned((np.array([[0.5, 1], [np.nan, 3]]), [0, 1]), categorical=[1])
    >>> splits.train.examples.inputs.tolist(), splits.train.bins.categorical
    ([[0, 0], [255, 1]], (1,))
    >>> table = jn.data.table({"age": [25, None], "job": ["cook", "nurse"], "pay": [1.5, 2.5]}, target="pay")
    >>> train = jn.data.binned(table).train
    >>> train.bins.apply(train.columns.apply({"age": [30], "job": ["nurse"]})).tolist()
    [[0, 1]]
    """
    parts = given_splits(train, test, validation)
    columns: Columns | None = None
    classes: tuple[str, ...] = ()
    if isinstance(train, Splits):
        name, classes, columns = train.name, train.class_names, getattr(train.train, "columns", None)
        parts = {split: source.read(np.arange(source.num_examples)) for split, source in train.named().items()}
        if columns is not None:
            width = len(columns.names)
            categorical = range(width - len(columns.categories), width)
    bins = learn_bins(parts["train"][0], max_bins=max_bins, categorical=categorical)
    padding = -len(parts["train"][1]) % check_int("binned: multiple_of", multiple_of)
    pairs: Any = {split: _binned_split(split, bins, padding, *part) for split, part in parts.items()}
    others = {split: pairs.pop(split) for split in (train.others if isinstance(train, Splits) else ())}
    splits = arrays(**pairs, name=name, class_names=classes, others=others)
    sources: dict[str, Any] = splits.named()
    tables = {part: BinnedSource(one.examples, bins=bins, columns=columns) for part, one in sources.items()}
    return splits.with_sources(tables)


def _binned_split(split: str, bins: Bins, padding: int, inputs: Any, targets: Any, queries: Any = None) -> Any:
    """Inputs and targets; if the training rows need ``padding``, inputs have weights, which are 0 of its rows."""
    found = {"bins": bins.apply(inputs)}
    rows = len(found["bins"])
    if queries is not None:
        queries = np.asarray(queries)
        if queries.shape != (rows,):
            raise DataError(f"{split}: queries must be a number or text for each row, not {list(queries.shape)}.")
        starts = np.append(True, queries[1:] != queries[:-1])
        names, counts = np.unique(queries[starts], return_counts=True)
        if counts.max() > 1:
            raise DataError(f"{split}: the rows of query {names[counts.argmax()]} are not side by side: sort by query.")
        found["query"] = np.cumsum(starts, dtype=np.int32) - 1
    if padding:
        number = padding * (split == "train")
        found, targets = jax.tree.map(
            lambda part: np.concatenate([part, np.repeat(part[-1:], number, 0)]), (found, np.asarray(targets))
        )
        found["weight"] = np.float32(np.arange(len(targets)) < rows)
    return (found if len(found) > 1 else found["bins"]), targets
