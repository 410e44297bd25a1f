"""Networks with scikit-learn's interface; those of trees are in `jaxnn.trees`."""

from jaxnn.run import NetworkClassifier, NetworkRegressor

__all__ = ["NetworkClassifier", "NetworkRegressor"]
