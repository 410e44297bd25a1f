"""What trees learned: importances of columns, and exact contributions to each prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.trees._boosting import MAX_DEPTH
from jaxnn.types import Array, DataError


def importances(model: Mapping[str, Any], num_columns: int, kind: Literal["gain", "splits"] = "gain") -> np.ndarray:
    """The importance ``[columns]`` of each column: the sum of its splits' gains, or their number.

    ``model`` is the model state of a run, or ``state_`` of an estimator. What a column is worth for new examples, tells
    `sklearn.inspection.permutation_importance` of an estimator.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=5, max_depth=2)
    >>> model = model.fit(np.eye(4)[np.arange(40) % 4], np.arange(40) % 4 == 2)
    >>> jn.trees.importances(model.state_, 4).argmax()
    np.int64(2)
    """
    grown = slice(int(model["num_trees"]))
    columns, gains = (np.asarray(model["trees"][name])[grown].reshape(-1) for name in ("column", "gain"))
    splits = columns >= 0
    weights = gains[splits] if kind == "gain" else np.ones(splits.sum())
    return np.bincount(columns[splits], weights, minlength=num_columns)


def contributions(model: Mapping[str, Any], bins: Array) -> np.ndarray:
    """How much each column adds to each score: ``[rows, outputs, columns + 1]``, the last the mean; sums are scores.

    These are Shapley values of the trees' conditional expectations, exactly (Lundberg et al. 2020, TreeSHAP, "path
    dependent"). The time grows with the number of leaves.

    Args:
        model: the model state of a run with its parameter ``start``, or ``state_`` of an estimator.
        bins: ``[rows, columns]`` uint8, from `Bins.apply`.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=3, max_depth=2)
    >>> inputs = np.random.default_rng(0).normal(size=(50, 2))
    >>> parts = jn.trees.contributions(model.fit(inputs, inputs[:, 0]).state_, model.bins_.apply(inputs))
    >>> parts.shape, bool(np.allclose(parts[:, 0].sum(axis=1), model.predict(inputs), atol=1e-5))
    ((50, 1, 3), True)
    """
    if np.asarray(bins).dtype != np.uint8:
        raise DataError("contributions are of bins: pass model.bins_.apply(inputs).")
    trees = {name: np.asarray(value) for name, value in model["trees"].items()}
    number, outputs = int(model["num_trees"]), trees["column"].shape[1]
    parts = np.zeros((bins.shape[0], outputs, bins.shape[1] + 1))
    parts[:, :, -1] = np.asarray(model["start"])
    for output in range(outputs if number else 0):
        found = [_paths({name: value[index, output] for name, value in trees.items()}) for index in range(number)]
        paths = jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
        depth = max(1, (paths["column"] >= 0).any(axis=0).sum())
        paths |= {name: paths[name][:, :depth] for name in ("column", "bins", "share")}
        parts[:, output, :-1] += np.asarray(_shapley(paths, jnp.asarray(bins).T))
        parts[:, output, -1] += (paths["share"].prod(axis=1) * paths["value"]).sum()
    return parts


def _paths(tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The conditions of each leaf, one for a column: its number or -1, the bits of its bins, and its share of rows."""
    shape = len(tree["column"]), MAX_DEPTH
    columns, shares = np.full(shape, -1, np.int32), np.ones(shape, np.float32)
    bins = np.full((*shape, 8), 2**32 - 1, np.uint32)
    for node in np.flatnonzero(tree["column"] >= 0):  # parents come before their children
        column, left, left_bins = (tree[name][node] for name in ("column", "left", "left_bins"))
        at = np.argmax(np.isin(columns[node], (column, -1)))  # the column's condition, or the first free place
        for child, way in ((left, left_bins), (left + 1, ~left_bins)):
            for each in (columns, bins, shares):
                each[child] = each[node]
            columns[child, at] = column
            bins[child, at] &= way
            shares[child, at] *= tree["weight"][child] / tree["weight"][node]
    leaves = (tree["column"] < 0) & (tree["value"] != 0)  # unused nodes have none
    found = {"column": columns, "bins": bins, "share": shares, "value": tree["value"]}
    return {name: each[leaves] for name, each in found.items()}


@jax.jit
def _shapley(paths: Any, bins: jax.Array) -> jax.Array:
    """The sum of contributions ``[rows, columns]`` over ``paths [leaves, ...]``, of ``bins [columns, rows]``.

    A leaf adds its value times the product of its conditions, of which ``t`` are known: averaged over all ``t`` in 0…1,
    without the column's own, that is the Shapley value (Yu et al. 2022, "Linear TreeSHAP"). Gauss' quadrature of the
    polynomial is exact.
    """
    points, sizes = np.polynomial.legendre.leggauss(-(-paths["column"].shape[1] // 2))
    known, weights = (each[:, None, None].astype(np.float32) / 2 for each in (points + 1, sizes))

    def of_leaf(total: jax.Array, leaf: Any) -> tuple[jax.Array, None]:
        seen = bins[leaf["column"]].astype(jnp.uint32)  # [conditions, rows]
        words = jnp.take_along_axis(leaf["bins"], seen >> 5, axis=1)
        follows = ((words >> (seen & 31)) & 1).astype(jnp.float32)
        share = leaf["share"][:, None]
        factors = (1 - known) * share[None] + known * follows[None]  # [points, conditions, rows], never 0
        others = (weights * factors.prod(axis=1, keepdims=True) / factors).sum(axis=0)
        return total.at[leaf["column"]].add(leaf["value"] * (follows - share) * others), None

    return jax.lax.scan(of_leaf, jnp.zeros(bins.shape), paths)[0].T
