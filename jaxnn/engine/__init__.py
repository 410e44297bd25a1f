"""The engine: trains a population of one or more members that share one program; it prints nothing."""

from jaxnn.engine._budget import Budget, Pace
from jaxnn.engine._checks import check_data, check_parts, load_data
from jaxnn.engine._compiler import Programs
from jaxnn.engine._lanes import Lanes
from jaxnn.engine._loop import WindowReport, train
from jaxnn.engine._options import Probe, RunOptions, StrategyOption
from jaxnn.engine._population_record import PopulationRecord
from jaxnn.engine._prediction import make_predict
from jaxnn.engine._prepare import Members, fastest_steps, make_calls, open_trainer, programs_of
from jaxnn.engine._pure import make_init, make_step
from jaxnn.engine._retraining import Retraining
from jaxnn.engine._states import MEMBERS, HostStates, Population, Shape, with_keys
from jaxnn.engine._trainer import RUNNING, MemberLog, Trainer
from jaxnn.engine._tuning import (
    CALL_SECONDS,
    ENOUGH_STEPS,
    MEMORY_SHARE,
    Trial,
    VmapPlan,
    choose_steps_per_call,
    fitting_block,
    narrow,
    seconds_per_step,
    widen,
)
from jaxnn.engine._windows import CALLS_AHEAD, Flight, Plan, Stall, near_divisor, typical_window, with_tails

__all__ = ["RunOptions"]
