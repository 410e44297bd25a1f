"""The tree-structured Parzen estimator: new members near the best ones so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.search._distributions import Distribution, check_space, described_space
from jaxnn.search._searchers import Propose, Reached, Searcher, Verdict
from jaxnn.types import check_int

STARTUP = 10  # reports before which members are random
CANDIDATES = 24  # draws near the best members, of which the most promising one is proposed
GOOD = 0.1, 25  # how many members are good: this share of those that reported, and at most so many
OTHERS = 250  # others, at least, taken evenly from all, so that a proposal takes as long however many there are


class _Members(NamedTuple):
    """The state: what is known of each member."""

    places: np.ndarray  # [members, fields], from 0 to 1, as `Distribution.at` takes them; NaN: not drawn
    shares: np.ndarray  # [members], of its steps at its latest report, 1 if it ended; 0: none yet
    values: np.ndarray  # [members], of that report


def tpe(space: Mapping[str, Any], num: int, key: int = 0) -> Searcher:
    """Returns a search whose next points are near the best so far: a tree-structured Parzen estimator.

    Bergstra et al., "Algorithms for Hyper-Parameter Optimization", 2011; with the kernels of Optuna's. Of 24 draws
    near the best tenth of the members the one is proposed that is the likeliest there compared with the others. Members
    that reached more of their steps are better than others, so that it proposes well for `asha`. Members in training
    count as bad ones, so that many can be asked for at once. The first members are random.

    >>> space = {"learning_rate": jn.search.log_uniform(1e-4, 1e-1), "depth": jn.search.integers(1, 4)}
    >>> searcher = jn.search.asha(jn.search.tpe(space, num=64))

    Args:
        space: by field a distribution, or a function of the fields that are drawn before, a dict, to a distribution or
            a value.
        num: the number of members.
        key: a seed, which determines all draws.

    Raises:
        ConfigError: ``num`` or ``key`` is not as above, or a field is a list.
    """
    check_int("tpe: num", num)
    check_int("tpe: key", key, 0)
    scales = check_space("tpe", space)
    names = sorted(space, key=lambda name: callable(space[name]))
    together = [name for name in names if not callable(space[name])]

    def init() -> _Members:
        return _Members(np.zeros((0, len(names))), np.zeros(0), np.zeros(0))

    def ask(state: _Members, count: int) -> tuple[_Members, list[Propose]]:
        started = len(state.shares)
        new = max(0, min(count, num - started))
        rng = np.random.default_rng((key, started))
        good, others = _divided(state)
        places = np.full((new, len(names)), math.nan)
        axes, first = [space[name] for name in together], len(together)
        places[:, :first] = _likely(rng, axes, good[:, :first], others[:, :first], new)
        points = [
            {name: axis.at(place) for name, axis, place in zip(together, axes, row, strict=False)}
            for row in places.tolist()
        ]
        for column, name in enumerate(names[first:], first):
            near, far = (part[~np.isnan(part[:, column])][:, [column]] for part in (good, others))
            for row, point in zip(places, points, strict=True):
                point[name] = axis = space[name](dict(point))
                if isinstance(axis, Distribution):
                    row[column] = _likely(rng, [axis], near, far, 1)[0, 0]
                    point[name] = axis.at(float(row[column]))
        state = _Members(
            np.concatenate([state.places, places]),
            np.append(state.shares, np.zeros(new)),
            np.append(state.values, np.full(new, math.inf)),
        )
        return state, [Propose({name: point[name] for name in space}) for point in points]

    def tell(state: _Members, reports: Sequence[Reached]) -> tuple[_Members, list[Verdict]]:
        shares, values = state.shares.copy(), state.values.copy()
        for report in reports:
            shares[report.member] = 1.0 if report.over else report.share
            values[report.member] = report.value
        return _Members(state.places, shares, values), ["continue"] * len(reports)

    settings = {"num": num, "key": key, "space": described_space(space)}
    return Searcher("tpe", init, ask, tell, scales=scales, num=num, settings=settings, learns=True)


def _divided(state: _Members) -> tuple[np.ndarray, np.ndarray]:
    """The places of good members, none at the start, and those of the others, members in training included."""
    (reported,) = np.nonzero(state.shares)
    if len(reported) < STARTUP:
        return state.places[:0], state.places[:0]
    share, most = GOOD
    # A member that diverged is never good.
    order = np.lexsort((state.values[reported], -state.shares[reported], np.isinf(state.values[reported])))
    good = reported[order][: min(math.ceil(share * len(reported)), most)]
    good = good[np.isfinite(state.values[good])]
    others = np.delete(np.arange(len(state.shares)), good)
    others = others[:: max(1, len(others) // OTHERS)]
    return state.places[good], state.places[others]


def _likely(rng: np.random.Generator, axes: Sequence[Distribution], good: Any, others: Any, num: int) -> Any:
    """Places ``[num, fields]`` that are likely near the ``good`` ones ``[members, fields]`` compared with others."""
    if not len(good):
        return _settled(axes, rng.random((num, len(axes))))
    from scipy.special import ndtr, ndtri  # type: ignore[import-untyped]

    near = rng.integers(len(good) + 1, size=num * CANDIDATES)  # one more than there are: anywhere
    nearest = np.minimum(near, len(good) - 1)
    centres, widths = good[nearest], _widths(good)[nearest]
    low, high = ndtr(-centres / widths), ndtr((1 - centres) / widths)
    draws = centres + widths * ndtri(low + (high - low) * rng.random(centres.shape))
    anywhere = rng.random(centres.shape)
    for column, axis in enumerate(axes):
        if axis.kind == "choice":
            # The kernel of a choice is the value itself, but for one part in as many as there are kernels.
            same = rng.random(len(draws)) < len(good) / (len(good) + 1)
            draws[:, column] = np.where(same, centres[:, column], anywhere[:, column])
    draws = _settled(axes, np.where((near == len(good))[:, None], anywhere, draws).clip(0, np.nextafter(1, 0)))
    gains = _log_density(draws, axes, good) - _log_density(draws, axes, others)
    best = gains.reshape(num, CANDIDATES).argmax(axis=1)
    return draws[np.arange(num) * CANDIDATES + best]


def _settled(axes: Sequence[Distribution], places: np.ndarray) -> np.ndarray:
    """The places ``[members, fields]``, those of integers and choices in the middle of their parts."""
    for column, axis in enumerate(axes):
        if values := axis.num_values:
            places[:, column] = (np.floor(places[:, column] * values) + 0.5) / values
    return places


def _log_density(draws: np.ndarray, axes: Sequence[Distribution], members: np.ndarray) -> Any:
    """The logarithm ``[draws]`` of the sum of densities: of a kernel at each member, and of one that is even."""
    from scipy.special import ndtr

    widths, number = _widths(members), len(members)
    kernels = np.zeros((len(draws), number + 1))
    for column, axis in enumerate(axes):
        at, centres, width = draws[:, [column]], members[:, column], widths[:, column]
        if axis.kind == "choice":
            one, values = 1 / (number + 1), axis.num_values
            kernels[:, :-1] += np.log(np.where(at == centres, 1 + one, one) / (1 + values * one) * values)
            continue
        inside = np.log(ndtr((1 - centres) / width) - ndtr(-centres / width))
        if values := axis.num_values:
            half = 0.5 / values
            mass = ndtr((at + half - centres) / width) - ndtr((at - half - centres) / width)
            kernels[:, :-1] += np.log(np.maximum(mass, 1e-300) * values) - inside
        else:
            kernels[:, :-1] += -0.5 * ((at - centres) / width) ** 2 - np.log(width * math.sqrt(2 * math.pi)) - inside
    most = kernels.max(axis=1, keepdims=True)
    return np.log(np.exp(kernels - most).sum(axis=1)) + most[:, 0]


def _widths(members: np.ndarray) -> np.ndarray:
    """The standard deviations ``[members, fields]`` of kernels: the distance of the farther neighbour in a field."""
    number, fields = members.shape
    order = np.argsort(members, axis=0)
    ordered = np.take_along_axis(members, order, axis=0)
    gaps = np.diff(np.concatenate([np.zeros((1, fields)), ordered, np.ones((1, fields))]), axis=0)
    widths = np.maximum(gaps[:-1], gaps[1:])
    if number > 1:  # the ends of a field are no neighbours
        widths[0], widths[-1] = gaps[1], gaps[-2]
    widths = np.take_along_axis(widths, np.argsort(order, axis=0), axis=0)
    return widths.clip(1 / min(100, number + 2), 1)
