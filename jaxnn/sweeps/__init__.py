"""Sweeps: many runs of an experiment as one program, and what they came to."""

from jaxnn.sweeps.batch_size import BatchSizePlan as BatchSizePlan
from jaxnn.sweeps.batch_size import plan_batch_size as plan_batch_size
from jaxnn.sweeps.comparing import Comparison as Comparison
from jaxnn.sweeps.comparing import compare as compare
from jaxnn.sweeps.halving import Halving as Halving
from jaxnn.sweeps.halving import halving as halving
from jaxnn.sweeps.options import SweepOptions as SweepOptions
from jaxnn.sweeps.outcomes import Member as Member
from jaxnn.sweeps.points import Points as Points
from jaxnn.sweeps.points import grid as grid
from jaxnn.sweeps.points import random as random
from jaxnn.sweeps.points import zipped as zipped
from jaxnn.sweeps.reading import open_sweep as open_sweep
from jaxnn.sweeps.results import Sweep as Sweep
from jaxnn.sweeps.sampling import choice as choice
from jaxnn.sweeps.sampling import integers as integers
from jaxnn.sweeps.sampling import log_uniform as log_uniform
from jaxnn.sweeps.sampling import uniform as uniform
from jaxnn.sweeps.sweep import sweep as sweep
