"""Whether one thing is better than another: pairs of runs with equal seeds, and the interval of their difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxnn.sweeps.results.outcomes import LOST, SEED, At, Member, count_by_status
from jaxnn.sweeps.results.sides import Comparable, Side, side_of
from jaxnn.sweeps.results.statistics import paired_difference, seeds_needed, welch_difference
from jaxnn.sweeps.results.summaries import grouped
from jaxnn.sweeps.results.tables import show, show_point
from jaxnn.types import ConfigError

type Verdict = Literal["better", "worse", "not separable"]

VERDICTS: dict[int, Verdict] = {-1: "worse", 0: "not separable", 1: "better"}
# So many members that had to be left out are named, the others counted.
MOST_NAMED = 4


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """B against A in one metric.

    Attributes:
        metric: its name.
        by: the fields whose values make a pair.
        paired: whether members were paired; else their means were compared, by Welch's interval.
        num_a: members of A that count: the pairs, where there are pairs.
        num_b: of B.
        mean_a: their mean.
        mean_b: that of B.
        difference: of the means, B - A.
        interval: its 95 % interval; NaN where there are too few members for one.
        verdict: what B is.
        seeds_needed: how many seeds would show a difference of this size in 80 % of all cases; None where it is shown,
            where nothing tells, or where it would be more than a million.
        left_out: the members that had no part in it, and why.
    """

    metric: str
    by: tuple[str, ...]
    paired: bool
    num_a: int
    num_b: int
    mean_a: float
    mean_b: float
    difference: float
    interval: tuple[float, float]
    verdict: Verdict
    seeds_needed: int | None
    left_out: tuple[str, ...]

    @property
    def num_pairs(self) -> int:
        """How many pairs; 0 where nothing was paired."""
        return self.num_a if self.paired else 0

    def __repr__(self) -> str:
        means = f"B {show(self.mean_b)} against A {show(self.mean_a)}"
        lines = [
            f"{self.metric}: {means}, {self._told_pairs()}.",
            f"{self._told_difference()}: {self._told_verdict()}.",
        ]
        if self.left_out:
            more = len(self.left_out) - MOST_NAMED
            named = "; ".join(self.left_out[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            lines.append(f"Left out: {named}.")
        return "\n".join(lines)

    def _told_pairs(self) -> str:
        if not self.paired:
            return f"not paired, over {self.num_a} of A and {self.num_b} of B"
        if self.by == (SEED,):
            return f"paired over {_counted(self.num_a, SEED)}"
        return f"paired over {_counted(self.num_a, 'member')} by {' and '.join(self.by)}"

    def _told_difference(self) -> str:
        told = f"Difference {self.difference:+.4g}"
        low, high = self.interval
        return told if math.isnan(low) else f"{told} (95 % interval {low:+.4g} to {high:+.4g})"

    def _told_verdict(self) -> str:
        if self.verdict != "not separable":
            return f"B is {self.verdict}"
        few = min(self.num_a, self.num_b)
        if math.isnan(self.interval[0]):
            return f"not separable with {_counted(few, SEED)}: run at least 2 more of each"
        told = f"not separable with {_counted(few, SEED)}"
        if self.seeds_needed is None:
            return told
        return f"{told}; about {self.seeds_needed} would be needed to see a difference of this size"


class _Scored(NamedTuple):
    """A member, what names it on its side, and its score: NaN where it has none."""

    name: str
    member: Member
    score: float


def compare(a: Comparable, b: Comparable, metric: str | None = None, *, at: At = "final") -> Comparison:
    """Whether ``b`` is better than ``a``, by the 95 % interval of the difference of their means.

    Members with the same seed begin with the same random numbers and see the data in the same order, so they are
    compared pair by pair (Student's t interval of the differences): what the seed does to both falls out. Fields that
    vary within both sides make pairs likewise. Where no two pairs are found, the means are compared unpaired.

    Args:
        a: a sweep, a run, the path of either, or a list of these.
        b: what is compared with it.
        metric: by which; default: the one ``a`` monitored.
        at: their ``final`` values, or those of the ``best`` evaluation.

    Raises:
        ConfigError: a side lacks the metric or a result in it, or has several members that would make one pair.
        RecordError: a path holds neither run nor sweep.
    """
    sides = side_of("A", a), side_of("B", b)
    metric = metric or sides[0].outcomes.monitor
    by = _pairing(*sides)
    scored_a, scored_b = (_scored(side, by, metric, at) for side in sides)
    in_a, in_b, paired = _match(scored_a, scored_b)
    values_a, values_b = [scored_a[key].score for key in in_a], [scored_b[key].score for key in in_b]
    found = (paired_difference if paired else welch_difference)(values_a, values_b)
    better = found.sign if sides[0].outcomes.more_is_better(metric) else -found.sign
    return Comparison(
        metric=metric,
        by=by,
        paired=paired,
        num_a=len(in_a),
        num_b=len(in_b),
        mean_a=float(np.mean(values_a)),
        mean_b=float(np.mean(values_b)),
        difference=found.mean,
        interval=(found.low, found.high),
        verdict=VERDICTS[better],
        seeds_needed=None if better else seeds_needed(found.mean, found.deviation),
        left_out=(*_left_out("A", scored_a, in_a), *_left_out("B", scored_b, in_b)),
    )


def _pairing(a: Side, b: Side) -> tuple[str, ...]:
    """The fields whose values make a pair: the seed, and those that vary within both sides."""
    varying = _varying(a.outcomes.members) & _varying(b.outcomes.members)
    return (*sorted(varying - {SEED}), SEED)


def _varying(members: Sequence[Member]) -> set[str]:
    fields = [member.fields for member in members]
    return {name for name in fields[0] if len({repr(each.get(name)) for each in fields}) > 1} if fields else set()


def _scored(side: Side, by: Sequence[str], metric: str, at: At) -> dict[str, _Scored]:
    """The members of a side by the text of the fields ``by``.

    Raises:
        ConfigError: two have the same there, or none has a result in ``metric``.
    """
    outcomes = side.outcomes
    try:
        scores = outcomes.scores(metric, at)
    except ConfigError as error:
        raise ConfigError(f"side {side.name}: {error}") from error
    if np.isnan(scores).all():
        told = count_by_status(outcomes.members)
        raise ConfigError(f"side {side.name} has no result in {metric!r} ({told}): name another metric.")
    found: dict[str, _Scored] = {}
    for point, positions in grouped(outcomes.members, by):
        members = [outcomes.members[position] for position in positions]
        if len(members) > 1:
            raise ConfigError(_ambiguous(side, point, members))
        found[repr(point)] = _Scored(show_point(point), members[0], float(scores[positions[0]]))
    return found


def _ambiguous(side: Side, point: Mapping[str, Any], members: Sequence[Member]) -> str:
    told = f"side {side.name} has {len(members)} members with {show_point(dict(point))}"
    differing = sorted(_varying(members))
    if not differing:
        return f"{told}, which are the same otherwise too: give each once."
    first = differing[0]
    example = f"select({first}={members[0].fields[first]!r})"
    return f"{told}, which differ in {' and '.join(differing)}: select one value of each first, as in {example}."


def _match(a: Mapping[str, _Scored], b: Mapping[str, _Scored]) -> tuple[list[str], list[str], bool]:
    """The keys of the members that count on each side, and whether they are pairs."""
    in_a, in_b = ([key for key, scored in side.items() if not math.isnan(scored.score)] for side in (a, b))
    common = [key for key in in_a if key in in_b]
    # One pair says less than two means do, unless it is all there is.
    if len(common) > 1 or (common and 1 in (len(in_a), len(in_b))):
        return common, common, True
    return in_a, in_b, False


def _left_out(side: str, scored: Mapping[str, _Scored], kept: Sequence[str]) -> list[str]:
    return [f"{side} {each.name} ({_reason(each)})" for key, each in scored.items() if key not in kept]


def _reason(scored: _Scored) -> str:
    if not math.isnan(scored.score):
        return "no partner"
    return scored.member.status if scored.member.status in LOST else "no result"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
