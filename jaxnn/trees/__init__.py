"""Gradient-boosted decision trees as pure functions: compiled, swept and sharded as networks are."""

from typing import TYPE_CHECKING, Any

from jaxnn.trees._boosting import Boosting, boosting, experiment, predictor
from jaxnn.trees._explanations import contributions, importances, plot_importances, plot_tree
from jaxnn.trees._objectives import (
    Objective,
    absolute_error,
    cross_entropy,
    huber,
    lambda_rank,
    poisson,
    quantile_error,
    squared_error,
)
from jaxnn.trees._permutation import Explained, permutation_importances

if TYPE_CHECKING:
    from jaxnn.trees._estimators import GradientBoostingClassifier, GradientBoostingRegressor

__all__ = [
    "Boosting",
    "Explained",
    "GradientBoostingClassifier",
    "GradientBoostingRegressor",
    "Objective",
    "absolute_error",
    "boosting",
    "contributions",
    "cross_entropy",
    "experiment",
    "huber",
    "importances",
    "lambda_rank",
    "permutation_importances",
    "plot_importances",
    "plot_tree",
    "poisson",
    "predictor",
    "quantile_error",
    "squared_error",
]


def __getattr__(name: str) -> Any:
    if name not in ("GradientBoostingClassifier", "GradientBoostingRegressor"):
        raise AttributeError(f"module 'jaxnn.trees' has no attribute {name!r}")
    from jaxnn.trees import _estimators  # scikit-learn is slow to import

    return getattr(_estimators, name)
