"""What a comparison came to, in numbers and in sentences."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jaxnn.sweeps.results.outcomes import SEED
from jaxnn.sweeps.results.tables import show

type Verdict = Literal["better", "worse", "not separable"]

# So many members that had to be left out are named, the others counted.
MOST_NAMED = 4


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """B against A in one metric.

    Attributes:
        metric: its name.
        sides: what A and B are: their directories, and the constant fields in which they differ.
        by: the fields whose values make a pair.
        paired: whether members were paired; else their means were compared, by Welch's interval.
        unit: what is counted: a ``seed``; where other fields vary but not the seed, a ``pair``, or a ``member`` where
            nothing was paired.
        num_a: how many of these of A count.
        num_b: and of B.
        num_settings: over how many settings, at most, the value of a seed is averaged.
        mean_a: their mean.
        mean_b: that of B.
        difference: of the means, B - A.
        interval: its 95 % interval; NaN where there are too few for one, or all differences of a few are equal.
        verdict: what B is.
        seeds_needed: how many seeds, or what else is counted, would show a difference of this size in 80 % of all
            cases; None where it is shown, where nothing tells, or where it would be more than a million.
        left_out: the members that had no part in it, and why.
    """

    metric: str
    sides: tuple[str, str]
    by: tuple[str, ...]
    paired: bool
    unit: Literal["seed", "pair", "member"]
    num_a: int
    num_b: int
    num_settings: int
    mean_a: float
    mean_b: float
    difference: float
    interval: tuple[float, float]
    verdict: Verdict
    seeds_needed: int | None
    left_out: tuple[str, ...]

    @property
    def num_pairs(self) -> int:
        """How many pairs, one a seed where seeds are counted; 0 where nothing was paired."""
        return self.num_a if self.paired else 0

    def __repr__(self) -> str:
        means = f"B {show(self.mean_b)} against A {show(self.mean_a)}"
        lines = [f"{name}  {side}" for name, side in zip("AB", self.sides, strict=True) if any(self.sides)]
        lines += [
            f"{self.metric}: {means}, {self._told_pairs()}.",
            f"{self._told_difference()}: {self._told_verdict()}.",
        ]
        if self.unit != "seed":
            lines.append("The seed does not vary: with other seeds it may be otherwise.")
        if self.left_out:
            more = len(self.left_out) - MOST_NAMED
            named = "; ".join(self.left_out[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            lines.append(f"Left out: {named}.")
        return "\n".join(lines)

    def _told_pairs(self) -> str:
        if not self.paired:
            told = f"not paired, over {_counted(self.num_a, self.unit)} of A and {self.num_b} of B"
        elif self.unit == "seed":
            told = f"paired over {_counted(self.num_a, 'seed')}"
        else:
            told = f"over {_counted(self.num_a, 'pair')} by {' and '.join(name for name in self.by if name != SEED)}"
        at_most = "up to " if self.left_out else ""
        return told + (f", averaged over {at_most}{self.num_settings} settings" if self.num_settings > 1 else "")

    def _told_difference(self) -> str:
        told = f"Difference {self.difference:+.4g}"
        low, high = self.interval
        return told if math.isnan(low) else f"{told} (95 % interval {low:+.4g} to {high:+.4g})"

    def _told_verdict(self) -> str:
        if self.verdict != "not separable":
            return f"B is {self.verdict}"
        few = min(self.num_a, self.num_b)
        told = f"not separable with {_counted(few, self.unit)}"
        if math.isnan(self.interval[0]) and few > 1:
            equal = f"all differences are {'equal' if self.difference else '0'}"
            if not self.paired:
                equal = "all values of a side are equal"
            return f"not separable: {equal}, run more {self.unit}s"
        if math.isnan(self.interval[0]):
            return f"{told}: run at least 2 more of each"
        if self.seeds_needed is None:
            return told
        return f"{told}; about {self.seeds_needed} would be needed to see a difference of this size"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
