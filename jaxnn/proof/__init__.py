"""What a recorded run did, computed again: ``replay`` of any step, and the ``autopsy`` of one that diverged."""

from jaxnn.proof._autopsy import Autopsy, autopsy
from jaxnn.proof._fault import NumericFault, first_fault
from jaxnn.proof._replay import Replay, replay

__all__ = ["Autopsy", "NumericFault", "Replay", "autopsy", "first_fault", "replay"]
