"""What trees learned: importances of columns, exact contributions to each prediction, and pictures of both."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn._figures import new_figure, new_panels
from jaxnn.data import Bins
from jaxnn.trees._splits import MAX_DEPTH
from jaxnn.types import Array, ConfigError, DataError, TrainState, check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Fitted(NamedTuple):
    """What pictures show of a model."""

    state: Mapping[str, Any]
    bins: Bins | None = None
    names: Sequence[str] | None = None  # of the columns
    classes: Sequence[Any] = ()
    categories: Mapping[int, Sequence[str]] = {}  # of a column, by the number of the category less 1


def _fitted(model: Any) -> _Fitted:
    """What is known of a `Run`, an estimator, or a state, which has no names; else a ConfigError."""
    if isinstance(model, Mapping):
        return _Fitted(model)
    if isinstance(state := getattr(model, "state", None), TrainState) and "trees" in state.model_state:
        known = {**state.params, **state.model_state}
        if model.experiment is None:  # of a record that was opened alone
            return _Fitted(known)
        splits: Any = model.experiment.data(model.experiment.config)
        bins, columns = splits.train.bins, splits.train.columns
        if columns is None:
            return _Fitted(known, bins, None, splits.class_names)
        categories = dict(zip(bins.categorical, columns.categories.values(), strict=True))
        return _Fitted(known, bins, columns.names, splits.class_names, categories)
    if hasattr(model, "state_"):
        of_frame = getattr(model, "feature_names_in_", None)
        return _Fitted(model.state_, model.bins_, of_frame, getattr(model, "classes_", ()))
    what = "a run of trees, a fitted estimator of trees or its state_"
    raise ConfigError(f"the model must be {what}, not {type(model).__name__}: train it first.")


def importances(model: Any, num_columns: int | None = None, kind: Literal["gain", "splits"] = "gain") -> np.ndarray:
    """The importance ``[columns]`` of each column: the sum of its splits' gains, or their number.

    ``model`` is a run, a fitted estimator, or the state of one, which does not know ``num_columns``: then the columns
    are those up to the last that splits. What columns are worth for new examples: `permutation_importances`, or
    `sklearn.inspection.permutation_importance` of an estimator.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=5, max_depth=2)
    >>> model = model.fit(np.eye(4)[np.arange(40) % 4], np.arange(40) % 4 == 2)
    >>> jn.trees.importances(model).argmax()
    np.int64(2)
    """
    model, bins, *_ = _fitted(model)
    if num_columns is None:
        num_columns = 1 + int(np.max(model["trees"]["column"])) if bins is None else len(bins.edges)
    grown = slice(int(model["num_trees"]))
    columns, gains = (np.asarray(model["trees"][name])[grown].reshape(-1) for name in ("column", "gain"))
    splits = columns >= 0
    weights = gains[splits] if kind == "gain" else np.ones(splits.sum())
    return np.bincount(columns[splits], weights, minlength=num_columns)


def contributions(model: Any, bins: Array) -> np.ndarray:
    """How much each column adds to each score: ``[rows, outputs, columns + 1]``, the last the mean; sums are scores.

    These are Shapley values of the trees' conditional expectations, exactly (Lundberg et al. 2020, TreeSHAP, "path
    dependent"). The time grows with the number of leaves.

    Args:
        model: a run, a fitted estimator, or the model state of a run with its parameter ``start``.
        bins: ``[rows, columns]`` uint8, from `Bins.apply`.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=3, max_depth=2)
    >>> inputs = np.random.default_rng(0).normal(size=(50, 2))
    >>> parts = jn.trees.contributions(model.fit(inputs, inputs[:, 0]).state_, model.bins_.apply(inputs))
    >>> parts.shape, bool(np.allclose(parts[:, 0].sum(axis=1), model.predict(inputs), atol=1e-5))
    ((50, 1, 3), True)
    """
    if np.asarray(bins).dtype != np.uint8:
        raise DataError("contributions are of bins: pass model.bins_.apply(inputs).")
    model = _fitted(model).state
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
    model: Any, names: Sequence[str] | None = None, kind: Literal["gain", "splits"] = "gain"
) -> Figure:
    """Draws the `importances` of the columns in per cent of all, of at most the 30 largest.

    ``model`` is a run, a fitted estimator, or the state of one. ``names`` of the columns are by default those of the
    run's table, or of the estimator's data frame.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=2, max_depth=1).fit(np.eye(9), np.arange(9))
    >>> jn.trees.plot_importances(model).savefig("importances.png")
    """
    fitted = _fitted(model)
    values = importances(fitted.state, None if fitted.bins is None else len(fitted.bins.edges), kind)
    labels = _labels(fitted.names if names is None else names, len(values))
    values = 100 * values / (values.sum() or 1.0)
    order = np.argsort(values)[-30:]
    figure, (axes,) = new_panels(1)
    figure.set_figheight(1 + 0.25 * len(order))
    axes.barh(np.arange(len(order)), values[order])
    axes.set_yticks(np.arange(len(order)), [labels[column] for column in order])
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("share of the gain of all splits, %" if kind == "gain" else "share of all splits, %")
    return figure


def plot_tree(
    model: Any,
    bins: Bins | None = None,
    index: int = 0,
    output: int = 0,
    names: Sequence[str] | None = None,
    *,
    max_depth: int | None = 3,
) -> Figure:
    """Draws tree ``index`` of a score: conditions in the units of the inputs, and what leaves add to the score.

    Rows that meet a condition go left, missing values where it says. A weight is a sum of Hessians: of the squared
    error, the number of rows.

    Args:
        model: a run, a fitted estimator, or the state of one.
        bins: those of the inputs; default: the model's, which a state lacks.
        index: the number of the tree.
        output: the number of the score, of a class if there are several.
        names: of the columns; default: those of the run's table, or of the estimator's data frame.
        max_depth: levels of conditions that are drawn; below stands the number of leaves. None: all.

    Raises:
        ConfigError: the tree was not grown, or the bins are missing.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=2, max_depth=1).fit(np.eye(9), np.arange(9))
    >>> jn.trees.plot_tree(model, index=1).savefig("tree.png")
    """
    fitted = _fitted(model)
    model, bins = fitted.state, fitted.bins if bins is None else bins
    if bins is None:
        raise ConfigError("a state does not know its bins: pass splits.train.bins, or the run with its experiment.")
    if max_depth is not None:
        check_int("plot_tree: max_depth", max_depth)
    fitted = fitted._replace(bins=bins, names=_labels(fitted.names if names is None else names, len(bins.edges)))
    number, outputs = int(model["num_trees"]), np.shape(model["trees"]["column"])[1]
    if not (0 <= index < number and 0 <= output < outputs):
        raise ConfigError(f"there is no tree {index} of output {output}: the model has {number} for each of {outputs}.")
    tree = {name: np.asarray(value)[index, output] for name, value in model["trees"].items()}
    figure = new_figure(layout="constrained")
    axes = figure.add_subplot()
    if len(fitted.classes):  # the one score of two classes is the second's
        axes.set_title(f"tree {index}, score of {fitted.classes[output if outputs > 1 else 1]}")
    _draw_tree(axes, tree, fitted, len(tree["column"]) if max_depth is None else max_depth)
    return figure


def _draw_tree(axes: Any, tree: Mapping[str, np.ndarray], fitted: _Fitted, max_depth: int) -> None:
    leaves: list[int] = []  # the level of each, from the left

    def num_leaves(node: int) -> int:
        return 1 if tree["column"][node] < 0 else sum(num_leaves(tree["left"][node] + side) for side in range(2))

    def draw(node: int, level: int) -> float:
        """Draws the subtree of ``node`` and returns its place from the left."""
        place, text, colour = float(len(leaves)), f"{tree['value'][node]:.4g}", "lavender"
        if tree["column"][node] < 0:
            leaves.append(level)
        elif level == max_depth:
            leaves.append(level)
            text, colour = f"… {num_leaves(node)} leaves", "white"
        else:
            places = [draw(tree["left"][node] + side, level + 1) for side in range(2)]
            place, text, colour = sum(places) / 2, _condition(tree, node, fitted), "white"
            axes.plot([places[0], place, places[1]], [level + 1, level, level + 1], c="0.7", zorder=0)
        box = {"boxstyle": "round", "fc": colour, "ec": "0.5"}
        text += f"\nweight {tree['weight'][node]:.6g}"
        axes.text(place, level, text, ha="center", va="center", fontsize="x-small", bbox=box)
        return place

    draw(0, 0)
    axes.set(xlim=(-0.6, len(leaves) - 0.4), ylim=(max(leaves) + 0.5, -0.5))
    axes.axis("off")
    axes.figure.set_size_inches(max(4, 1.3 * len(leaves)), 1 + max(leaves))


def _condition(tree: Mapping[str, np.ndarray], node: int, fitted: _Fitted) -> str:
    """The condition of the rows that go left."""
    column, bins, labels = int(tree["column"][node]), fitted.bins, fitted.names
    assert bins is not None and labels is not None
    edges, texts = bins.edges[column], fitted.categories.get(column)
    goes_left = np.unpackbits(tree["left_bins"][node].astype("<u4").view(np.uint8), bitorder="little").astype(bool)
    number = int(goes_left[: len(edges) + 1].sum())
    if column in bins.categorical:
        chosen = edges[goes_left[: len(edges)]]
        found = ", ".join(f"{one:g}" if texts is None else str(texts[int(one) - 1]) for one in chosen)
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
