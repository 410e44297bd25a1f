"""jaxnn: functional deep learning on JAX. An experiment is a value; transformations fill the machine."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxnn import data, models, nn, observe, optim, search, steps, tasks, testing, trees
    from jaxnn.advice import advise
    from jaxnn.cli import main, text_command
    from jaxnn.decisions import decide, spread
    from jaxnn.engine import RunOptions
    from jaxnn.optim import schedules
    from jaxnn.plans import plan
    from jaxnn.proof import autopsy, diff, replay, verify
    from jaxnn.record import load_checkpoint, load_weights, save_checkpoint, save_weights
    from jaxnn.run import Run, fit, iterate, model_summary, open_run, train
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
    "autopsy",
    "compare",
    "data",
    "decide",
    "diff",
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
    "replay",
    "save_checkpoint",
    "save_weights",
    "schedules",
    "search",
    "spread",
    "steps",
    "sweep",
    "tasks",
    "testing",
    "text_command",
    "train",
    "trees",
    "verify",
]

# The packages are imported when a name of theirs is first used: what a script does not use, it does not wait for.
_NAMES = {
    "": "data models nn observe optim search steps tasks testing trees",
    ".advice": "advise",
    ".cli": "main text_command",
    ".decisions": "decide spread",
    ".engine": "RunOptions",
    ".optim": "schedules",
    ".plans": "plan",
    ".proof": "autopsy diff replay verify",
    ".record": "load_checkpoint load_weights save_checkpoint save_weights",
    ".run": "Run fit iterate model_summary open_run train",
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
        return importlib.import_module(f"jaxnn.{name}")
    value = getattr(importlib.import_module(f"jaxnn{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
