"""The front end for one run: ``fit``, ``iterate`` and ``train``, what they print, and the `Run` they return."""

from typing import TYPE_CHECKING, Any

from jaxnn.run._display import Display
from jaxnn.run._export import export_function
from jaxnn.run._fit import fit, iterate, train
from jaxnn.run._model_summary import ModelSummary, model_summary
from jaxnn.run._report import speed_hint
from jaxnn.run._resume import continued_names, continued_options
from jaxnn.run._run import Run, open_run
from jaxnn.run._watchdog import Watch, watching

if TYPE_CHECKING:
    from jaxnn.run._network_estimators import Estimator, LabelEstimator, NetworkClassifier, NetworkRegressor, with_hints

__all__ = ["NetworkClassifier", "NetworkRegressor", "Run", "fit", "iterate", "model_summary", "open_run", "train"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'jaxnn.run' has no attribute {name!r}")
    from jaxnn.run import _network_estimators  # scikit-learn is slow to import

    return getattr(_network_estimators, name)
