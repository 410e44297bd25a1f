"""Proofs about runs: ``replay`` a step, ``diff`` two runs, the ``autopsy`` of one, ``verify`` that all are equal."""

from jaxnn.proof._autopsy import Autopsy, autopsy
from jaxnn.proof._diff import Diff, diff
from jaxnn.proof._fault import NumericFault, first_fault
from jaxnn.proof._replay import Replay, replay
from jaxnn.proof._verify import Verification, VerifyOptions, verify

__all__ = [
    "Autopsy",
    "Diff",
    "NumericFault",
    "Replay",
    "Verification",
    "VerifyOptions",
    "autopsy",
    "diff",
    "first_fault",
    "replay",
    "verify",
]
