"""The picture of a decision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from jaxnn._figures import new_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxnn.decisions._decision import Decision


def draw_decision(decision: Decision) -> Figure:
    """Draws differences with their interval, and both kinds of evidence, against the number of pairs."""
    figure, (values, evidence) = new_panels(2)
    pairs, path = np.arange(1, len(decision.pairs) + 1), decision.evidence
    known = np.isfinite(path.low) & np.isfinite(path.high)
    values.fill_between(pairs[known], path.low[known], path.high[known], color="C0", alpha=0.25, linewidth=0)
    values.plot(pairs, decision.differences, "o", color="C0", markersize=3)
    values.plot(pairs, np.cumsum(decision.differences) / pairs, color="C0")
    values.axhline(0, color="0.5", linewidth=1)
    for effect in () if decision.min_effect is None else (-decision.min_effect, decision.min_effect):
        values.axhline(effect, color="0.5", linewidth=1, linestyle=":")
    values.set(xlabel="pairs", ylabel=f"{decision.metric.replace('_', ' ')}, B - A")
    values.set_title("differences, their mean and its interval", fontsize="medium")
    for test, colour in (("t", "C0"), ("ranks", "C1")):
        log = np.clip(decision.evidence_by(test).log, -7, 30) / math.log(10)  # type: ignore[arg-type]
        evidence.plot(pairs, 10**log, color=colour, label=test, linewidth=2 if test == decision.test else 1)
    evidence.axhline(1 / decision.level, color="0.5", linewidth=1, linestyle=":")
    evidence.set(xlabel="pairs", ylabel="evidence", yscale="log")
    evidence.set_title(f"enough at {1 / decision.level:,.0f}", fontsize="medium")
    evidence.legend()
    figure.suptitle(f"{decision.verdict}: {decision.names[1]} against {decision.names[0]}", fontsize="large")
    return figure
