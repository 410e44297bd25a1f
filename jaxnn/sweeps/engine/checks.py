"""What cannot be asked of the devices, found before a sweep builds, reads, says or writes anything."""

from __future__ import annotations

from typing import Any

from jaxnn.parallel import check_divides
from jaxnn.sweeps.engine.group_run import members_layout
from jaxnn.sweeps.engine.plan import plain_points
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.search import Halving, Points
from jaxnn.types import Experiment


def check_devices(experiment: Experiment[Any], points: Points | Halving, options: SweepOptions) -> None:
    """Confirms that the devices are there, and can share the batches of every member.

    Args:
        experiment: what is swept.
        points: those of all members.
        options: how they are run.

    Raises:
        ConfigError: more devices are wanted than there are, or a mesh of another number, or there are batches that
            they cannot share.
    """
    for batch_size in _batch_sizes(experiment, plain_points(points)):
        # How members share a batch does not depend on how many they are.
        layout = members_layout(options, batch_size, num_members=1)
        if options.eval_batch_size is not None:
            check_divides(options.eval_batch_size, layout.data_size, "eval_batch_size")


def _batch_sizes(experiment: Experiment[Any], points: Points) -> list[int]:
    """The different batch sizes of the members; those that are none are told of when their members are planned."""
    own = getattr(experiment.config, "batch_size", None)
    found = (point.get("batch_size", own) for point in points)
    return sorted({size for size in found if isinstance(size, int) and size > 0})
