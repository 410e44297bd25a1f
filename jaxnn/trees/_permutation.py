"""How much of a target's variation each column explains: cross-validated boostings, whose columns are permuted."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data import learn_bins
from jaxnn.trees._boosting import boosting
from jaxnn.trees._objectives import squared_error
from jaxnn.types import Array, Batch, DataError, TrainState, check_int

LEAST_ROWS = 64  # shorter tables are padded to this length, and longer ones to a power of two: they share programs
# Of tables with 30 to 1,000 rows these explained most of the variance of held-out rows.
NUM_TREES = 100
PERMUTATIONS = 8  # of a column in a fold
SETTINGS: Mapping[str, Any] = {"max_depth": 3, "row_fraction": 0.7, "min_child_weight": 2.0, "max_bins": 64}


class Explained(NamedTuple):
    """Shares of a target's variance; what `permutation_importances` returns.

    >>> found = jn.trees.permutation_importances(np.arange(40.0)[:, None], np.arange(40.0))
    >>> bool(found.total.mean() > 0.8)
    True
    """

    total: np.ndarray  # by all columns, R², of each fold ``[fits]``
    parts: np.ndarray  # by each column ``[columns, fits]``


def permutation_importances(
    inputs: Array, targets: Array, *, categorical: Sequence[int] = (), folds: int = 5, repeats: int = 4, key: int = 0
) -> Explained:
    """Returns how much of the variance of ``targets [rows]`` is explained by each column of ``inputs [rows, columns]``.

    A boosting of 100 trees predicts each fold of the rows, and is trained on the others; one compiled program trains
    and predicts all. The part of a column is half of the rise of their mean squared error when rows get the column's
    values of other rows, as a share of the variance. It is the column's total effect (Jansen, "Analysis of variance
    designs for model output", 1999): parts of independent columns add up to the total, and to more if columns interact.
    Columns that vary together share theirs.

    >>> inputs = np.random.default_rng(0).uniform(size=(100, 2))
    >>> found = jn.trees.permutation_importances(inputs, np.sin(6 * inputs[:, 0]))
    >>> found.total.shape, found.parts.shape, (found.parts.mean(axis=1) > 0.5).tolist()
    ((20,), (2, 20), [True, False])

    Args:
        inputs: numbers, NaN for missing ones.
        targets: numbers that differ.
        categorical: columns whose values are categories, as integers.
        folds: parts of the rows.
        repeats: how often the rows are divided; there are ``folds * repeats`` fits.
        key: seed of folds, permutations and boostings.

    Raises:
        DataError: there are fewer than two rows a fold, all targets are equal, or as `learn_bins`.
    """
    check_int("permutation_importances: folds", folds, least=2)
    check_int("permutation_importances: repeats", repeats)
    targets = np.asarray(targets, np.float64)
    count = len(targets)
    if count < 2 * folds:
        raise DataError(f"there are {count} rows, and {folds} folds need two each: give fewer folds.")
    if not 0 < (deviation := float(targets.std())) < np.inf:
        raise DataError("the targets are all equal or not finite: there is no variation to explain.")
    bins = learn_bins(inputs, max_bins=SETTINGS["max_bins"], categorical=categorical)
    rng = np.random.default_rng(key)
    divided = [fold for _ in range(repeats) for fold in np.array_split(rng.permutation(count), folds)]
    length = max(LEAST_ROWS, 1 << (count - 1).bit_length())
    width = -(-length // folds)
    rows = np.stack([_with_others(fold, count, width, rng) for fold in divided])
    weights = np.ones((len(divided), length), np.float32)
    weights[:, count:] = 0
    for weight, fold in zip(weights, divided, strict=True):
        weight[fold] = 0
    padding = (0, length - count)
    table = np.pad(bins.apply(inputs), (padding, (0, 0)))
    scaled = np.pad((targets - targets.mean()) / deviation, padding)
    with jax.enable_x64(False):
        arrays: Any = (table, scaled.astype(np.float32), weights, rows)
        predicted = np.asarray(_predictions(tuple(bins.num_categories.items()), key, *arrays), np.float64)
    return _explained(scaled, predicted, rows, np.arange(width) < np.array([[len(fold)] for fold in divided]))


def _explained(scaled: np.ndarray, predicted: np.ndarray, rows: np.ndarray, is_row: np.ndarray) -> Explained:
    """The shares of the variance of ``scaled [rows]``, which is 1; ``is_row [fits, width]`` is False of padding."""
    squares = (scaled[rows[:, :1]] - predicted) ** 2  # [fits, 1 + columns * permutations, width]
    errors = squares.mean(axis=2, where=is_row[:, None]).T
    moved = errors[1:].reshape(-1, PERMUTATIONS, len(rows)).mean(axis=1)
    shares = np.concatenate([errors[:1], (moved - errors[0]) / 2])
    # They are ratios, and the variance of all rows is 1: to first order a fold differs by its own variance too.
    variances = (scaled[rows[:, 0]] ** 2).mean(axis=1, where=is_row)
    shares -= shares.mean(axis=1, keepdims=True) * (variances - 1)
    return Explained(1 - shares[0], shares[1:])


def _with_others(fold: np.ndarray, count: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """The rows of a ``fold``, and in each permutation the rows whose values they get: ``[1 + permutations, width]``.

    These are drawn from all rows, and are never the rows themselves.
    """
    rows = np.zeros((1 + PERMUTATIONS, width), np.int32)
    rows[0, : len(fold)] = fold
    for row in rows[1:]:
        order, other = rng.permutation(count), np.zeros(count, np.int32)
        other[order] = np.roll(order, 1)
        row[: len(fold)] = other[fold]
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _predictions(
    categories: tuple[tuple[int, int], ...], key: Array, bins: Array, targets: Array, weights: Array, rows: Array
) -> jax.Array:
    """Predictions ``[fits, 1 + columns * permutations, width]`` by boostings of rows with ``weights [fits, rows]``.

    They are of the bins of ``rows[:, 0]``, then with each column from ``rows[:, 1]``, ``rows[:, 2]`` and so on.
    """
    booster = boosting(squared_error(), num_trees=NUM_TREES, categorical=dict(categories), **SETTINGS)

    def fit(given: tuple[Array, Array, Array]) -> Any:
        index, weight, rows = given
        batch = Batch({"bins": bins, "weight": weight}, targets, jnp.ones(len(targets)))
        fit_key = jax.random.fold_in(jax.random.key(key), index)
        params, model_state = booster.task.init(fit_key, batch)

        def add_tree(state: TrainState, _: None) -> tuple[TrainState, None]:
            return booster.step(state, batch)[0]._replace(step=state.step + 1), None

        state = TrainState(jnp.int32(0), params, model_state, (), fit_key)
        state, _ = jax.lax.scan(add_tree, state, length=NUM_TREES)
        known, others = bins[rows[0]], bins[rows[1:]]
        is_column = jnp.eye(bins.shape[1], dtype=bool)[:, None, None]
        moved = jnp.where(is_column, others, known)  # [columns, permutations, width, columns]
        tables = jnp.concatenate([known, moved.reshape(-1, bins.shape[1])])
        return booster.task.predict(state.params, state.model_state, tables).reshape(-1, rows.shape[1])

    found: jax.Array = jax.lax.map(fit, (jnp.arange(len(weights)), weights, rows))
    return found
