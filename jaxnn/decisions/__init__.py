"""Decisions between experiments: sequential tests on pairs of seeds, their ledger, and what makes a metric vary."""

from jaxnn.decisions._decide import DecideOptions, DecisionInterrupted, decide
from jaxnn.decisions._decision import Decision, Pair, has_decisions, read_decisions
from jaxnn.decisions._deviations import Deviation, VarianceSource, jackknife, rounded
from jaxnn.decisions._sides import Side
from jaxnn.decisions._spread import VarianceReport, spread

__all__ = [
    "DecideOptions",
    "Decision",
    "DecisionInterrupted",
    "Deviation",
    "Pair",
    "Side",
    "VarianceReport",
    "VarianceSource",
    "decide",
    "has_decisions",
    "read_decisions",
    "spread",
]
