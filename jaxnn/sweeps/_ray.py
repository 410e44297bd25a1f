"""A sweep on a Ray cluster: its shards as Ray tasks, each a device, in one directory that all machines see."""

from __future__ import annotations

from typing import Any

from jaxnn.sweeps._options import SweepOptions
from jaxnn.sweeps.results import Sweep
from jaxnn.sweeps.search import Halving, Points
from jaxnn.types import Experiment


def sweep_on_ray(experiment: Experiment[Any], points: Points | Halving, options: SweepOptions) -> Sweep:
    """Trains the shards of a sweep as Ray tasks."""
    raise NotImplementedError
