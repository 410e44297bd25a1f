"""jaxnn: functional deep learning on JAX. An experiment is a value; transformations fill the machine."""

import importlib
import signal
import sys
import threading
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxnn import data as data
    from jaxnn import models as models
    from jaxnn import nn as nn
    from jaxnn import observe as observe
    from jaxnn import optim as optim
    from jaxnn import search as search
    from jaxnn import tasks as tasks
    from jaxnn.advice import advise as advise
    from jaxnn.advice import plan_batch_size as plan_batch_size
    from jaxnn.cli import main as main
    from jaxnn.engine import RunOptions as RunOptions
    from jaxnn.nn import Policy as Policy
    from jaxnn.optim import schedules as schedules
    from jaxnn.record import load as load
    from jaxnn.record import save as save
    from jaxnn.run import Run as Run
    from jaxnn.run import fit as fit
    from jaxnn.run import iterate as iterate
    from jaxnn.run import train as train
    from jaxnn.search import Points as Points
    from jaxnn.search import grid as grid
    from jaxnn.steps import init_train_state as init_train_state
    from jaxnn.steps import make_evaluate_step as make_evaluate_step
    from jaxnn.steps import make_train_step as make_train_step
    from jaxnn.sweeps import Member as Member
    from jaxnn.sweeps import Sweep as Sweep
    from jaxnn.sweeps import SweepOptions as SweepOptions
    from jaxnn.sweeps import compare as compare
    from jaxnn.sweeps import open_sweep as open_sweep
    from jaxnn.sweeps import sweep as sweep
    from jaxnn.types import Batch as Batch
    from jaxnn.types import ConfigError as ConfigError
    from jaxnn.types import DataError as DataError
    from jaxnn.types import Experiment as Experiment
    from jaxnn.types import JaxnnError as JaxnnError
    from jaxnn.types import RecordError as RecordError
    from jaxnn.types import Splits as Splits
    from jaxnn.types import Task as Task
    from jaxnn.types import TrainingError as TrainingError
    from jaxnn.types import TrainState as TrainState

__version__ = "0.1.0"

# The packages are imported when a name of theirs is first used: what a script does not use, it does not wait for.
_NAMES = {
    "": "data models nn observe optim search tasks",
    ".advice": "advise plan_batch_size",
    ".cli": "main",
    ".engine": "RunOptions",
    ".nn": "Policy",
    ".optim": "schedules",
    ".record": "load save",
    ".run": "Run fit iterate train",
    ".search": "Points grid",
    ".steps": "init_train_state make_evaluate_step make_train_step",
    ".sweeps": "Member Sweep SweepOptions compare open_sweep sweep",
    ".types": "Batch ConfigError DataError Experiment JaxnnError RecordError Splits Task TrainingError TrainState",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)  # noqa: PLE0605


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
    """Imports a module; SIGINT meanwhile ends a script with one line instead of pages of JAX's own imports.

    What a script imports before jaxnn, which may be JAX, is out of reach. Interactive sessions keep KeyboardInterrupt.
    """
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or "IPython" in sys.modules
    in_main_thread = threading.current_thread() is threading.main_thread()
    if interactive or not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return importlib.import_module(module)

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.stderr.write("interrupted while importing jaxnn\n")
        raise SystemExit(130)

    signal.signal(signal.SIGINT, leave)
    try:
        return importlib.import_module(module)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
