"""The front end for one run: ``fit``, ``iterate`` and ``train``, what they print, and the `Run` they return."""

from jaxnn.run._display import Display, open_display
from jaxnn.run._export import export_function
from jaxnn.run._fit import fit, iterate, train
from jaxnn.run._model_summary import ModelSummary, model_summary
from jaxnn.run._record import file_name_of
from jaxnn.run._report import NAME_WIDTH, device_rows, format_rate, format_split, speed_hint
from jaxnn.run._resume import KEPT_OPTIONS, check_same_config, recorded_setup, with_recorded
from jaxnn.run._run import Run, open_run
from jaxnn.run._signals import RESUMABLE, SIGNALS, Interruption, interruptible, leave
from jaxnn.run._watchdog import Watch, watching

__all__ = ["Run", "fit", "iterate", "model_summary", "open_run", "train"]
