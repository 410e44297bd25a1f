"""Proofs about runs: ``replay`` computes any step of a recorded run again, ``verify`` tries out that runs are equal."""

from jaxnn.proof._replay import Replay, replay
from jaxnn.proof._verify import Verification, VerifyOptions, verify

__all__ = ["Replay", "Verification", "VerifyOptions", "replay", "verify"]
