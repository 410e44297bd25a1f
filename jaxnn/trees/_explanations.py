"""What trees learned: importances of columns, exact contributions to each prediction, and pictures of both."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data import Bins
from jaxnn.record import new_figure, new_panels
from jaxnn.trees._boosting import MAX_DEPTH
from jaxnn.types import Array, ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def plot_importances(
    model: Mapping[str, Any], names: Sequence[str] | None = None, kind: Literal["gain", "splits"] = "gain"
) -> Figure:
    """Draws the `importances` of the columns, called ``names``, of at most the 30 largest.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=2, max_depth=1).fit(np.eye(9), np.arange(9))
    >>> jn.trees.plot_importances(model.state_).savefig("importances.png")
    """
    labels = _labels(names, 1 + int(np.max(model["trees"]["column"])))
    values = importances(model, len(labels), kind)
    order = np.argsort(values)[-30:]
    figure, (axes,) = new_panels(1)
    figure.set_figheight(1 + 0.25 * len(order))
    axes.barh(np.arange(len(order)), values[order])
    axes.set_yticks(np.arange(len(order)), [labels[column] for column in order])
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("gain of all splits" if kind == "gain" else "number of splits")
    return figure


def plot_tree(
    model: Mapping[str, Any], bins: Bins, index: int = 0, output: int = 0, names: Sequence[str] | None = None
) -> Figure:
    """Draws tree ``index`` of a score: conditions in the units of the inputs, and what leaves add to the score.

    Rows that meet a condition go left, missing values where it says. A weight is a sum of Hessians: of the squared
    error, the number of rows. ``model`` is the model state of a run, or ``state_`` of an estimator, and ``bins`` are
    those of its inputs. ConfigError for a tree that was not grown.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=2, max_depth=1).fit(np.eye(9), np.arange(9))
    >>> jn.trees.plot_tree(model.state_, model.bins_, index=1).savefig("tree.png")
    """
    labels = _labels(names, len(bins.edges))
    number, outputs = int(model["num_trees"]), np.shape(model["trees"]["column"])[1]
    if not (0 <= index < number and 0 <= output < outputs):
        raise ConfigError(f"there is no tree {index} of output {output}: the model has {number} for each of {outputs}.")
    tree = {name: np.asarray(value)[index, output] for name, value in model["trees"].items()}
    figure = new_figure(layout="constrained")
    axes = figure.add_subplot()
    leaves: list[int] = []

    def draw(node: int, level: int) -> float:
        """Draws the subtree of ``node`` and returns its place from the left."""
        place, text, colour = float(len(leaves)), f"{tree['value'][node]:.4g}", "lavender"
        if tree["column"][node] < 0:
            leaves.append(level)
        else:
            places = [draw(tree["left"][node] + side, level + 1) for side in range(2)]
            place, text, colour = sum(places) / 2, _condition(tree, node, bins, labels), "white"
            axes.plot([places[0], place, places[1]], [level + 1, level, level + 1], c="0.7", zorder=0)
        box = {"boxstyle": "round", "fc": colour, "ec": "0.5"}
        text += f"\nweight {tree['weight'][node]:.6g}"
        axes.text(place, level, text, ha="center", va="center", fontsize="x-small", bbox=box)
        return place

    draw(0, 0)
    axes.set(xlim=(-0.6, len(leaves) - 0.4), ylim=(max(leaves) + 0.5, -0.5))
    axes.axis("off")
    figure.set_size_inches(max(4, 1.3 * len(leaves)), 1 + max(leaves))
    return figure


def _condition(tree: Mapping[str, np.ndarray], node: int, bins: Bins, labels: Sequence[str]) -> str:
    """The condition of the rows that go left."""
    column = int(tree["column"][node])
    edges = bins.edges[column]
    goes_left = np.unpackbits(tree["left_bins"][node].astype("<u4").view(np.uint8), bitorder="little").astype(bool)
    number = int(goes_left[: len(edges) + 1].sum())
    if column in bins.categorical:
        found = ", ".join(f"{category:g}" for category in edges[goes_left[: len(edges)]])
        text = f"in {{{textwrap.shorten(found, 30, placeholder=' …')}}}"
    elif number > len(edges):
        return f"{labels[column]} is not missing"
    else:
        text = f"≤ {edges[number - 1]:.5g}"
    return f"{labels[column]} {text}\nmissing {'left' if goes_left[bins.missing] else 'right'}"


def _labels(names: Sequence[str] | None, count: int) -> Sequence[str]:
    if names is not None and len(names) < count:
        raise DataError(f"there are {len(names)} names, and {count} columns.")
    return [f"column {column}" for column in range(count)] if names is None else names
