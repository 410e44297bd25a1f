"""Comparison of two sweeps or runs: pairs of runs with equal seeds, and the interval of their difference."""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxnn.engine import RunOptions
from jaxnn.record import config_json, final_metrics, is_sweep, metrics_of, read_metrics, read_run
from jaxnn.run import Run
from jaxnn.sweeps.results._outcomes import SEED, At, Member, Outcomes, count_by_status, show, show_point
from jaxnn.sweeps.results._stored import read_sweep
from jaxnn.sweeps.results._summary import grouped
from jaxnn.sweeps.results._sweep import Sweep
from jaxnn.types import ConfigError

type Source = Sweep | Run | str | Path
type Comparable = Source | Sequence[Source]

MOST_NAMED = 4
MOST_SEEDS = 1_000_000
# Equal differences of fewer pairs are no evidence: five have one sign by chance in 6 % of all cases (2 · 0.5⁵).
ENOUGH_EQUAL = 6
# Deviations below this share of the values are rounding.
ROUNDING = 1e-6


def mean_difference(a: ArrayLike, b: ArrayLike, *, paired: bool) -> tuple[float, float, float, float]:
    """Returns the difference of the means of ``b [m]`` and ``a [n]``, b - a, with its 95 % interval.

    Args:
        a: values of one side.
        b: values of the other.
        paired: Student's t interval of the differences of pairs, n = m; otherwise Welch's interval (1947).

    Returns:
        The difference; the ends of the interval, NaN for fewer than two values or fewer than six equal differences;
        and the standard deviation of one pair's difference, NaN for fewer than two values.
    """
    from scipy import stats  # type: ignore[import-untyped]

    a, b = np.asarray(a, float), np.asarray(b, float)
    mean, least = float(b.mean() - a.mean()), min(len(a), len(b))
    if least < 2:
        return mean, math.nan, math.nan, math.nan
    deviation = float((b - a).std(ddof=1) if paired else math.sqrt(a.var(ddof=1) + b.var(ddof=1)))
    if deviation <= ROUNDING * max(np.abs(a).max(), np.abs(b).max()):
        end = mean if least >= ENOUGH_EQUAL else math.nan
        return mean, end, end, 0.0
    with warnings.catch_warnings():
        # SciPy warns of a side whose values are equal.
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_rel(b, a) if paired else stats.ttest_ind(b, a, equal_var=False)
        low, high = test.confidence_interval(0.95)
    return mean, float(low), float(high), deviation


def seeds_needed(difference: float, deviation: float) -> int | None:
    """Returns how many pairs a two-sided paired t-test at 5 % needs to detect a difference of means with power 0.8.

    The least n with ``n >= ((t(0.975) + t(0.8)) * deviation / difference)²``, both t of n - 1 degrees of freedom;
    ``deviation`` is that of one pair's difference.

    Returns:
        At least 2; None if it is more than a million, as for no difference at all.
    """
    from scipy import stats

    def enough(n: int) -> bool:
        quantiles = float(stats.t.ppf((0.975, 0.8), n - 1).sum())
        return difference != 0 and math.sqrt(n) * abs(difference) >= quantiles * deviation

    found = 2 + bisect.bisect_left(range(2, MOST_SEEDS + 1), True, key=enough)
    return found if found <= MOST_SEEDS else None


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """B against A in one metric.

    Attributes:
        metric: its name.
        sides: of A and B, their directories and the constant fields in which they differ.
        by: the fields whose values make a pair.
        paired: whether members were paired; otherwise the means were compared, by Welch's interval.
        unit: what is counted: a ``seed``; if other fields vary but not the seed, a ``pair``, or a ``member`` without
            pairs.
        num_a: how many of these of A count.
        num_b: and of B.
        num_settings: the number of settings, at most, that the value of a seed is averaged over.
        mean_a: their mean.
        mean_b: that of B.
        difference: of the means, B - A.
        interval: its 95 % interval; NaN if there are too few for one, or all differences of a few are equal.
        verdict: what B is.
        seeds_needed: how many seeds, or what else is counted, would show a difference of this size in 80 % of all
            cases; None if it is shown, if there is no interval, or if it would be more than a million.
        left_out: the members that do not count, and why.
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
    verdict: Literal["better", "worse", "not separable"]
    seeds_needed: int | None
    left_out: tuple[str, ...]

    @property
    def num_pairs(self) -> int:
        """How many pairs, one per seed if seeds are counted; 0 without pairs."""
        return self.num_a if self.paired else 0

    def __repr__(self) -> str:
        lines = [f"{name}  {side}" for name, side in zip("AB", self.sides, strict=True) if any(self.sides)]
        counted, low = _counted(self.num_a, self.unit), self.interval[0]
        if not self.paired:
            pairs = f"not paired, over {counted} of A and {self.num_b} of B"
        elif self.unit == "seed":
            pairs = f"paired over {counted}"
        else:
            pairs = f"over {counted} by {' and '.join(name for name in self.by if name != SEED)}"
        if self.num_settings > 1:
            pairs += f", averaged over {'up to ' if self.left_out else ''}{self.num_settings} settings"
        lines.append(f"{self.metric}: B {show(self.mean_b)} against A {show(self.mean_a)}, {pairs}.")
        interval = "" if math.isnan(low) else f" (95 % interval {low:+.4g} to {self.interval[1]:+.4g})"
        lines.append(f"Difference {self.difference:+.4g}{interval}: {self._show_verdict()}.")
        if self.unit != "seed":
            lines.append("The seed does not vary: with other seeds it may be otherwise.")
        if self.left_out:
            more = len(self.left_out) - MOST_NAMED
            named = "; ".join(self.left_out[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            lines.append(f"Left out: {named}.")
        return "\n".join(lines)

    def _show_verdict(self) -> str:
        if self.verdict != "not separable":
            return f"B is {self.verdict}"
        few = min(self.num_a, self.num_b)
        shown = f"not separable with {_counted(few, self.unit)}"
        if math.isnan(self.interval[0]) and few > 1:
            equal = f"all differences are {'equal' if self.difference else '0'}"
            return f"not separable: {equal if self.paired else 'all values of a side are equal'}, run more {self.unit}s"
        if math.isnan(self.interval[0]):
            return f"{shown}: run at least 2 more of each"
        needed = f"; about {self.seeds_needed} would be needed to see a difference of this size"
        return shown + (needed if self.seeds_needed is not None else "")


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("" if number == 1 else "s")


def compare(a: Comparable, b: Comparable, metric: str | None = None, *, at: At = "final") -> Comparison:
    """Compares ``b`` with ``a`` by the 95 % interval of the difference of their means.

    Members with the same seed start with the same random numbers and see the data in the same order, so they are
    compared pair by pair (Student's t interval of the differences), which cancels the seed's effect. Fields that vary
    within both sides make pairs likewise; the pairs of one seed are averaged, as they are not independent. Without at
    least two pairs the means are compared unpaired. Only members that finished or stopped early count.

    Args:
        a: a sweep, a run, the path of either, or a list of these.
        b: what is compared with it.
        metric: by which; default: the one ``a`` monitored.
        at: their ``final`` values, or those of the ``best`` evaluation.

    Raises:
        ConfigError: a side lacks the metric or a result in it, or has several members that would make one pair.
        RecordError: a path holds neither run nor sweep.
    """
    sides = [_members_of(name, given) for name, given in (("A", a), ("B", b))]
    metric = metric or sides[0].monitor
    varying = [_varying_fields(side.members) for side in sides]
    by = (*sorted((varying[0] & varying[1]) - {SEED}), SEED)
    # Pairs count by themselves only if there is but one seed.
    by_seed = by == (SEED,) or SEED in varying[0] | varying[1]
    scored = [_scored(name, side, by, metric, at, by_seed) for name, side in zip("AB", sides, strict=True)]
    kept = [[key for key, one in side.items() if not math.isnan(one.score)] for side in scored]
    common = [key for key in kept[0] if key in kept[1]]
    pairs, least = len(_means(scored[0], common)), min(len(_means(*each)) for each in zip(scored, kept, strict=True))
    # One pair says less than two means do, unless it is all there is.
    paired = pairs > 1 or (pairs == 1 and least == 1)
    kept = [common, common] if paired else kept
    means = [_means(*each) for each in zip(scored, kept, strict=True)]
    difference, low, high, deviation = mean_difference(*means, paired=paired)
    sign = int(low > 0) - int(high < 0)
    inconclusive = not sign and not math.isnan(low)
    left_out = [
        f"{name} {one.name} ({'no partner' if not math.isnan(one.score) else one.reason})"
        for name, side, keys in zip("AB", scored, kept, strict=True)
        for key, one in side.items()
        if key not in keys
    ]
    return Comparison(
        metric=metric,
        sides=_describe_sides([a, b], sides),
        by=by,
        paired=paired,
        unit="seed" if by_seed else "pair" if paired else "member",
        num_a=len(means[0]),
        num_b=len(means[1]),
        num_settings=-(-max(map(len, kept)) // min(map(len, means))),
        mean_a=float(np.mean(means[0])),
        mean_b=float(np.mean(means[1])),
        difference=difference,
        interval=(low, high),
        verdict="not separable" if not sign else "better" if (sign > 0) == sides[0].more_is_better(metric) else "worse",
        seeds_needed=seeds_needed(difference, deviation) if inconclusive else None,
        left_out=tuple(left_out),
    )


class _Scored(NamedTuple):
    """A member's name on its side, the unit it is averaged into, its score or NaN, and why it has none."""

    name: str
    unit: str
    score: float
    reason: str


def _scored(name: str, side: Outcomes, by: Sequence[str], metric: str, at: At, by_seed: bool) -> dict[str, _Scored]:
    """The members of a side by the text of the fields ``by``, which must identify them."""
    try:
        scores = side.scores(metric, at)
    except ConfigError as error:
        raise ConfigError(f"side {name}: {error}") from error
    if np.isnan(scores).all():
        complete = any(member.complete for member in side.members)
        hint = "name another metric" if complete else "only members that finished or stopped early have one"
        raise ConfigError(f"side {name} has no result in {metric!r} ({count_by_status(side.members)}): {hint}.")
    found: dict[str, _Scored] = {}
    for point, positions in grouped(side.members, by):
        members = [side.members[position] for position in positions]
        if len(members) > 1:
            same = f"side {name} has {len(members)} members with {show_point(point)}"
            differing = sorted(_varying_fields(members))
            if not differing:
                raise ConfigError(f"{same}, which are the same otherwise too: give each once.")
            example = f"{differing[0]}={members[0].fields[differing[0]]!r}"
            raise ConfigError(
                f"{same}, which differ in {' and '.join(differing)}: select one value of each first, as in "
                f"select({example}) or --select {example}."
            )
        reason = "no result" if members[0].complete else members[0].status
        unit = repr(point[SEED]) if by_seed else repr(point)
        found[repr(point)] = _Scored(show_point(point), unit, float(scores[positions[0]]), reason)
    return found


def _means(scored: Mapping[str, _Scored], keys: Sequence[str]) -> list[float]:
    """The mean score of each unit, in order of appearance."""
    units: dict[str, list[float]] = {}
    for key in keys:
        units.setdefault(scored[key].unit, []).append(scored[key].score)
    return [float(np.mean(scores)) for scores in units.values()]


def _varying_fields(members: Sequence[Member]) -> set[str]:
    """The config fields that are not the same for all ``members``."""
    fields = [member.fields for member in members]
    # Compared as JSON: a record has lists where memory has tuples.
    texts = {name: {json.dumps(each.get(name), default=repr) for each in fields} for name in (fields or [{}])[0]}
    return {name for name, values in texts.items() if len(values) > 1}


def _describe_sides(given: Sequence[Comparable], sides: Sequence[Outcomes]) -> tuple[str, str]:
    """Each side's directory, and its constant fields in which the other differs."""
    varying = _varying_fields([member for side in sides for member in side.members])
    differing = varying.difference(*(_varying_fields(side.members) for side in sides))
    described = []
    for sources, side in zip(given, sides, strict=True):
        listed = sources if isinstance(sources, list | tuple) else [sources]
        dirs = [str(path) for one in listed if (path := getattr(one, "dir", one)) is not None]
        more = f" and {len(dirs) - 1} more" if len(dirs) > 1 else ""
        fields = side.members[0].fields
        point = show_point({name: value for name, value in fields.items() if name in differing})
        described.append("  ".join(filter(None, [dirs[0] + more if dirs else "", point])))
    return described[0], described[1]


def _members_of(name: str, given: Any) -> Outcomes:
    """The members of a side, the only one of a run; the metric it monitors is that of its first part.

    Raises:
        ConfigError: it is nothing that can be compared, or an empty list.
        RecordError: a path holds neither run nor sweep.
    """
    parts: list[Outcomes] = []
    for source in given if isinstance(given, list | tuple) else [given]:
        if isinstance(source, str | Path) and is_sweep(Path(source)):
            source = read_sweep(source)
        if isinstance(source, Outcomes):
            parts.append(source)
        elif isinstance(source, Run | str | Path):
            parts.append(_of_run(source))
        else:
            raise ConfigError(
                f"side {name} is {source!r}: give a sweep, a run, the path of either, or a list of these."
            )
    if not parts:
        raise ConfigError(f"side {name} is an empty list: give at least one sweep or run.")
    members = tuple(member for part in parts for member in part.members)
    return Outcomes(members, (), (), parts[0].monitor, parts[0].higher_is_better)


def _of_run(source: Run | str | Path) -> Outcomes:
    """A run, or the record of one, as a member."""
    lines: list[dict[str, Any]]
    if isinstance(source, Run):
        config, status = config_json(source.experiment.config), source.summary.status
        monitor, more = source.monitor, source.higher_is_better
        rows = zip(*source.metrics.values(), strict=True)
        # A report that did not measure a metric has NaN there.
        lines = [{k: v for k, v in zip(source.metrics, row, strict=True) if not np.isnan(v)} for row in rows]
    else:
        facts, lines = read_run(Path(source)), read_metrics(Path(source))
        config, status = facts["config"], facts["status"]
        options = RunOptions(monitor=facts["options"]["monitor"], monitor_mode=facts["options"]["monitor_mode"])
        measured = {name for line in lines for name in metrics_of(line)}
        split = "validation" if any(name.startswith("validation_") for name in measured) else "test"
        monitor, more = f"{split}_{options.monitor}", options.higher_is_better
    evaluated = [line for line in lines if not np.isnan(line.get(monitor, np.nan))]
    best = min(evaluated, key=lambda line: -line[monitor] if more else line[monitor], default={})
    step = int(lines[-1]["step"]) if lines else 0
    return Outcomes((Member(0, {}, config, status, step, final_metrics(lines), best),), (), (), monitor, more)
