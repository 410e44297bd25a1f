"""A search on learning curves that are known: to try a searcher, and to compare several."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxnn.search._searchers import Drop, Fork, Promote, Propose, Reached, Searcher
from jaxnn.types import check_int


class SimulatedMember(NamedTuple):
    """A member of a simulated search."""

    point: Mapping[str, Any]
    status: str  # ``running``, ``paused``, ``pruned``, ``finished`` or ``stopped early``
    share: float  # of its steps that are done
    value: float  # at that share; the lower the better
    start: float = 0.0  # the share that it continued from, if it is a fork


class Simulation(NamedTuple):
    """What a search did on known learning curves; `simulate` returns it.

    >>> found = jn.search.simulate(jn.search.asha(jn.grid(seed=range(8)), eta=2), lambda point, share: point["seed"])
    >>> found.best().point
    {'seed': 0}

    Attributes:
        members: in the order of their numbers.
        cost: the steps of all members together, in runs.
        events: each proposal, and each report with its verdict, in order.
    """

    members: tuple[SimulatedMember, ...]
    cost: float
    events: tuple[Any, ...]

    def best(self) -> SimulatedMember:
        """The complete member of the lowest value; of those furthest trained if none is complete."""

        def rank(member: SimulatedMember) -> tuple[bool, float, float]:
            complete = member.status in ("finished", "stopped early") and math.isfinite(member.value)
            return not complete, 0.0 if complete else -member.share, member.value

        return min(self.members, key=rank)


def simulate(
    searcher: Searcher,
    curve: Callable[[Mapping[str, Any], float], float],
    *,
    lanes: int = 8,
    ends: Sequence[float] | None = None,
) -> Simulation:
    """Runs a searcher on learning curves, without training.

    Members in ``lanes`` progress at equal speed; ``curve(point, share)`` is the value of a point after a ``share`` of
    its steps, the lower the better, and infinite if it diverged. ``ends`` are where the searcher's shares end if they
    do so at ends of windows; default: the shares. ConfigError if the searcher proposes what it may not.

    >>> points = jn.grid(learning_rate=[0.1, 0.2, 0.4, 0.8])
    >>> found = jn.search.simulate(jn.search.halving(points, 2), lambda point, share: point["learning_rate"] - share)
    >>> found.best().point, found.cost
    ({'learning_rate': 0.1}, 2.0)
    """
    searcher.check()
    check_int("simulate: lanes", lanes)
    state, members, events = searcher.init(), list[SimulatedMember](), list[Any]()
    ends = searcher.shares if ends is None else ends
    running: list[tuple[float, int]] = []  # when a member reaches its next share, and its number
    paused = set[int]()
    now = cost = 0.0

    def begin(number: int) -> None:
        share = members[number].share
        target = next(one for one in ends if one > share + 1e-9)
        members[number] = members[number]._replace(status="running")
        paused.discard(number)
        heapq.heappush(running, (now + target - share, number))

    while True:
        state, proposals = searcher.ask(state, lanes - len(running))
        for one in searcher.check_proposals(proposals, lanes - len(running), paused):
            events.append(one)
            match one:
                case Propose(point):
                    members.append(SimulatedMember(point, "running", 0.0, math.inf))
                    begin(len(members) - 1)
                case Fork(donor, point):
                    members.append(members[donor]._replace(point=point, start=members[donor].share))
                    begin(len(members) - 1)
                case Promote(number):
                    begin(number)
                case Drop(number):
                    members[number] = members[number]._replace(status="pruned")
                    paused.discard(number)
        if not running and not proposals:
            return Simulation(tuple(members), cost, tuple(events))
        if not running:
            continue
        now, reports = running[0][0], list[Reached]()
        while running and running[0][0] <= now + 1e-9:
            _, number = heapq.heappop(running)
            member = members[number]
            share = next(one for one in ends if one > member.share + 1e-9)
            reached = searcher.shares[sum(one <= share + 1e-9 for one in ends) - 1]
            value, cost = float(curve(member.point, share)), cost + share - member.share
            value = math.inf if math.isnan(value) else value
            over = share >= 1 or not math.isfinite(value)
            members[number] = member._replace(status="finished" if over else "running", share=share, value=value)
            reports.append(Reached(number, reached, value, over))
        state, verdicts = searcher.tell(state, reports)
        for report, verdict in zip(reports, searcher.check_verdicts(verdicts, reports), strict=True):
            events.append((report, verdict))
            if report.over:
                continue
            if verdict == "continue":
                begin(report.member)
            else:
                status = {"pause": "paused", "stop": "pruned", "finish": "stopped early"}[verdict]
                members[report.member] = members[report.member]._replace(status=status)
                paused |= {report.member} if verdict == "pause" else set()
