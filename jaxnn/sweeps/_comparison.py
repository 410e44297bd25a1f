"""Comparison of two sweeps or runs: pairs of runs with equal seeds, and the interval of their difference."""

import dataclasses
import math
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxnn import record
from jaxnn._json import config_json
from jaxnn._statistics import mean_difference, seeds_needed
from jaxnn._text import Table
from jaxnn.run import Run, open_run
from jaxnn.sweeps._members import (
    SEED,
    GroupRow,
    Member,
    count_by_status,
    grouped,
    point_key,
    seed_means,
    show,
    show_point,
)
from jaxnn.sweeps._stored import open_sweep
from jaxnn.sweeps._sweep import Sweep
from jaxnn.types import ConfigError, Direction

type Source = Sweep | Run | str | Path
type Verdict = Literal["better", "worse", "higher", "lower", "not separable"]
type Comparable = Source | Sequence[Source]

MOST_NAMED = 4


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """B against A in one metric, seed by seed."""

    metric: str
    sides: tuple[
        str, str
    ]  # of A and B, their names and directories, and the constant fields that were selected or differ
    by: tuple[str, ...]  # the fields whose values make a pair, the seed last
    num_seeds: int  # seeds that both sides have results of
    num_settings: int  # the number of settings, at most, that the value of a seed is averaged over
    mean_a: float  # the mean of A over these seeds
    mean_b: float
    difference: float  # of the means, B - A
    interval: tuple[float, float]  # its interval; NaN for too few seeds, or if all differences of a few are equal
    # What B is; higher or lower if it is not known whether more of the metric is better.
    verdict: Verdict
    seeds_needed: int | None  # to show it in 80 % of all cases; None if it is shown, without interval, above a million
    left_out: tuple[str, ...]  # the members that do not count, and why
    deviation: float  # the standard deviation of a pair's difference; NaN for fewer than two pairs
    level: float = 0.95  # of the interval

    def needed(self, effect: float) -> int | None:
        """Returns how many seeds show a difference of ``effect`` in 80 % of all cases, by the deviation seen here.

        By a paired t-test at 5 %; None if they are more than a million, or there are fewer than two pairs.
        """
        return None if math.isnan(self.deviation) else seeds_needed(effect, self.deviation)

    def __repr__(self) -> str:
        lines = [f"{name}  {side}" for name, side in zip("AB", self.sides, strict=True) if any(self.sides)]
        seeds = f"{self.num_seeds} seed{'s' * (self.num_seeds != 1)}"
        pairs = f"paired over {seeds}"
        if self.num_settings > 1:
            pairs += f", averaged over {'up to ' if self.left_out else ''}{self.num_settings} settings"
        lines.append(f"{self.metric}: B {show(self.mean_b)} against A {show(self.mean_a)}, {pairs}.")
        low, high = self.interval
        shown = f"not separable with {seeds}"
        if self.verdict != "not separable":
            shown = f"B is {self.verdict}"
        elif self.seeds_needed is not None:
            shown += f"; about {self.seeds_needed} would be needed to see a difference of this size"
        elif math.isnan(low):
            shown += ": run at least 2 more" if self.num_seeds == 1 else ": all differences are equal, run more"
        interval = "" if math.isnan(low) else f" ({100 * self.level:.4g} % interval {low:+.4g} to {high:+.4g})"
        lines.append(f"Difference {self.difference:+.4g}{interval}: {shown}.")
        if self.left_out:
            more = len(self.left_out) - MOST_NAMED
            named = "; ".join(self.left_out[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            lines.append(f"Left out: {named}.")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparisons:
    """Several comparisons whose intervals hold all at once: the level of each is corrected for their number."""

    rows: tuple[Comparison, ...]
    count: int  # of comparisons that the level is corrected for
    names: tuple[str, ...] = ()  # of the rows, if they are of groups of a sweep
    best: str = ""  # the group that they are compared with

    def __repr__(self) -> str:
        note = (
            f"Intervals of level {100 * self.rows[0].level:.4g} %: all {self.count} hold at once with 95 % "
            "(Bonferroni)."
        )
        notes = [note] * (self.count > 1)
        if not self.names:
            return "\n".join([*map(repr, self.rows), *notes])
        rows = []
        for name, one in zip(self.names, self.rows, strict=True):
            ends = "–" if math.isnan(one.interval[0]) else f"{one.interval[0]:+.4g} to {one.interval[1]:+.4g}"
            rows.append((name, str(one.num_seeds), f"{one.difference:+.4g}", ends, one.verdict))
        head = (f"{self.rows[0].metric} against {self.best}", "seeds", "difference", "interval", "")
        return repr(Table(head, rows, notes))


@typing.overload
def compare(a: Comparable, b: Comparable, metric: str | None = None) -> Comparison: ...
@typing.overload
def compare(a: Comparable, b: Comparable, metric: list[str] | tuple[str, ...]) -> Comparisons: ...
def compare(
    a: Comparable, b: Comparable, metric: str | list[str] | tuple[str, ...] | None = None
) -> Comparison | Comparisons:
    """Compares ``b`` with ``a`` by the 95 % interval of the difference of their means over seeds.

    >>> jn.compare(swept.select(learning_rate=0.1), swept.select(learning_rate=0.2), "test_accuracy")
    A  learning_rate 0.1
    B  learning_rate 0.2
    test_accuracy: B 0... against A 0..., paired over 2 seeds.
    Difference ...

    Members with the same seed start with the same random numbers and see the data in the same order, so they are
    compared pair by pair (Student's t interval of the differences), which cancels the seed's effect. Fields that vary
    within both sides make pairs likewise; the pairs of one seed are averaged, as they are not independent. Only members
    that finished or stopped early and have a partner count. The interval is of one look at seeds that were chosen
    before: `decide` trains as many as it takes.

    Args:
        a: a sweep, a run, the path of either, or a list of these.
        b: what is compared with it.
        metric: by which; default: the one ``a`` monitored. Several make `Comparisons`, whose intervals hold all at
            once with 95 %, each at a level of 1 - 0.05 / their number.

    Raises:
        ConfigError: a side lacks the metric or a result in it, has several members that would make one pair, or none
            with a partner.
        RecordError: a path holds neither run nor sweep.
    """
    if metric is None or isinstance(metric, str):
        return compared(a, b, metric)
    metrics = tuple(dict.fromkeys(metric))
    if not metrics:
        raise ConfigError("metric is an empty list: name one metric or more.")
    return Comparisons(tuple(compared(a, b, one, 1 - 0.05 / len(metrics)) for one in metrics), len(metrics))


def compare_groups(sweep: Sweep, by: Sequence[str], metric: str | None) -> Comparisons:
    """Compares each group of members with the best one, as `Sweep.compare`."""
    if not all(isinstance(name, str) for name in [*by, metric or ""]):
        raise ConfigError(f"compare takes names of fields and of one metric, not {[*by, metric]!r:.80}.")
    by = by or [axis.name for axis in sweep.settings]
    groups = sweep.group(by, metric)
    ranked = groups.ranked(metric)
    if len(ranked) < 2:
        named = f" by {' and '.join(by)}" if by else ""
        raise ConfigError(f"all members are in one group{named}: name fields with several values.")
    metric, count = metric or sweep.monitor, len(ranked) * (len(ranked) - 1) // 2
    parts = [dataclasses.replace(sweep, members=tuple(sweep.members[i] for i in _places(sweep, row))) for row in ranked]
    # Which one is the best is seen in the results: as if all pairs were compared.
    rows = tuple(compared(parts[0], part, metric, 1 - 0.05 / count) for part in parts[1:])
    return Comparisons(rows, count, tuple(show_point(row.point) for row in ranked[1:]), show_point(ranked[0].point))


def _places(sweep: Sweep, row: GroupRow) -> list[int]:
    numbers = {*row.members}
    return [place for place, member in enumerate(sweep.members) if member.index in numbers]


def compared(a: Comparable, b: Comparable, metric: str | None = None, level: float = 0.95) -> Comparison:
    """Compares two sides in one metric, as `compare`, by an interval of this level."""
    sides = [_as_sweep(name, given) for name, given in (("A", a), ("B", b))]
    metric = metric or sides[0].monitor
    by = (*sorted(_varying(sides[0].members) & _varying(sides[1].members) - {SEED}), SEED)
    scored = [_scored(name, side, by, metric) for name, side in zip("AB", sides, strict=True)]
    common = [key for key in scored[0] if key in scored[1] and not any(math.isnan(side[key][1]) for side in scored)]
    if not common:
        shown = [[show_point({name: one.fields[name] for name in by}) for one, _ in s.values()] for s in scored]
        keys = ["; ".join([*each[:3], *["…"] * (len(each) > 3)]) for each in shown]
        raise ConfigError(
            f"no member of A has a partner in B with the same {' and '.join(by)}: A has {keys[0]}, and B {keys[1]}: "
            "train both with the same."
        )
    pairs = ([side[key] for key in common] for side in scored)
    (a_means, num_settings), (b_means, _) = (seed_means(*zip(*side, strict=True)) for side in pairs)
    difference, low, high, deviation = mean_difference(a_means, b_means, level)
    sign = int(low > 0) - int(high < 0)
    inconclusive = not sign and not math.isnan(low)
    left_out = []
    for name, side in zip("AB", scored, strict=True):
        for member, score in (one for key, one in side.items() if key not in common):
            why = "no partner" if not math.isnan(score) else "no result" if member.complete else member.status
            left_out.append(f"{name} {show_point({field: member.fields[field] for field in by})} ({why})")
    return Comparison(
        metric=metric,
        sides=_describe_sides([a, b], sides),
        by=by,
        num_seeds=len(a_means),
        num_settings=num_settings,
        mean_a=float(a_means.mean()),
        mean_b=float(b_means.mean()),
        difference=difference,
        interval=(low, high),
        verdict=_verdict(sign, sides[0].direction(metric)),
        seeds_needed=seeds_needed(difference, deviation) if inconclusive else None,
        left_out=tuple(left_out),
        deviation=deviation,
        level=level,
    )


def _verdict(sign: int, direction: Direction | None) -> Verdict:
    if not sign:
        return "not separable"
    if direction is None:
        return "higher" if sign > 0 else "lower"
    return "better" if (sign > 0) == (direction == "max") else "worse"


def _scored(name: str, side: Sweep, by: Sequence[str], metric: str) -> dict[str, tuple[Member, float]]:
    """The members of a side and their scores, by the text of the fields ``by``, which must identify them."""
    try:
        scores = side.scores(metric)
    except ConfigError as error:
        raise ConfigError(f"side {name}: {error}") from error
    if np.isnan(scores).all():
        complete = any(member.complete for member in side.members)
        hint = "name another metric" if complete else "only members that finished or stopped early have one"
        raise ConfigError(f"side {name} has no result in {metric!r} ({count_by_status(side.members)}): {hint}.")
    found: dict[str, tuple[Member, float]] = {}
    for point, positions in grouped(side.members, by):
        members = [side.members[position] for position in positions]
        if len(members) > 1:
            same = f"side {name} has {len(members)} members with {show_point(point)}"
            differing = sorted(_varying(members))
            if not differing:
                raise ConfigError(f"{same}, which are the same otherwise too: give each once.")
            field, value = differing[0], members[0].fields[differing[0]]
            chosen = f"{field}={value!r}" if field.isidentifier() else f"**{ {field: value}!r}"
            example = f"jn.open_sweep(path).select({chosen})"
            raise ConfigError(f"{same}, which differ in {' and '.join(differing)}: choose one in Python, as {example}.")
        found[point_key(point)] = members[0], float(scores[positions[0]])
    return found


def _varying(members: Sequence[Member]) -> set[str]:
    """The config fields that are not the same for all ``members``."""
    fields = [member.fields for member in members]
    texts = {name: {point_key({name: each.get(name)}) for each in fields} for name in (fields or [{}])[0]}
    return {name for name, values in texts.items() if len(values) > 1}


def _describe_sides(given: Sequence[Comparable], sides: Sequence[Sweep]) -> tuple[str, str]:
    """Each side's name, directory, and the constant fields that were selected by, or in which the other differs."""
    selected = {axis.name for side in sides for axis in side.axes if len(axis.values) == 1}
    named = selected | _varying([member for side in sides for member in side.members])
    described = []
    for sources, side in zip(given, sides, strict=True):
        listed = sources if isinstance(sources, list | tuple) else [sources]
        dirs = [str(path) for one in listed if (path := getattr(one, "dir", one)) is not None]
        more = f" and {len(dirs) - 1} more" if len(dirs) > 1 else ""
        constant = named - _varying(side.members)
        point = show_point({name: value for name, value in side.members[0].fields.items() if name in constant})
        described.append("  ".join(filter(None, [side.name, dirs[0] + more if dirs else "", point])))
    return described[0], described[1]


def _as_sweep(name: str, source: Any) -> Sweep:
    """The members of the side ``name`` as a sweep, the one of a run; a list has the monitored metric of its first."""
    if isinstance(source, list | tuple) and source:
        parts = [_as_sweep(name, part) for part in source]
        members = tuple(member for part in parts for member in part.members)
        names = ", ".join(dict.fromkeys(part.name for part in parts if part.name))
        first = parts[0]
        return Sweep(members, (), (), first.monitor, first.higher_is_better, first.directions, name=names or None)
    if isinstance(source, Sweep):
        return source
    if isinstance(source, str | Path):
        if record.RecordReader(Path(source)).is_sweep:
            return open_sweep(source)
        source = open_run(source)
    if not isinstance(source, Run):
        raise ConfigError(f"side {name} is {source!r}: give a sweep, a run, the path of either, or a list of these.")
    config = source.config if source.experiment is None else config_json(source.config)
    member = Member(0, {}, config, source.summary.status, 0, source.final, {})
    of_run = source.monitor, source.higher_is_better, source.directions
    return Sweep((member,), (), (), *of_run, name=source.name)
