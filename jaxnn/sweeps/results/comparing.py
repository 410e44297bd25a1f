"""Whether one thing is better than another: pairs of runs with equal seeds, and the interval of their difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.sweeps.results.comparison import Comparison as Comparison
from jaxnn.sweeps.results.comparison import Verdict
from jaxnn.sweeps.results.outcomes import SEED, At, Member, count_by_status
from jaxnn.sweeps.results.sides import Comparable, Side, side_of, told_sides, varying_fields
from jaxnn.sweeps.results.statistics import paired_difference, seeds_needed, welch_difference
from jaxnn.sweeps.results.summaries import grouped
from jaxnn.sweeps.results.tables import show_point
from jaxnn.types import ConfigError

VERDICTS: dict[int, Verdict] = {-1: "worse", 0: "not separable", 1: "better"}


class _Scored(NamedTuple):
    """A member, what names it on its side, what it is averaged into, and its score: NaN where it has none."""

    name: str
    member: Member
    unit: str
    score: float


def compare(a: Comparable, b: Comparable, metric: str | None = None, *, at: At = "final") -> Comparison:
    """Whether ``b`` is better than ``a``, by the 95 % interval of the difference of their means.

    Members with the same seed begin with the same random numbers and see the data in the same order, so they are
    compared pair by pair (Student's t interval of the differences): what the seed does to both falls out. Fields that
    vary within both sides make pairs likewise; the pairs of one seed are averaged, as they are not independent. Where
    no two pairs are found, the means are compared unpaired. Only members that came to their end count.

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
    varying = [varying_fields(side.outcomes.members) for side in sides]
    by = (*sorted((varying[0] & varying[1]) - {SEED}), SEED)
    # Pairs count by themselves only where there is but one seed.
    by_seed = by == (SEED,) or SEED in varying[0] | varying[1]
    scored_a, scored_b = (_scored(side, by, metric, at, by_seed=by_seed) for side in sides)
    in_a, in_b, paired = _match(scored_a, scored_b)
    means_a, means_b = _means(scored_a, in_a), _means(scored_b, in_b)
    found = (paired_difference if paired else welch_difference)(means_a, means_b)
    better = found.sign if sides[0].outcomes.more_is_better(metric) else -found.sign
    tells = not better and not math.isnan(found.low)
    return Comparison(
        metric=metric,
        sides=told_sides(*sides),
        by=by,
        paired=paired,
        unit="seed" if by_seed else "pair" if paired else "member",
        num_a=len(means_a),
        num_b=len(means_b),
        num_settings=-(-max(len(in_a), len(in_b)) // min(len(means_a), len(means_b))),
        mean_a=float(np.mean(means_a)),
        mean_b=float(np.mean(means_b)),
        difference=found.mean,
        interval=(found.low, found.high),
        verdict=VERDICTS[better],
        seeds_needed=seeds_needed(found.mean, found.deviation) if tells else None,
        left_out=(*_left_out("A", scored_a, in_a), *_left_out("B", scored_b, in_b)),
    )


def _scored(side: Side, by: Sequence[str], metric: str, at: At, *, by_seed: bool) -> dict[str, _Scored]:
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
        raise ConfigError(_without_result(side, metric))
    found: dict[str, _Scored] = {}
    for point, positions in grouped(outcomes.members, by):
        members = [outcomes.members[position] for position in positions]
        if len(members) > 1:
            raise ConfigError(_ambiguous(side, point, members))
        unit = repr(point[SEED]) if by_seed else repr(point)
        found[repr(point)] = _Scored(show_point(point), members[0], unit, float(scores[positions[0]]))
    return found


def _without_result(side: Side, metric: str) -> str:
    members = side.outcomes.members
    told = f"side {side.name} has no result in {metric!r} ({count_by_status(members)})"
    if any(member.complete for member in members):
        return f"{told}: name another metric."
    return f"{told}: only members that came to their end have one."


def _ambiguous(side: Side, point: Mapping[str, Any], members: Sequence[Member]) -> str:
    told = f"side {side.name} has {len(members)} members with {show_point(point)}"
    differing = sorted(varying_fields(members))
    if not differing:
        return f"{told}, which are the same otherwise too: give each once."
    first = differing[0]
    example = f"{first}={members[0].fields[first]!r}"
    return (
        f"{told}, which differ in {' and '.join(differing)}: select one value of each first, as in select({example}) "
        f"or --select {example}."
    )


def _match(a: Mapping[str, _Scored], b: Mapping[str, _Scored]) -> tuple[list[str], list[str], bool]:
    """The keys of the members that count on each side, and whether they are pairs."""
    in_a, in_b = ([key for key, scored in side.items() if not math.isnan(scored.score)] for side in (a, b))
    common = [key for key in in_a if key in in_b]
    pairs, least = len(_means(a, common)), min(len(_means(a, in_a)), len(_means(b, in_b)))
    # One pair says less than two means do, unless it is all there is.
    if pairs > 1 or (pairs and least == 1):
        return common, common, True
    return in_a, in_b, False


def _means(scored: Mapping[str, _Scored], keys: Sequence[str]) -> list[float]:
    """The mean score of each unit, in order of appearance."""
    units: dict[str, list[float]] = {}
    for key in keys:
        units.setdefault(scored[key].unit, []).append(scored[key].score)
    return [float(np.mean(scores)) for scores in units.values()]


def _left_out(side: str, scored: Mapping[str, _Scored], kept: Sequence[str]) -> list[str]:
    return [f"{side} {each.name} ({_reason(each)})" for key, each in scored.items() if key not in kept]


def _reason(scored: _Scored) -> str:
    if not math.isnan(scored.score):
        return "no partner"
    return "no result" if scored.member.complete else scored.member.status
