"""Intervals, and evidence that may be looked at while it grows: all statistics that jaxnn prints of seeds."""

import bisect
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

ENOUGH_EQUAL = 6  # the least number of equal values that are evidence
ROUNDING = 1e-6  # deviations below this share of the values are rounding
MOST_SEEDS = 1_000_000
PRIOR = 1.0  # variance, in units of the variance of one difference, of the effects for which the t evidence is best
# Strengths of the bets on the sign of a difference, by its rank; the evidence is the mean over them.
BETS = np.array([sign * strength for strength in (0.5, 1.0, 2.0, 4.0) for sign in (1, -1)])
CENTRES = 200  # values of the effect at which the interval by ranks is tried, twice


def mean_interval(values: ArrayLike, scale: float | None = None, level: float = 0.95) -> tuple[float, float]:
    """Returns the interval of the mean of ``values [n]`` by Student's t: mean ± t((1 + level) / 2; n - 1) · s / √n.

    It holds the mean of normally distributed values in a share ``level`` of all cases, from two on. Its ends are NaN
    for fewer than two, and for fewer than six equal ones, which are no evidence: five differences have one sign by
    chance in 6 % of all cases (2 · 0.5⁵). Deviations below a millionth of ``scale``, by default the largest value, are
    rounding.
    """
    values = np.asarray(values, float)
    if (n := len(values)) < 2:
        return math.nan, math.nan
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if deviation <= ROUNDING * (np.abs(values).max() if scale is None else scale):
        end = mean if n >= ENOUGH_EQUAL else math.nan
        return end, end
    half = float(stdtrit(n - 1, (1 + level) / 2)) * deviation / math.sqrt(n)
    return mean - half, mean + half


def mean_difference(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> tuple[float, float, float, float]:
    """Returns the mean of ``b - a``, both ``[pairs]``, its interval by Student's t, and the standard deviation.

    The ends of the interval are NaN for fewer than two pairs or fewer than six equal differences; the standard
    deviation is that of one pair's difference, NaN for fewer than two pairs.
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    mean, scale = float((b - a).mean()), float(max(np.abs(a).max(), np.abs(b).max()))
    deviation = float((b - a).std(ddof=1)) if len(a) > 1 else math.nan
    return mean, *mean_interval(b - a, scale, level), 0.0 if deviation <= ROUNDING * scale else deviation


def seeds_needed(difference: float, deviation: float) -> int | None:
    """Returns how many pairs a two-sided paired t-test at 5 % needs to detect a difference of means with power 0.8.

    The least n of at least 2 with ``n >= ((t(0.975) + t(0.8)) * deviation / difference)²``, both t of n - 1 degrees of
    freedom, ``deviation`` that of one pair's difference; None if it is more than a million.
    """
    from scipy.special import stdtrit

    def enough(n: int) -> bool:
        quantiles = float(stdtrit(n - 1, (0.975, 0.8)).sum())
        return difference != 0 and math.sqrt(n) * abs(difference) >= quantiles * deviation

    found = 2 + bisect.bisect_left(range(2, MOST_SEEDS + 1), True, key=enough)
    return found if found <= MOST_SEEDS else None


class Evidence(NamedTuple):
    """Evidence after each pair, all ``[pairs]``, that the mean or the centre of differences is not 0.

    Without an effect the probability that ``exp(log)`` ever reaches ``1 / alpha`` is at most ``alpha``, and the
    interval holds the effect at all pairs at once with probability ``1 - alpha`` or more (Ville's inequality): both may
    be looked at after each pair, and training may stop for what they show.
    """

    log: np.ndarray  # natural logarithm of the e-value
    low: np.ndarray  # lower end of the interval of the effect, of all intervals so far; -inf at first
    high: np.ndarray  # its upper end


def t_evidence(differences: ArrayLike, alpha: float, scale: float = 0.0) -> Evidence:
    """Returns the evidence of ``differences [pairs]`` by t: for their mean, if they are normally distributed.

    The likelihood ratio of the t statistic, for effects that are normally distributed with variance 1 in units of a
    difference's standard deviation, against none (Pérez-Ortiz, Lardy, de Heide and Grünwald 2024, "E-statistics, group
    invariance and anytime-valid testing"; Wang and Ramdas 2025, "Anytime-valid t-tests and confidence sequences for
    Gaussian means with unknown variance"). There is none before six pairs, as in `mean_interval`. Heavier tails than
    normal ones make it weaker, not wrong; skewed differences make it wrong. Deviations below a millionth of ``scale``
    are rounding, and differences that are equal so far are judged by `rank_evidence`.
    """
    values = np.asarray(differences, float)
    n = np.arange(1, len(values) + 1)
    mean = np.cumsum(values) / n
    least = n * (ROUNDING * np.maximum(scale, np.abs(mean))) ** 2
    squares = np.cumsum(values**2) - n * mean**2
    # Equal differences say nothing of the deviation: then their signs decide.
    equal = (squares <= least) & (n > 1)
    squares = np.maximum(squares, least)
    ratio = n * mean**2 / np.maximum(squares, np.finfo(float).tiny)
    more = 1 + n * PRIOR
    log = n / 2 * (np.log1p(ratio) - np.log1p(ratio / more)) - np.log(more) / 2
    wide = (np.sqrt(more) / alpha) ** (2 / n)
    with np.errstate(divide="ignore", invalid="ignore"):
        half = np.sqrt(np.where(wide < more, squares / n * (wide - 1) / (1 - wide / more), math.inf))
    early = n < ENOUGH_EQUAL
    log, half = np.where(early, 0, log), np.where(early, math.inf, half)
    low, high = mean - half, mean + half
    if equal.any():
        pairs = zip(rank_evidence(values, alpha), (log, low, high), strict=True)
        log, low, high = (np.where(equal, by_ranks, by_t) for by_ranks, by_t in pairs)
    return Evidence(log, np.maximum.accumulate(low), np.minimum.accumulate(high))


def rank_evidence(differences: ArrayLike, alpha: float) -> Evidence:
    """Returns the evidence of ``differences [pairs]`` by their signs and ranks: for their centre of symmetry.

    Each difference is a bet on its sign, the higher the larger it is among those so far, which is fair if differences
    are symmetric about 0. Differences of two experiments that do the same are, of any distribution (Vovk and Wang
    2024, "Nonparametric e-tests of symmetry"). The interval has the centres against which there is no evidence.
    """
    values = np.asarray(differences, float)
    log = _rank_log(values[None])[0]
    low, high = np.full(len(values), -math.inf), np.full(len(values), math.inf)
    width = float(np.ptp(values)) or float(np.abs(values).max(initial=0))
    if not width:
        return Evidence(log, low, high)
    ends = float(values.min()) - width, float(values.max()) + width
    for _ in range(2):  # then more finely, about the ends that were found
        # The differences are among the centres: if all are equal, no other centre is left.
        centres = np.union1d(np.linspace(*ends, CENTRES), values[(values > ends[0]) & (values < ends[1])])
        kept = np.maximum.accumulate(_rank_log(values[None] - centres[:, None]), axis=1) < -math.log(alpha)
        for pair in range(len(values)):
            inside = np.flatnonzero(kept[:, pair])
            # The ends lie between a centre that is left and its neighbour.
            if len(inside) and inside[0] > 0:
                low[pair] = centres[inside[0] - 1]
            if len(inside) and inside[-1] + 1 < len(centres):
                high[pair] = centres[inside[-1] + 1]
        if not (math.isfinite(low[-1]) and math.isfinite(high[-1])):
            break
        ends = low[-1], high[-1]
    return Evidence(log, np.maximum.accumulate(low), np.minimum.accumulate(high))


def _rank_log(values: np.ndarray) -> np.ndarray:
    """The logarithm of the evidence by ranks after each of ``values [..., pairs]``."""
    sizes, ranks = np.abs(values), np.zeros(values.shape)
    for pair in range(values.shape[-1]):
        before, own = sizes[..., : pair + 1], sizes[..., pair : pair + 1]
        ranks[..., pair] = ((before < own).sum(-1) + ((before == own).sum(-1) + 1) / 2) / (pair + 1)
    bets = BETS.reshape(-1, *[1] * values.ndim) * ranks
    logs = np.cumsum(bets * np.sign(values) - np.where(values == 0, 0, np.log(np.cosh(bets))), axis=-1)
    return np.asarray(np.logaddexp.reduce(logs, axis=0) - math.log(len(BETS)))


def online_level(alpha: float, number: int, discoveries: int) -> float:
    """Returns the level at which decision ``number``, from 1, of a session is made, after ``discoveries``.

    A decision whose evidence reaches ``1 / level`` is a discovery; the expected share of false ones among them is at
    most ``alpha``, also if decisions share a baseline (e-LOND: Xu and Ramdas 2024, "Online multiple testing with
    e-values"; its weights are those of Javanmard and Montanari 2018).
    """
    weight = 0.0772 * math.log(max(number, 2)) / (number * math.exp(math.sqrt(math.log(number))))
    return alpha * weight * (discoveries + 1)
