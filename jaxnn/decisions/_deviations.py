"""Standard deviations, their intervals and their shares of a total variance; the error of a metric by the jackknife."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

DRAWS = 5_000  # of each variance: an interval of 95 % then holds 94.5 to 95.5 % of them
MOST_BLOCKS = 10_000  # that the jackknife leaves out, one at a time; of more examples, several form a block
TAIL = 0.025  # on either side of an interval


@dataclasses.dataclass(frozen=True)
class Deviation:
    """A standard deviation and its 95 % interval.

    Attributes:
        value: the standard deviation; NaN if it is not known.
        interval: its ends; NaN if it is not known, or 0.
        draws: variances ``[draws]`` with which the data are compatible, whose quantiles are the interval's ends
            squared: the fiducial distribution of the variance (Weerahandi 1993, "Generalized confidence intervals").
    """

    value: float
    interval: tuple[float, float]
    draws: np.ndarray = dataclasses.field(repr=False)

    @classmethod
    def of_values(cls, values: np.ndarray, stream: int = 0) -> Self:
        """Returns the standard deviation of ``values [n]``, with n - 1 degrees of freedom, and its chi-square interval.

        The interval is exact for normally distributed values, and too narrow for heavy tails: of 16 values with
        Student's t distribution of 5 degrees of freedom it holds the truth in 85 % of all cases. Deviations of
        different samples need different ``stream`` numbers, so that their draws are independent.
        """
        from scipy.special import chdtri  # type: ignore[import-untyped]

        values = np.asarray(values, float)
        freedom = len(values) - 1
        deviation = math.nan if freedom < 1 else 0.0 if np.ptp(values) == 0 else float(values.std(ddof=1))
        if not deviation > 0:
            return cls(deviation, (math.nan, math.nan), np.full(DRAWS, deviation))
        low, high = (float(deviation * math.sqrt(freedom / chdtri(freedom, tail))) for tail in (TAIL, 1 - TAIL))
        chi_square = np.random.default_rng(stream).chisquare(freedom, DRAWS)
        return cls(deviation, (low, high), freedom * deviation**2 / chi_square)

    @classmethod
    def of_mean(cls, influence: np.ndarray, stream: int = 0) -> Self:
        """Returns the standard error of a metric over examples, from the ``influence [members, examples]`` of each.

        Squares are averaged over members. The interval takes the logarithm of the variance for normal, with an error
        that the fourth moments give. It is too narrow for accuracies with fewer than about ten errors, and for skewed
        losses of fewer than about a thousand examples: it holds 92 and 88 % for 3 errors, and for 100 exponential
        losses.
        """
        squares = (influence**2).mean(axis=0)
        count, mean = len(squares), float(squares.mean())
        if not mean > 0:
            return cls(0.0, (math.nan, math.nan), np.zeros(DRAWS))
        variance = (count - 1) * mean
        # The second term is of the next order: for accuracies near one half the first is 0.
        error = math.sqrt(float(squares.var()) / mean**2 / count + 2 / count**2)
        low, high = (math.sqrt(variance) * math.exp(sign * 1.96 * error / 2) for sign in (-1, 1))
        normal = np.random.default_rng(stream).standard_normal(DRAWS)
        return cls(math.sqrt(variance), (low, high), variance * np.exp(error * normal))

    @classmethod
    def together(cls, *parts: Deviation) -> Self:
        """Returns the deviation of a sum of independent ``parts``."""
        draws = np.sum([part.draws for part in parts], axis=0)
        value = math.sqrt(sum(part.value**2 for part in parts))
        if not value > 0:
            return cls(value, (math.nan, math.nan), draws)
        low, high = np.sqrt(np.quantile(draws, (TAIL, 1 - TAIL)))
        return cls(value, (float(low), float(high)), draws)

    def share_of(self, total: Deviation) -> tuple[float, float, float]:
        """Returns this variance as a share of ``total``'s, and the ends of its 95 % interval; NaN if unknown.

        For two independent normal samples the interval is that of the F distribution. If this deviation is a part of
        the total its draws are too, so that the share is at most 1.
        """
        if not (self.value > 0 and total.value > 0):
            return 0.0 if self.value == 0 and total.value > 0 else math.nan, math.nan, math.nan
        low, high = np.quantile(self.draws / total.draws, (TAIL, 1 - TAIL))
        return self.value**2 / total.value**2, float(low), float(high)


@dataclasses.dataclass(frozen=True, repr=False)
class VarianceSource:
    """One source of a metric's variance.

    Attributes:
        name: such as ``"order of the data"``.
        values: the metric of each member in which this source alone varies; empty for the test set.
        deviation: their standard deviation and its interval.
        share: of the variance of one run, its test set included, and the ends of its interval; NaN if not known.
        note: why a number is not known or 0; empty if there is nothing to say.
    """

    name: str
    values: tuple[float, ...]
    deviation: Deviation
    share: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    note: str = ""


def jackknife(sums: Mapping[str, np.ndarray], metric: Callable[[dict[str, Any]], float]) -> tuple[float, np.ndarray]:
    """Returns a metric of all examples, and by how much it changes without each block of them, ``[blocks]``.

    ``sums [examples, ...]`` are those of `Task.evaluate` for each example, with its ``count``; ``metric`` is a function
    of the means. The squares of the changes add up to the metric's variance over samples of as many examples, times
    n / (n - 1): for a mean of values with deviation s exactly s² / n (Quenouille 1956, Tukey 1958), for ratios, such as
    a mean over tokens, and smooth functions of means, such as a perplexity, nearly. Up to `MOST_BLOCKS` examples a
    block is one example.
    """
    count = len(sums["count"])
    blocks = min(count, MOST_BLOCKS)
    of_block = np.arange(count) % blocks

    def per_block(values: np.ndarray) -> np.ndarray:
        if blocks == count:
            return np.asarray(values, np.float64)
        added = np.zeros((blocks, *values.shape[1:]))
        np.add.at(added, of_block, values)
        return added

    parts = {name: per_block(values) for name, values in sums.items()}
    weights = parts.pop("count")
    left = weights.sum() - weights
    means = {name: ((part.sum(axis=0) - part).T / left).T for name, part in parts.items()}
    whole = metric({name: part.sum(axis=0) / weights.sum() for name, part in parts.items()})
    without = np.array([metric({name: mean[block] for name, mean in means.items()}) for block in range(blocks)])
    return whole, without - without.mean()


def decimals_of(deviation: float) -> int:
    """Returns the number of decimals that mean something: their last unit is the power of ten nearest to ``deviation``.

    Negative numbers are of digits before the point, as in Python's ``round``.

    >>> decimals_of(0.004), decimals_of(0.011), decimals_of(35.0)
    (2, 2, -2)
    """
    return round(-math.log10(deviation))


def rounded(value: float, deviation: float) -> str:
    """Returns ``value`` with the decimals that mean something; with six digits if its ``deviation`` is 0 or unknown.

    >>> rounded(0.9722, 0.004)
    '0.97'
    """
    if not 0 < deviation < math.inf:
        return f"{value:.6g}"
    decimals = decimals_of(deviation)
    return f"{round(value, decimals):.{max(0, decimals)}f}"
