"""Tasks: a model and a loss become a `jaxnn.types.Task`."""

from jaxnn.tasks._classification import binary_classification, classification, next_token
from jaxnn.tasks._contract import averaged_over, by_rows, checked, derived_metrics, metric_of_outputs, own_step, sharded
from jaxnn.tasks._directions import check_direction, direction_of
from jaxnn.tasks._models import as_model
from jaxnn.tasks._parameters import freeze, lora, merge_lora
from jaxnn.tasks._supervised import regression, supervised

__all__ = [
    "as_model",
    "averaged_over",
    "binary_classification",
    "classification",
    "direction_of",
    "freeze",
    "lora",
    "merge_lora",
    "next_token",
    "regression",
    "supervised",
]
