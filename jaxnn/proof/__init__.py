"""What recorded runs did: ``replay`` of any step, ``autopsy`` of one that diverged, ``diff`` of two that part."""

from jaxnn.proof._autopsy import Autopsy, autopsy
from jaxnn.proof._diff import Diff, diff
from jaxnn.proof._fault import NumericFault, first_fault
from jaxnn.proof._replay import Replay, replay

__all__ = ["Autopsy", "Diff", "NumericFault", "Replay", "autopsy", "diff", "first_fault", "replay"]
