"""Decisions between experiments: sequential tests on pairs of seeds, and the ledger of what was decided."""

from jaxnn.decisions._decide import DecideOptions, DecisionInterrupted, decide
from jaxnn.decisions._decision import Decision, Pair

__all__ = ["DecideOptions", "Decision", "DecisionInterrupted", "Pair", "decide"]
