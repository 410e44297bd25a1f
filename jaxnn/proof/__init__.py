"""Proofs about runs: ``replay`` of any step, the ``autopsy`` of a run that diverged, ``verify`` that runs are equal."""

from jaxnn.proof._autopsy import Autopsy, autopsy
from jaxnn.proof._fault import NumericFault, first_fault
from jaxnn.proof._replay import Replay, replay
from jaxnn.proof._verify import Verification, VerifyOptions, verify

__all__ = [
    "Autopsy",
    "NumericFault",
    "Replay",
    "Verification",
    "VerifyOptions",
    "autopsy",
    "first_fault",
    "replay",
    "verify",
]
