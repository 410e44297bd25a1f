"""How many members of one experiment fill a device: measured at widths that grow, as a sweep does."""

from __future__ import annotations

from typing import Any

from jaxnn.loop import with_changes
from jaxnn.parallel import computing_on
from jaxnn.sweeps.engine.plan import plan_sweep
from jaxnn.sweeps.engine.running import opened_group
from jaxnn.sweeps.engine.width import WidthPlan
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.search import grid
from jaxnn.types import Experiment


def plan_members(experiment: Experiment[Any], num_members: int, device: str | None = None) -> WidthPlan:
    """Measures up to ``num_members`` members side by side, which differ in their seed; nothing is trained or written.

    Args:
        experiment: what would be swept.
        num_members: the most.
        device: the kind of device, ``cpu``, ``gpu`` or ``tpu``; None: JAX's default.

    Raises:
        ConfigError, DataError, TrainingError: it cannot be run.
    """
    options = with_changes(SweepOptions(devices=1, record=False, progress="none"), {"device": device})
    with computing_on(device):
        plan = plan_sweep(experiment, grid(seed=range(num_members)), options, None)
        return opened_group(plan, plan.groups[0]).width
