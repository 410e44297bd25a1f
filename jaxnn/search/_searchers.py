"""Searchers: where the members of a search come from while it trains, and which of them go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxnn.search._distributions import Distribution
from jaxnn.search._points import SCALES, Points, random
from jaxnn.types import ConfigError, check_int

MOST_DRAWS = 10**7

type Verdict = Literal["continue", "pause", "stop", "finish"]
type Proposal = Propose | Promote | Fork | Drop


class Propose(NamedTuple):
    """Train a new member. Members are numbered from 0 in the order of their `Propose` and `Fork`.

    >>> jn.search.Propose({"learning_rate": 0.1}).point
    {'learning_rate': 0.1}
    """

    point: Mapping[str, Any]  # the fields that it sets


class Promote(NamedTuple):
    """Continue the training of a paused member.

    >>> jn.search.Promote(3).member
    3
    """

    member: int


class Fork(NamedTuple):
    """Train a new member that continues from the state of another one, which is paused, with other values.

    >>> jn.search.Fork(3, {"learning_rate": 0.08}).member
    3
    """

    member: int
    point: Mapping[str, Any]


class Drop(NamedTuple):
    """End a paused member. Its state is kept while there is room, so that a run can continue it.

    >>> jn.search.Drop(3).member
    3
    """

    member: int


class Reached(NamedTuple):
    """What a searcher gets to know of a member, at one of the shares it asked for and when the member ends.

    >>> searcher = jn.search.asha(jn.grid(seed=range(4)), eta=2)
    >>> state, _ = searcher.ask(searcher.init(), 1)
    >>> searcher.tell(state, [jn.search.Reached(member=0, share=0.25, value=1.5, over=False)])[1]
    ['pause']
    """

    member: int
    share: float  # of its steps, one of `Searcher.shares`; that it was on the way to if it ended before
    value: float  # of the monitored metric, the lower the better; infinite if it diverged or failed
    over: bool  # whether it ended: it finished, stopped early, diverged or failed


class Searcher(NamedTuple):
    """A search as pure functions of its state; `jn.testing.check_searcher` checks one of a user's own.

    >>> def ask(started, count):  # learning rates without an end: 0.1, 0.05, 0.025, …
    ...     rates = [0.1 / 2**number for number in range(started, started + count)]
    ...     return started + count, [jn.search.Propose({"learning_rate": rate}) for rate in rates]
    >>> halved = jn.search.Searcher("halved", init=lambda: 0, ask=ask, scales={"learning_rate": "log"})
    >>> halved.ask(halved.init(), 2)[1]
    [Propose(point={'learning_rate': 0.1}), Propose(point={'learning_rate': 0.05})]

    Attributes:
        name: in reports and records.
        init: returns the state before the first member.
        ask: ``(state, count) -> (state, proposals)``: at most ``count`` `Propose`, `Promote` and `Fork`, and any number
            of `Drop`. Fewer mean that the others wait for reports; none while nothing is in training ends the search.
        tell: ``(state, reports) -> (state, verdicts)``: for each `Reached` of a window ``"continue"``, ``"pause"``,
            ``"stop"``, which prunes the member, or ``"finish"``: it is complete as it is. The verdict matters only if
            the member is not over. Default: all continue.
        shares: of a member's steps, ascending to 1, after which it reports.
        scales: the fields that are searched, and the scales of their axes in plots: ``"log"``, ``"linear"`` or
            ``"nominal"``.
        num: the number of members that it starts, if it is known.
        settings: what identifies it in a record, as JSON: a resumed search must have the same.
        copies: whether it proposes `Fork`. States of paused members are then kept; else those that are unlikely to be
            promoted may be dropped, and made again.
        learns: whether its points depend on reports: by default an eighth of its members are then in training at once.
    """

    name: str
    init: Callable[[], Any]
    ask: Callable[[Any, int], tuple[Any, Sequence[Proposal]]]
    tell: Callable[[Any, Sequence[Reached]], tuple[Any, Sequence[Verdict]]] = lambda state, reports: (
        state,
        ["continue"] * len(reports),
    )
    shares: tuple[float, ...] = (1.0,)
    scales: Mapping[str, str] = {}
    num: int | None = None
    settings: Mapping[str, Any] = {}
    copies: bool = False
    learns: bool = False

    @staticmethod
    def of(where: str, given: Any, num: int | None = None, key: int = 0) -> Searcher:
        """Returns the searcher that ``given`` is: a searcher, points, or a space of which ``num`` points are drawn.

        ``where`` names the caller in a ConfigError.
        """
        if isinstance(given, Searcher | Points):
            if num is not None:
                raise ConfigError(f"{where}: num is for a space, a dict of distributions: leave it out.")
            return given if isinstance(given, Searcher) else listed(given)
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise ConfigError(
                f"{where} needs points, as jn.grid and jn.search.random make, a searcher, or a space as in "
                f"{{'learning_rate': jn.search.log_uniform(1e-4, 1e-1)}}, not a {kind}."
            )
        for name, axis in given.items():
            if not (isinstance(axis, Distribution) or callable(axis) or isinstance(axis, list | range)):
                raise ConfigError(
                    f"{where}: {name} is {axis!r:.40}: give a distribution, as jn.search.log_uniform(1e-4, 1e-1), or a "
                    "list of values that each draw runs with."
                )
        if num is None:
            raise ConfigError(f"{where} draws from a space: say how many members, as in num=64.")
        check_int(f"{where}: key", key, 0)
        return listed(random(check_int(f"{where}: num", num, 1, MOST_DRAWS), key, **given))

    def check(self) -> None:
        """Raises ConfigError unless ``shares`` ascend to 1 and ``scales`` are known."""
        shares = [*self.shares]
        if not shares or shares != sorted({*shares}) or shares[0] <= 0 or shares[-1] != 1:
            raise ConfigError(f"the searcher {self.name} has shares {self.shares}, and they must ascend to 1.")
        if unknown := [scale for scale in self.scales.values() if scale not in SCALES]:
            known = ", ".join(SCALES)
            raise ConfigError(f"the searcher {self.name} has the scale {unknown[0]!r}, and there are {known}.")

    @property
    def description(self) -> dict[str, Any]:
        """What identifies it in a record."""
        return {"name": self.name, **self.settings}

    def check_proposals(self, proposals: Iterable[Any], count: int, paused: Iterable[int]) -> list[Proposal]:
        """Returns the ``proposals``; ConfigError, naming the searcher, if it may not propose them."""
        proposals, left = [*proposals], {*paused}
        if sum(not isinstance(one, Drop) for one in proposals) > count:
            raise ConfigError(f"the searcher {self.name} proposed more than the {count} members it was asked for.")
        for one in proposals:
            if not isinstance(one, Propose | Promote | Fork | Drop):
                raise ConfigError(
                    f"the searcher {self.name} proposed {one!r:.60}, and must propose Propose, Promote, Fork or Drop."
                )
            if not isinstance(one, Propose) and one.member not in left:
                raise ConfigError(f"the searcher {self.name} proposed {one!r:.60}, and that member is not paused.")
            if isinstance(one, Propose | Fork) and {*one.point} != {*self.scales}:
                fields = ", ".join(self.scales)
                raise ConfigError(
                    f"the searcher {self.name} proposed {one!r:.60}, and must set the fields of its scales: {fields}."
                )
            if isinstance(one, Fork) and not self.copies:
                raise ConfigError(f"the searcher {self.name} proposed {one!r:.60}: create it with copies=True.")
            if isinstance(one, Promote | Drop):
                left.discard(one.member)
        return proposals

    def check_verdicts(self, verdicts: Sequence[Any], reports: Sequence[Reached]) -> list[Verdict]:
        """Returns the ``verdicts``; ConfigError, naming the searcher, unless there is a valid one for each report."""
        wrong = [one for one in verdicts if one not in ("continue", "pause", "stop", "finish")]
        if wrong or len(verdicts) != len(reports):
            raise ConfigError(
                f"the searcher {self.name} answered {len(reports)} reports with {list(verdicts)!r:.80}, and must "
                "answer each with continue, pause, stop or finish."
            )
        return list(verdicts)


def listed(points: Points) -> Searcher:
    """Returns the searcher that trains every point to the end, in their order."""

    def ask(started: int, count: int) -> tuple[int, list[Propose]]:
        chosen = points.points[started : started + count]
        return started + len(chosen), [Propose(point) for point in chosen]

    settings = {"points": [dict(point) for point in points.points], "scales": dict(points.scales)}
    return Searcher("points", lambda: 0, ask, scales=points.scales, num=len(points), settings=settings)


def rungs(eta: int, min_fraction: float, most: float = math.inf) -> tuple[float, ...]:
    """The ends of rungs as shares of a run, ascending to 1, each ``eta`` times the one before; for ``most`` members."""
    number = min(math.log(max(1.0, most), eta), math.log(1 / min_fraction, eta))
    return tuple(eta ** -float(left) for left in range(math.floor(number + 1e-9), -1, -1))


class _Rungs(NamedTuple):
    """The state of ASHA; keys of mappings are bracket and rung."""

    source: Any
    reached: Mapping[tuple[int, int], Mapping[int, float]]  # the value of each member that got there
    promoted: Mapping[tuple[int, int], frozenset[int]]  # those that went on, or ended there
    started: int = 0
    running: frozenset[int] = frozenset()  # the members in training


def asha(
    points: Any, num: int | None = None, key: int = 0, *, eta: int = 3, min_fraction: float = 0.03, brackets: int = 1
) -> Searcher:
    """Returns asynchronous successive halving: a free lane gets the best paused member, or a new one.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2020. Members pause at rungs, 1/27, 1/9 and 1/3
    of their steps for ``eta=3``. A member is promoted when it is among the best ``1/eta`` that reached its rung so far.
    With few members there are fewer rungs, and the best member is always trained to the end. Schedules are the
    schedules of a full run, cut off. Several brackets take turns. In bracket ``b`` the first rung is number ``b``: this
    is safer if short runs mislead, and more expensive.

    >>> space = {"learning_rate": jn.search.log_uniform(1e-4, 1e-1), "dropout": jn.search.uniform(0.0, 0.5)}
    >>> jn.search.asha(space, num=64).shares
    (0.037..., 0.111..., 0.333..., 1.0)

    Args:
        points: what `grid`, `random` and `sobol` make, a dict of distributions as `random` takes, or another searcher
            that proposes new members, such as `tpe`.
        num: the number of members drawn from a dict.
        key: determines these draws.
        eta: the reduction factor: one of ``eta`` members is promoted; at least 2.
        min_fraction: the least length of the first rung, as a share of a run, at least 1e-6 and at most 1.
        brackets: the number of brackets, at most the number of rungs.

    Raises:
        ConfigError: a value is not as above.
    """
    source = proposing("asha", points, num, key)
    shares = _checked_rungs("asha", eta, min_fraction, source.num or math.inf)
    if check_int("asha: brackets", brackets) > len(shares):
        raise ConfigError(f"asha has {brackets} brackets and {len(shares)} rungs: lower brackets, or min_fraction.")
    last = len(shares) - 1

    def ask(state: _Rungs, count: int) -> tuple[_Rungs, list[Proposal]]:
        promoted, proposals = dict(state.promoted), list[Proposal]()
        for place in sorted(state.reached, key=lambda place: (-place[1], place[0])):
            values, gone = state.reached[place], promoted.get(place, frozenset())
            best = sorted((value, member) for member, value in values.items())[: len(values) // eta]
            chosen = [member for value, member in best if member not in gone and math.isfinite(value)]
            chosen = chosen[: count - len(proposals)] if place[1] < last else []
            promoted[place] = gone | {*chosen}
            proposals += [Promote(member) for member in chosen]
        inner, new = source.ask(state.source, count - len(proposals)) if len(proposals) < count else (state.source, [])
        proposals += new
        at_end = (value for (_, rung), values in state.reached.items() if rung == last for value in values.values())
        if count and not proposals and not state.running and not any(map(math.isfinite, at_end)):
            # Nothing is left, and too few came to a rung to promote one of ``eta``: promote the best one alone.
            proposals += _best_left(state.reached, promoted)
        running = {one.member for one in proposals if isinstance(one, Promote)}
        running |= {*range(state.started, state.started + len(new))}
        state = _Rungs(inner, state.reached, promoted, state.started + len(new), state.running | running)
        return state, proposals

    def tell(state: _Rungs, reports: Sequence[Reached]) -> tuple[_Rungs, list[Verdict]]:
        inner, theirs = source.tell(state.source, reports)
        reached = {place: dict(values) for place, values in state.reached.items()}
        promoted, verdicts = dict(state.promoted), list[Verdict]()
        for report, verdict in zip(reports, theirs, strict=True):
            bracket = report.member % brackets
            rung = max(shares.index(report.share), bracket if report.over else 0)
            if rung >= bracket:
                reached.setdefault((bracket, rung), {})[report.member] = report.value
                for other in reached if report.over else ():
                    if report.member in reached[other]:  # it cannot be promoted
                        promoted[other] = promoted.get(other, frozenset()) | {report.member}
                verdict = "stop" if verdict == "stop" else "pause"
            verdicts.append(verdict)
        ended = {
            one.member for one, verdict in zip(reports, verdicts, strict=True) if one.over or verdict != "continue"
        }
        return _Rungs(inner, reached, promoted, state.started, state.running - ended), verdicts

    settings = {"eta": eta, "min_fraction": min_fraction, "brackets": brackets, "of": source.description}
    return source._replace(
        name="asha", init=lambda: _Rungs(source.init(), {}, {}), ask=ask, tell=tell, shares=shares, settings=settings
    )


def _best_left(reached: Any, promoted: dict[tuple[int, int], frozenset[int]]) -> list[Proposal]:
    """The best member of the highest rung that has one left, which is added to the ``promoted``; none if none has."""
    for place in sorted(reached, key=lambda place: (-place[1], place[0])):
        left = {member: value for member, value in reached[place].items() if member not in promoted[place]}
        if left and math.isfinite(min(left.values())):
            best = min(left, key=lambda member: (left[member], member))
            promoted[place] |= {best}
            return [Promote(best)]
    return []


class _Halves(NamedTuple):
    """The state of successive halving."""

    source: Any
    started: int = 0
    rung: int = 0  # that the members in training are to reach
    reached: int = 0  # that any of them reached: those that end in one window are one
    going: frozenset[int] = frozenset()  # those that have not yet reached it
    values: Mapping[int, float] = {}  # of those that have, finite
    over: frozenset[int] = frozenset()
    queue: tuple[Promote, ...] = ()  # survivors that wait for a lane


def halving(points: Any, eta: int = 3, *, num: int | None = None, key: int = 0, min_fraction: float = 0.01) -> Searcher:
    """Returns successive halving: the best ``1/eta`` of the members train ``eta`` times as far, and so on.

    Jamieson & Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016. With 27
    members and ``eta=3``, 27 train to 1/27 of the steps, 9 to 1/9, 3 to 1/3 and 1 to the end: the work of 3 full runs.
    Members are ranked one by one, each seed by itself, by the monitored metric. Schedules are the schedules of a full
    run, cut off. Lanes idle while the last members of a rung are trained; `asha` keeps them in use.

    Arguments and errors are those of `asha`.

    >>> jn.search.halving(jn.grid(seed=range(4)), eta=2).shares
    (0.25, 0.5, 1.0)
    """
    source = proposing("halving", points, num, key)
    if source.num is None:
        raise ConfigError("halving ranks all members of a rung together, so it needs a number of them: use asha.")
    shares = _checked_rungs("halving", eta, min_fraction, source.num)

    def ask(state: _Halves, count: int) -> tuple[_Halves, list[Proposal]]:
        inner, new = source.ask(state.source, count) if state.rung == 0 else (state.source, [])
        numbers = range(state.started, state.started + len(new))
        state = state._replace(source=inner, started=state.started + len(new), going=state.going | {*numbers})
        dropped = list[Proposal]()
        if not state.going and not state.queue and state.reached < len(shares) - 1:
            # Of all that were started: a member that diverged leaves its place to the next best.
            number = -(-state.started // eta ** (state.reached + 1))
            best = sorted(state.values, key=lambda member: (state.values[member], member))[:number]
            kept = [member for member in best if member not in state.over]
            dropped = [Drop(member) for member in state.values if member not in {*best, *state.over}]
            queue = tuple(map(Promote, kept))
            state = state._replace(rung=state.reached + 1, going=frozenset(kept), values={}, queue=queue)
        first, rest = state.queue[: count - len(new)], state.queue[count - len(new) :]
        return state._replace(queue=rest), [*dropped, *new, *first]

    def tell(state: _Halves, reports: Sequence[Reached]) -> tuple[_Halves, list[Verdict]]:
        inner, _ = source.tell(state.source, reports)
        going = state.going - {report.member for report in reports}
        values = {report.member: report.value for report in reports if math.isfinite(report.value)}
        over = state.over | {report.member for report in reports if report.over}
        queue = tuple(one for one in state.queue if one.member not in over)
        rung = max([state.rung, *(shares.index(report.share) for report in reports if not report.over)])
        values = {**state.values, **values}
        state = state._replace(source=inner, going=going, values=values, over=over, queue=queue, reached=rung)
        return state, ["pause"] * len(reports)

    settings = {"eta": eta, "min_fraction": min_fraction, "of": source.description}
    return source._replace(
        name="halving", init=lambda: _Halves(source.init()), ask=ask, tell=tell, shares=shares, settings=settings
    )


def proposing(where: str, given: Any, num: int | None, key: int) -> Searcher:
    """Returns the searcher of new points that another one prunes; ConfigError if it compares members itself."""
    source = Searcher.of(where, given, num, key)
    if source.shares != (1.0,):
        raise ConfigError(f"{where} takes points or a searcher that only proposes them, and {source.name} prunes too.")
    return source


def _checked_rungs(where: str, eta: int, min_fraction: float, most: float = math.inf) -> tuple[float, ...]:
    check_int(f"{where}: eta", eta, 2)
    if not 1e-6 <= min_fraction <= 1:
        raise ConfigError(f"{where}'s min_fraction is {min_fraction!r}, and must be in 1e-6…1.")
    return rungs(eta, min_fraction, most)
