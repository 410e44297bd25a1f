"""Pictures of trees and of what columns are worth."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxnn.record import new_figure, new_panels
from jaxnn.trees._binning import MISSING, Bins
from jaxnn.trees._explanations import importances
from jaxnn.types import ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    edges, words = bins.edges[column], tree["left_bins"][node][:, None] >> np.arange(32, dtype=np.uint32)
    goes_left = (words & 1).astype(bool).reshape(-1)
    number = int(goes_left[: len(edges) + 1].sum())
    if column in bins.categorical:
        found = ", ".join(f"{category:g}" for category in edges[goes_left[: len(edges)]])
        text = f"in {{{textwrap.shorten(found, 30, placeholder=' …')}}}"
    elif number > len(edges):
        return f"{labels[column]} is not missing"
    else:
        text = f"≤ {edges[number - 1]:.5g}"
    return f"{labels[column]} {text}\nmissing {'left' if goes_left[MISSING] else 'right'}"


def _labels(names: Sequence[str] | None, count: int) -> Sequence[str]:
    if names is not None and len(names) < count:
        raise DataError(f"there are {len(names)} names, and {count} columns.")
    return [f"column {column}" for column in range(count)] if names is None else names
