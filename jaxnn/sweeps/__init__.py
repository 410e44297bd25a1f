"""Sweeps: many runs of an experiment as one program, their record, and their results."""

from jaxnn.sweeps._comparison import compare, compare_groups
from jaxnn.sweeps._confirmation import confirm_best
from jaxnn.sweeps._executors import sweep
from jaxnn.sweeps._members import Member, count_by_status, show_field
from jaxnn.sweeps._plan import SweepOptions, plan_sweep
from jaxnn.sweeps._stored import open_sweep
from jaxnn.sweeps._sweep import Sweep
from jaxnn.sweeps._sweep_record import recorded_points

Sweep._confirmed, Sweep._compared = staticmethod(confirm_best), staticmethod(compare_groups)

__all__ = ["Member", "Sweep", "SweepOptions", "compare", "open_sweep", "sweep"]
