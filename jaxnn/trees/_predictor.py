"""Predictions from numbers, with their bins: one pure function, to be compiled and exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.trees._binning import MISSING, Bins
from jaxnn.trees._boosting import MAX_DEPTH, predict_scores
from jaxnn.trees._objectives import Objective
from jaxnn.types import Array


def predictor(
    bins: Bins, model: Mapping[str, Any], objective: Objective | None = None, *, max_depth: int = MAX_DEPTH
) -> Callable[[Array], Array]:
    """Returns a pure function from numbers ``[rows, columns]`` float32, NaN for missing ones, to predictions.

    They are those of `Run.predict` from the bins of `Bins.apply`, or of an estimator, bit for bit in float32. ``bins``
    are ``splits.train.bins``, and ``model`` is the model state of a run with its parameter ``start``; or ``bins_`` and
    ``state_`` of an estimator. With an ``objective`` its ``outputs`` are predicted, else scores ``[rows]``, or ``[rows,
    outputs]`` if several. A ``max_depth`` below the most, that of the trees, saves time.

    >>> inputs = np.array([[0.5, 1], [1.5, np.nan], [2.5, 3]])
    >>> model = jn.trees.GradientBoostingRegressor(num_trees=3, max_depth=1).fit(inputs, [1.0, 2.0, 4.0])
    >>> predict = jax.jit(jn.trees.predictor(model.bins_, model.state_))
    >>> bool((predict(inputs) == model.predict(inputs).astype(np.float32)).all())
    True
    """
    shape = len(bins.edges), 1 + max(map(len, bins.edges))
    bounds, known = np.full(shape, np.inf, np.float32), np.full(shape, np.nan, np.float32)
    for column, edges in enumerate(bins.edges):
        nearest = edges.astype(np.float32)
        # Rounded down: no float32 is between an edge and its bound, so that all of them stay in their bins.
        down = np.where(nearest > edges, np.nextafter(nearest, np.float32(-np.inf)), nearest)
        bounds[column, : len(edges)] = down
        known[column, : len(edges)] = np.where(nearest == edges, nearest, np.nan)
    is_category = np.isin(np.arange(len(bins.edges)), bins.categorical)
    # The start of an estimator is float64, as its targets may be far from 0: the most of it is added at the end.
    start = np.asarray(model["start"])
    far = start.astype(np.float32) if start.dtype == np.float64 else np.float32(0)
    trees = {**model, "start": (start - far).astype(np.float32)}

    def apply(values: Array, bounds: Array, known: Array, is_category: Array) -> jax.Array:
        at = jnp.searchsorted(bounds, values)
        is_missing = jnp.isnan(values) | (is_category & (known[at] != values))
        return jnp.where(is_missing, MISSING, at).astype(jnp.uint8)

    def predict(inputs: Array) -> Array:
        columns = jax.vmap(apply, (1, 0, 0, 0), 1)
        found = columns(jnp.asarray(inputs, jnp.float32), bounds, known, is_category)
        scores = predict_scores(trees, found, max_depth) + jnp.reshape(far, (1, -1))
        scores = scores[:, 0] if scores.shape[1] == 1 else scores
        return scores if objective is None else objective.outputs(scores)

    return predict
