"""Population based training: the worst members continue from the states of the best, with other values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.search._distributions import Distribution, described_space
from jaxnn.search._points import random
from jaxnn.search._searchers import MOST_DRAWS, Drop, Fork, Promote, Proposal, Propose, Reached, Searcher, Verdict
from jaxnn.types import ConfigError, check_int

MOST_GENERATIONS = 10_000


class _Generation(NamedTuple):
    """The state of population based training."""

    number: int = 0  # of the share that its members are to reach
    started: int = 0
    points: Mapping[int, Mapping[str, Any]] = {}  # of each living member
    going: frozenset[int] = frozenset()  # those that have not yet reached it
    values: Mapping[int, float] = {}  # of those that have
    over: frozenset[int] = frozenset()
    queue: tuple[Proposal, ...] = ()  # that wait for a lane


def pbt(space: Mapping[str, Any], num: int, key: int = 0, *, generations: int = 10, quantile: float = 0.25) -> Searcher:
    """Returns population based training: values change while members train, and the best members spread.

    Jaderberg et al., "Population Based Training of Neural Networks", 2017. After each of ``generations`` equal parts of
    the steps all members are ranked, and the worst ``quantile`` end. Each is replaced by a new member that continues
    from the state of one of the best, drawn at random, with its values times 0.8 or 1.2; a choice is drawn again. Only
    floats and seeds can be searched, which vary within one program; ``search.jsonl`` records the lineage.

    >>> jn.search.pbt({"learning_rate": jn.search.log_uniform(1e-3, 1.0)}, num=16, generations=4).shares
    (0.25, 0.5, 0.75, 1.0)

    Args:
        space: distributions and lists by field, as `random` takes.
        num: the size of the population, at least 2.
        key: a seed, which determines all draws.
        generations: the number of parts of a run, at least 2.
        quantile: the share of members that are replaced, above 0 and at most 0.5.

    Raises:
        ConfigError: a value is not as above.
    """
    check_int("pbt: num", num, 2, MOST_DRAWS)
    check_int("pbt: generations", generations, 2, MOST_GENERATIONS)
    if not 0 < quantile <= 0.5:
        raise ConfigError(f"pbt's quantile is {quantile!r}, and must be above 0 and at most 0.5.")
    if not isinstance(space, Mapping):
        raise ConfigError(
            "pbt perturbs values, so it needs a space, as in {'learning_rate': jn.search.log_uniform(1e-3, 1.0)}."
        )
    points = random(num, key, **space)
    shares = tuple((number + 1) / generations for number in range(generations))

    def perturbed(point: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        axes = {name: axis for name, axis in space.items() if isinstance(axis, Distribution)}
        return {name: axes[name].near(value, rng) if name in axes else value for name, value in point.items()}

    def next_generation(state: _Generation) -> _Generation:
        rng = np.random.default_rng((key, state.number))
        living = [member for member in state.points if member not in state.over]
        ranked = sorted(living, key=lambda member: (state.values.get(member, math.inf), member))
        lost = [member for member in state.points if member not in living and not math.isfinite(state.values[member])]
        cut = max(1, int(quantile * len(state.points)))
        worst = ranked[len(ranked) - min(cut, len(ranked) // 2) :]
        best, forks = ranked[: max(1, min(cut, len(ranked) - len(worst)))], list[Fork]()
        for _ in [*worst, *lost] if ranked else ():
            donor = best[int(rng.integers(len(best)))]
            forks.append(Fork(donor, perturbed(state.points[donor], rng)))
        kept = {member: state.points[member] for member in living if member not in worst}
        new = {state.started + index: fork.point for index, fork in enumerate(forks)}
        # Forks first: a donor must not train on before.
        queue: tuple[Proposal, ...] = (*map(Drop, worst), *forks, *map(Promote, kept))
        points = {**kept, **new}
        return _Generation(state.number + 1, state.started + len(new), points, frozenset(points), queue=queue)

    def ask(state: _Generation, count: int) -> tuple[_Generation, list[Proposal]]:
        if not state.started:
            numbered = dict(enumerate(points.points))
            queue = tuple(map(Propose, points.points))
            state = _Generation(0, len(points), numbered, frozenset(numbered), queue=queue)
        if not state.going and not state.queue and state.number < generations - 1:
            state = next_generation(state)
        # What is dropped needs no lane.
        count += sum(isinstance(one, Drop) for one in state.queue)
        return state._replace(queue=state.queue[count:]), list(state.queue[:count])

    def tell(state: _Generation, reports: Sequence[Reached]) -> tuple[_Generation, list[Verdict]]:
        values = {report.member: report.value for report in reports}
        over = {report.member for report in reports if report.over}
        # Shares that end in one window are one generation; what ended is not promoted.
        number = max([state.number, *(shares.index(report.share) for report in reports if not report.over)])
        queue = tuple(one for one in state.queue if not isinstance(one, Promote) or one.member not in over)
        going = state.going - values.keys()
        state = state._replace(values={**state.values, **values}, going=going, over=state.over | over)
        state = state._replace(number=number, queue=queue)
        return state, ["pause"] * len(reports)

    settings = {
        **{"num": num, "key": key, "generations": generations, "quantile": quantile},
        "space": described_space(space),
    }
    return Searcher("pbt", _Generation, ask, tell, shares, points.scales, None, settings, copies=True)
