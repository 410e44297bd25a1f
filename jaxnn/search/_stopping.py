"""Stopping rules as searchers: members train side by side, and a rule ends those whose curves promise no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.search._searchers import Proposal, Reached, Searcher, Verdict, proposing
from jaxnn.types import ConfigError, check_int

type Curve = tuple[tuple[float, float], ...]  # the shares of its steps that a member reported at, and its values

MOST_REPORTS = 10_000
FEWEST_REPORTS = 4  # one more than the parameters of a power law
DRAWS = 100  # curves of a bootstrap
EXPONENTS = np.geomspace(0.05, 3.0, 48)  # of power laws that are tried


class _Curves(NamedTuple):
    """The state of a stopping rule."""

    source: Any
    curves: Mapping[int, Curve] = {}  # of each member that was not pruned and did not diverge


def patience(points: Any, num: int | None = None, key: int = 0, *, reports: int = 20, patience: int = 3) -> Searcher:
    """Returns a search that ends a member whose value has stopped improving, without a look at the others.

    Prechelt, "Early Stopping – But When?", 1998. Such a member counts as complete, as one of the option ``patience`` of
    a run does; its status is ``stopped early``.

    >>> jn.search.patience(jn.grid(seed=range(8)), reports=4, patience=2).shares
    (0.25, 0.5, 0.75, 1.0)

    Args:
        points: what `grid`, `random` and `sobol` make, a dict of distributions as `random` takes, or another searcher
            that proposes new members, such as `tpe`.
        num: the number of members drawn from a dict.
        key: determines these draws.
        reports: the number of reports of a run, after equal parts of its steps, at least 2.
        patience: a member ends after this many reports without a new best value, at least 1.

    Raises:
        ConfigError: a value is not as above.
    """
    check_int("patience: patience", patience)

    def rule(member: int, curves: Mapping[int, Curve], leader: int) -> Verdict:
        values = [value for _, value in curves[member]]
        before, last = values[:-patience], values[-patience:]
        return "finish" if before and min(last) >= min(before) else "continue"

    return _stopping("patience", proposing("patience", points, num, key), reports, rule, {"patience": patience})


def extrapolated(
    points: Any, num: int | None = None, key: int = 0, *, reports: int = 20, first: int = 5, confidence: float = 0.95
) -> Searcher:
    """Returns a search that prunes a member when its extrapolated learning curve ends above the best value so far.

    Domhan, Springenberg & Hutter, "Speeding Up Automatic Hyperparameter Optimization of Deep Neural Networks by
    Extrapolation of Learning Curves", 2015, with one power law in place of their eleven curves, as in Kadra et al.,
    "Scaling Laws for Hyperparameter Optimization", 2023. The value after a share t of the steps is fitted as
    a + b · t⁻ᶜ with b ≥ 0. A bootstrap of the residuals, divided by their degrees of freedom, has the band of the last
    value. A member is pruned if that band lies above the latest value of the best member that is not pruned.
    Learning rates that decay bend curves down at their end, which no power law foresees.

    >>> jn.search.extrapolated(jn.grid(seed=range(8)), reports=4, first=4).name
    'extrapolated'

    Args:
        points: as for `patience`.
        num: as for `patience`.
        key: determines the draws of points, and of the bootstrap.
        reports: as for `patience`.
        first: no member is pruned before this report, at least 4.
        confidence: the share of the band that lies above its lower end, above 0.5 and below 1.

    Raises:
        ConfigError: a value is not as above.
    """
    source = proposing("extrapolated", points, num, key)
    check_int("extrapolated: first", first, FEWEST_REPORTS)
    if not 0.5 < confidence < 1:
        raise ConfigError(f"extrapolated's confidence is {confidence!r}, and must be above 0.5 and below 1.")

    def rule(member: int, curves: Mapping[int, Curve], leader: int) -> Verdict:
        curve = curves[member]
        if member == leader or len(curve) < first:
            return "continue"
        ends = power_law_ends(curve, np.random.default_rng((key, member, len(curve))))
        return "stop" if np.quantile(ends, 1 - confidence) > curves[leader][-1][1] else "continue"

    return _stopping("extrapolated", source, reports, rule, {"first": first, "confidence": confidence, "key": key})


def power_law_ends(curve: Curve, rng: np.random.Generator) -> np.ndarray:
    """Returns `DRAWS` values at the end of a ``curve`` of at least 4 reports, by the power law a + b · t⁻ᶜ."""
    shares, values = np.array(curve).T
    powers = shares ** -EXPONENTS[:, None]  # [exponents, n]; all are 1 at the end
    means = powers.mean(axis=1)
    centred = powers - means[:, None]
    squares = (centred**2).sum(axis=1)

    def fitted(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ends of ``curves [draws, n]`` and their fits ``[draws, n]``, by least squares."""
        level, products = curves.mean(axis=1), curves @ centred.T
        slopes = np.maximum(0.0, products / squares)  # [draws, exponents]
        found = np.argmin(slopes * (slopes * squares - 2 * products), axis=1)
        slope = slopes[np.arange(len(curves)), found]
        return level + slope * (1 - means[found]), level[:, None] + slope[:, None] * centred[found]

    (_, (fit,)), n = fitted(values[None]), len(values)
    residuals = (values - fit) * math.sqrt(n / (n - 3))
    ends, _ = fitted(fit + rng.choice(residuals, (DRAWS, n)))
    return ends + rng.choice(residuals, DRAWS)  # the value at the end has a residual too


def _stopping(
    name: str,
    source: Searcher,
    reports: int,
    rule: Callable[[int, Mapping[int, Curve], int], Verdict],
    settings: Mapping[str, Any],
) -> Searcher:
    """A searcher that ends members by ``rule(member, curves, leader)``; the leader has the lowest latest value."""
    check_int(f"{name}: reports", reports, 2, MOST_REPORTS)

    def ask(state: _Curves, count: int) -> tuple[_Curves, list[Proposal]]:
        inner, new = source.ask(state.source, count)
        return state._replace(source=inner), list(new)

    def tell(state: _Curves, told: Sequence[Reached]) -> tuple[_Curves, list[Verdict]]:
        curves, verdicts = dict(state.curves), list[Verdict]()
        for one in told:
            curves[one.member] = (*curves.get(one.member, ()), (one.share, one.value))
        curves = {member: curve for member, curve in curves.items() if math.isfinite(curve[-1][1])}
        leader = min(curves, key=lambda member: (curves[member][-1][1], member), default=-1)
        for one in told:
            verdict = "continue" if one.over or one.member not in curves else rule(one.member, curves, leader)
            verdicts.append(verdict)
        # The source, as Optuna, gets one value of each member.
        ended = [
            one._replace(over=one.over or verdict == "finish")
            for one, verdict in zip(told, verdicts, strict=True)
            if one.over or verdict != "continue"
        ]
        inner, _ = source.tell(state.source, ended) if ended else (state.source, ())
        pruned = {one.member for one, verdict in zip(told, verdicts, strict=True) if verdict == "stop"}
        return _Curves(inner, {member: curve for member, curve in curves.items() if member not in pruned}), verdicts

    shares = tuple((number + 1) / reports for number in range(reports))
    settings = {"reports": reports, **settings, "of": source.description}
    return source._replace(
        name=name, init=lambda: _Curves(source.init()), ask=ask, tell=tell, shares=shares, settings=settings
    )
