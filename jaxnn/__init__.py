"""jaxnn: functional deep learning on JAX. An experiment is a value; transformations fill the machine."""

import importlib
import signal
import sys
import threading
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxnn import data, models, nn, observe, optim, search, steps, tasks, testing, trees
    from jaxnn.advice import advise
    from jaxnn.cli import main, text_command
    from jaxnn.engine import RunOptions
    from jaxnn.optim import schedules
    from jaxnn.plans import plan
    from jaxnn.record import load_checkpoint, load_weights, save_checkpoint, save_weights
    from jaxnn.run import NetworkClassifier, NetworkRegressor, Run, fit, iterate, model_summary, open_run, train
    from jaxnn.search import grid
    from jaxnn.sweeps import Sweep, SweepOptions, compare, open_sweep, sweep
    from jaxnn.types import (
        Batch,
        ConfigError,
        DataError,
        Experiment,
        JaxnnError,
        RecordError,
        Splits,
        Task,
        TrainingError,
        TrainState,
    )

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "ConfigError",
    "DataError",
    "Experiment",
    "JaxnnError",
    "NetworkClassifier",
    "NetworkRegressor",
    "RecordError",
    "Run",
    "RunOptions",
    "Splits",
    "Sweep",
    "SweepOptions",
    "Task",
    "TrainState",
    "TrainingError",
    "advise",
    "compare",
    "data",
    "fit",
    "grid",
    "iterate",
    "load_checkpoint",
    "load_weights",
    "main",
    "model_summary",
    "models",
    "nn",
    "observe",
    "open_run",
    "open_sweep",
    "optim",
    "plan",
    "save_checkpoint",
    "save_weights",
    "schedules",
    "search",
    "steps",
    "sweep",
    "tasks",
    "testing",
    "text_command",
    "train",
    "trees",
]

# The packages are imported when a name of theirs is first used: what a script does not use, it does not wait for.
_NAMES = {
    "": "data models nn observe optim search steps tasks testing trees",
    ".advice": "advise",
    ".cli": "main text_command",
    ".engine": "RunOptions",
    ".optim": "schedules",
    ".plans": "plan",
    ".record": "load_checkpoint load_weights save_checkpoint save_weights",
    ".run": "NetworkClassifier NetworkRegressor Run fit iterate model_summary open_run train",
    ".search": "grid",
    ".sweeps": "Sweep SweepOptions compare open_sweep sweep",
    ".types": "Batch ConfigError DataError Experiment JaxnnError RecordError Splits Task TrainingError TrainState",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxnn' has no attribute {name!r}")
    module = _HOMES[name]
    if not module:
        return _import(f"jaxnn.{name}")
    value = getattr(_import(f"jaxnn{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _import(module: str) -> ModuleType:
    """Imports a module; SIGINT meanwhile ends a script with one line instead of a long traceback of JAX's imports.

    What a script imports before jaxnn, which may be JAX, is out of reach. Interactive sessions keep KeyboardInterrupt.
    """
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or "IPython" in sys.modules
    in_main_thread = threading.current_thread() is threading.main_thread()
    if interactive or not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return importlib.import_module(module)

    interrupted = False

    def leave(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            sys.stderr.write("interrupted while importing jaxnn\n")
        interrupted = True
        raise SystemExit(130)

    signal.signal(signal.SIGINT, leave)
    try:
        return importlib.import_module(module)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:  # Python drops an exception that is raised in a callback of the garbage collector
            raise SystemExit(130)
