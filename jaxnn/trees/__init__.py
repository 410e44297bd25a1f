"""Gradient-boosted decision trees as pure functions: compiled, swept and sharded as networks are."""

from jaxnn.trees._binning import Bins, binned, learn_bins
from jaxnn.trees._boosting import Boosting, boosting, experiment, predict_scores
from jaxnn.trees._objectives import (
    Objective,
    absolute_error,
    cross_entropy,
    huber,
    poisson,
    quantile_error,
    squared_error,
)

__all__ = [
    "Bins", "Boosting", "Objective", "absolute_error", "binned", "boosting", "cross_entropy", "experiment", "huber",
    "learn_bins", "poisson", "predict_scores", "quantile_error", "squared_error",
]  # fmt: skip
