"""Sweeps: many runs of an experiment as one program, their record, and their results."""

from jaxnn.sweeps._comparison import compare as compare
from jaxnn.sweeps._groups import with_fields as with_fields
from jaxnn.sweeps._members import Member as Member
from jaxnn.sweeps._members import count_by_status as count_by_status
from jaxnn.sweeps._plan import SweepOptions as SweepOptions
from jaxnn.sweeps._plan import plan_sweep as plan_sweep
from jaxnn.sweeps._stored import open_sweep as open_sweep
from jaxnn.sweeps._sweep import Sweep as Sweep
from jaxnn.sweeps._sweep import best_label as best_label
from jaxnn.sweeps._sweep_record import recorded_points as recorded_points
from jaxnn.sweeps._train_sweep import sweep as sweep
