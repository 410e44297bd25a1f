"""What a model is trained for: a model and a loss become a :class:`jaxnn.types.Task`."""

from jaxnn.tasks.adapter import Model, as_model
from jaxnn.tasks.binary_classification import binary_classification
from jaxnn.tasks.classification import classification
from jaxnn.tasks.contract import averaged_over, checked, checked_batch, derived_metrics
from jaxnn.tasks.next_token import next_token
from jaxnn.tasks.regression import regression
from jaxnn.tasks.supervised import supervised

__all__ = [
    "Model",
    "as_model",
    "averaged_over",
    "binary_classification",
    "checked",
    "checked_batch",
    "classification",
    "derived_metrics",
    "next_token",
    "regression",
    "supervised",
]
