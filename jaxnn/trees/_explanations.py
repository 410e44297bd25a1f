"""What trees learned: importances of columns, and exact contributions to each prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
    columns, gains = (np.asarray(model["trees"][name]).reshape(-1) for name in ("column", "gain"))
    splits = columns >= 0
    weights = gains[splits] if kind == "gain" else np.ones(splits.sum())
    return np.bincount(columns[splits], weights, minlength=num_columns)


class Paths(NamedTuple):
    """The ways from a root to each of its leaves; a column that occurs several times is one condition."""

    column: Any  # ``[leaves, conditions]`` int32; -1 is none
    allowed: Any  # ``[leaves, conditions, 256]`` bool, the bins that go this way
    share: Any  # ``[leaves, conditions]`` float32, of the training rows' weight that goes this way
    value: Any  # ``[leaves]`` float32


def contributions(model: Mapping[str, Any], bins: Array) -> np.ndarray:
    """How much each column adds to each score: ``[rows, outputs, columns + 1]``, the last the mean; sums are scores.

    These are Shapley values of the trees' conditional expectations, exactly (Lundberg et al. 2020, TreeSHAP, "path
    dependent"). The time grows with the leaves times the square of the depth.

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
    for output in range(outputs):
        paths = [_paths({name: value[index, output] for name, value in trees.items()}) for index in range(number)]
        if not paths:
            continue
        leaves, depth = (max(path.column.shape[axis] for path in paths) for axis in (0, 1))
        padded = [_padded(path, leaves, max(1, depth)) for path in paths]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *padded)
        parts[:, output, :-1] += np.asarray(_shapley(stacked, jnp.asarray(bins)))
        parts[:, output, -1] += sum((path.share.prod(axis=1) * path.value).sum() for path in padded)
    return parts


def _paths(tree: Mapping[str, np.ndarray]) -> Paths:
    words = tree["left_bins"][:, :, None] >> np.arange(32, dtype=np.uint32)
    left_bins = (words & 1).astype(bool).reshape(len(words), 256)
    found: list[tuple[dict[int, tuple[np.ndarray, float]], float]] = []
    waiting: list[tuple[int, dict[int, tuple[np.ndarray, float]]]] = [(0, {})]
    while waiting:
        node, conditions = waiting.pop()
        column, left = int(tree["column"][node]), int(tree["left"][node])
        if column < 0:
            found.append((conditions, float(tree["value"][node])))
            continue
        for child, way in ((left, left_bins[node]), (left + 1, ~left_bins[node])):
            allowed, share = conditions.get(column, (np.ones(256, bool), 1.0))
            share *= float(tree["weight"][child] / tree["weight"][node])
            waiting.append((child, {**conditions, column: (allowed & way, share)}))
    depth = max(len(conditions) for conditions, _ in found)
    columns, shares = np.full((len(found), depth), -1, np.int32), np.ones((len(found), depth), np.float32)
    allowed = np.ones((len(found), depth, 256), bool)
    for leaf, (conditions, _) in enumerate(found):
        for place, (column, (bins, share)) in enumerate(conditions.items()):
            columns[leaf, place], allowed[leaf, place], shares[leaf, place] = column, bins, share
    return Paths(columns, allowed, shares, np.array([value for _, value in found], np.float32))


def _padded(paths: Paths, leaves: int, depth: int) -> Paths:
    more, deeper = leaves - paths.column.shape[0], depth - paths.column.shape[1]
    return Paths(
        np.pad(paths.column, ((0, more), (0, deeper)), constant_values=-1),
        np.pad(paths.allowed, ((0, more), (0, deeper), (0, 0)), constant_values=True),
        np.pad(paths.share, ((0, more), (0, deeper)), constant_values=1.0),
        np.pad(paths.value, (0, more)),
    )


@jax.jit
def _shapley(paths: Paths, bins: jax.Array) -> jax.Array:
    """The sum of contributions ``[rows, columns]`` over ``paths [trees, leaves, ...]``."""
    depth = paths.column.shape[2]
    # Of a set of k of the other m - 1 columns: k! (m - k - 1)! / m!, for each number m of columns.
    weights = np.zeros((depth + 1, depth))
    for m in range(1, depth + 1):
        for k in range(m):
            weights[m, k] = math.factorial(k) * math.factorial(m - k - 1) / math.factorial(m)

    def of_tree(total: jax.Array, tree: Paths) -> tuple[jax.Array, None]:
        def of_leaf(total: jax.Array, leaf: Paths) -> tuple[jax.Array, None]:
            seen = bins[:, jnp.maximum(leaf.column, 0)].astype(jnp.int32)
            follows = leaf.allowed[jnp.arange(depth)[None], seen].astype(jnp.float32)  # [rows, conditions]
            real = leaf.column >= 0
            by_size = jnp.asarray(weights, jnp.float32)[real.sum()]
            added = []
            for one in range(depth):
                # Sums over sets of the others, by their size: coefficients of a product of linear factors.
                sums = [jnp.ones(bins.shape[0])] + [jnp.zeros(bins.shape[0])] * (depth - 1)
                for other in range(depth):
                    if other != one:
                        with_it = jnp.where(real[other], follows[:, other], 0.0)
                        shifted = [jnp.zeros(bins.shape[0]), *sums[:-1]]
                        sums = [leaf.share[other] * a + with_it * b for a, b in zip(sums, shifted, strict=True)]
                share = sum(by_size[size] * each for size, each in enumerate(sums))
                added.append(jnp.where(real[one], leaf.value * (follows[:, one] - leaf.share[one]), 0.0) * share)
            columns = jnp.where(real, leaf.column, bins.shape[1])
            return total.at[:, columns].add(jnp.stack(added, axis=1)), None

        return jax.lax.scan(of_leaf, total, tree)

    return jax.lax.scan(of_tree, jnp.zeros(bins.shape), paths)[0]
