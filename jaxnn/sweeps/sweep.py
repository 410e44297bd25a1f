"""Many runs of an experiment as one program: ``jn.sweep(experiment, jn.grid(learning_rate=[…], seed=range(8)))``."""

from __future__ import annotations

from typing import Any

from jaxnn.loop import with_changes
from jaxnn.sweeps.engine.local import sweep_here
from jaxnn.sweeps.engine.resuming import recorded_points
from jaxnn.sweeps.engine.shards import located
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.ray.engine import sweep_on_ray
from jaxnn.sweeps.results import Sweep
from jaxnn.sweeps.search import Halving, Points
from jaxnn.types import ConfigError, Experiment


def sweep(
    experiment: Experiment[Any],
    points: Points | Halving | None = None,
    options: SweepOptions | None = None,
    **changes: Any,
) -> Sweep:
    """Trains a member for every point: those that differ in floats and the seed as one program.

    A member computes what its solo run does, to rounding. SIGINT and SIGTERM end the sweep after the window under way,
    saved and ready to resume.

    Args:
        experiment: what is run; its config holds the fields that ``points`` do not set.
        points: what `grid`, `zipped`, `random` make, a sum of these, or a `halving` of it; a sweep that is resumed
            knows its own.
        options: how to run it.
        **changes: single sweep options, such as ``width=16`` or ``resume="runs/mnist/sweep-…"``.

    Raises:
        ConfigError, DataError, RecordError: the sweep cannot start; nothing was written. A point that cannot be run is
            no such error: its member has the status ``failed`` and says why.
    """
    options = with_changes(options or SweepOptions(), changes, experiment.config)
    if points is None:
        if options.resume is None:
            raise ConfigError("a sweep needs points, such as jn.grid(seed=range(4)).")
        _, points = recorded_points(options.resume, experiment)
    if options.engine == "ray":
        return sweep_on_ray(experiment, points, options)
    return sweep_here(experiment, points, located(options))
