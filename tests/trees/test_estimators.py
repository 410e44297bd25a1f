"""scikit-learn's own checks of the estimators."""

from typing import Any

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from jaxnn import trees

pytestmark = [pytest.mark.slow]
# Each shape of inputs is a program, so the trees are small.
SETTINGS: dict[str, Any] = {"num_trees": 5, "max_depth": 2, "learning_rate": 0.5}
# What these check is code that both estimators share, from weights to attributes; the regressor has only its own
# targets besides. Nor are weights repetitions to its 1e-7 relative difference, which is a rounding in float32.
OF_SHARED_CODE = {
    "check_sample_weights_pandas_series",
    "check_sample_weights_shape",
    "check_sample_weights_not_overwritten",
    "check_sample_weight_equivalence_on_dense_data",
    "check_n_features_in_after_fitting",
    "check_positive_only_tag_during_fit",
    "check_f_contiguous_array_estimator",
    "check_methods_subset_invariance",
    "check_fit_idempotent",
    "check_fit_check_is_fitted",
    "check_n_features_in",
}
CHECKS = [
    pytest.param(estimator, check, id=f"{type(estimator).__name__}-{check.func.__name__}")
    for kind in (trees.GradientBoostingRegressor, trees.GradientBoostingClassifier)
    for estimator, check in estimator_checks_generator(kind(**SETTINGS))
    if kind is trees.GradientBoostingClassifier or check.func.__name__ not in OF_SHARED_CODE
]


@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)
