"""Sweeps: many runs of an experiment as one program, their record, and their results."""

from jaxnn.sweeps import search as search
from jaxnn.sweeps._member_runs import open_sweep as open_sweep
from jaxnn.sweeps._plan import plan_sweep as plan_sweep
from jaxnn.sweeps._sweep_options import SweepOptions as SweepOptions
from jaxnn.sweeps._sweep_resume import recorded_points as recorded_points
from jaxnn.sweeps._train_sweep import sweep as sweep
from jaxnn.sweeps.results import Comparison as Comparison
from jaxnn.sweeps.results import Member as Member
from jaxnn.sweeps.results import Sweep as Sweep
from jaxnn.sweeps.results import best_label as best_label
from jaxnn.sweeps.results import compare as compare
from jaxnn.sweeps.results import count_by_status as count_by_status
from jaxnn.sweeps.search import Halving as Halving
from jaxnn.sweeps.search import Points as Points
from jaxnn.sweeps.search import field_names as field_names
from jaxnn.sweeps.search import field_value as field_value
from jaxnn.sweeps.search import grid as grid
from jaxnn.sweeps.search import override as override
from jaxnn.sweeps.search import with_fields as with_fields
