"""scikit-learn's own checks of the estimators."""

from collections.abc import Callable
from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from jaxnn import trees

pytestmark = [pytest.mark.slow]
ESTIMATORS = [
    one(num_trees=20, max_depth=3) for one in (trees.GradientBoostingRegressor, trees.GradientBoostingClassifier)
]
# Weights are not repetitions to a relative difference of 1e-7, which is a rounding in float32.
ROUNDED = {"check_sample_weight_equivalence_on_dense_data": "float32"}


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=lambda one: ROUNDED if one is ESTIMATORS[0] else {})
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)
