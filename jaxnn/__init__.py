"""jaxnn: functional deep learning on JAX. An experiment is a value; transformations fill the machine."""

from jaxnn import _importing
from jaxnn import data as data
from jaxnn import models as models
from jaxnn import nn as nn
from jaxnn import observe as observe
from jaxnn import optim as optim
from jaxnn import tasks as tasks
from jaxnn.advice import Advice as Advice
from jaxnn.advice import advise as advise
from jaxnn.advice import plan_batch_size as plan_batch_size
from jaxnn.cli import main as main
from jaxnn.engine import RunOptions as RunOptions
from jaxnn.nn import Policy as Policy
from jaxnn.optim import schedules as schedules
from jaxnn.record import MetricWriter as MetricWriter
from jaxnn.record import load as load
from jaxnn.record import save as save
from jaxnn.run import Report as Report
from jaxnn.run import Run as Run
from jaxnn.run import fit as fit
from jaxnn.run import iterate as iterate
from jaxnn.run import train as train
from jaxnn.steps import init_train_state as init_train_state
from jaxnn.steps import make_evaluate_step as make_evaluate_step
from jaxnn.steps import make_train_step as make_train_step
from jaxnn.sweeps import Comparison as Comparison
from jaxnn.sweeps import Halving as Halving
from jaxnn.sweeps import Member as Member
from jaxnn.sweeps import Points as Points
from jaxnn.sweeps import Sweep as Sweep
from jaxnn.sweeps import SweepOptions as SweepOptions
from jaxnn.sweeps import choice as choice
from jaxnn.sweeps import compare as compare
from jaxnn.sweeps import grid as grid
from jaxnn.sweeps import halving as halving
from jaxnn.sweeps import integers as integers
from jaxnn.sweeps import log_uniform as log_uniform
from jaxnn.sweeps import open_sweep as open_sweep
from jaxnn.sweeps import random as random
from jaxnn.sweeps import sweep as sweep
from jaxnn.sweeps import uniform as uniform
from jaxnn.sweeps import zipped as zipped
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

_importing.done()
