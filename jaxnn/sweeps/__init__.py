"""Sweeps: many runs of an experiment as one program, and what they came to."""

from jaxnn.sweeps.design.halving import Halving as Halving
from jaxnn.sweeps.design.halving import halving as halving
from jaxnn.sweeps.design.points import Points as Points
from jaxnn.sweeps.design.points import grid as grid
from jaxnn.sweeps.design.points import random as random
from jaxnn.sweeps.design.points import zipped as zipped
from jaxnn.sweeps.design.sampling import choice as choice
from jaxnn.sweeps.design.sampling import integers as integers
from jaxnn.sweeps.design.sampling import log_uniform as log_uniform
from jaxnn.sweeps.design.sampling import uniform as uniform
from jaxnn.sweeps.engine.batch_size import BatchSizePlan as BatchSizePlan
from jaxnn.sweeps.engine.batch_size import plan_batch_size as plan_batch_size
from jaxnn.sweeps.options import SweepOptions as SweepOptions
from jaxnn.sweeps.results.comparing import Comparison as Comparison
from jaxnn.sweeps.results.comparing import compare as compare
from jaxnn.sweeps.results.outcomes import Member as Member
from jaxnn.sweeps.results.reading import open_sweep as open_sweep
from jaxnn.sweeps.results.sweep import Sweep as Sweep
from jaxnn.sweeps.sweep import sweep as sweep
