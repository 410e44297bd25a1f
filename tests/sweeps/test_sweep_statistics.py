"""Coverage of intervals, differences worked out by hand, and how many seeds a difference needs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxnn.sweeps._comparison import mean_difference, seeds_needed
from jaxnn.sweeps._members import bootstrap_interval


@pytest.mark.parametrize(("n", "least", "most"), [(5, 0.90, 0.97), (8, 0.91, 0.98), (20, 0.92, 0.98)])
def test_the_bootstrap_interval_covers_the_mean(n: int, least: float, most: float) -> None:
    # 95 % is aimed at; the plain percentile interval covers 84 % for n = 5 and 89 % for n = 8.
    samples = np.random.default_rng(100 + n).normal(size=(1000, n))
    assert least <= np.mean([low <= 0 <= high for low, high in map(bootstrap_interval, samples)]) <= most


def test_a_large_sample_has_the_interval_of_the_central_limit() -> None:
    # 400 values, 0 and 1 by halves: mean 0.5, deviation 0.5, so 0.5 ± 1.96 · 0.5 / 20 = 0.451 to 0.549.
    interval = bootstrap_interval([0.0, 1.0] * 200)
    assert interval == pytest.approx((0.451, 0.549), abs=0.003) and interval == bootstrap_interval([0.0, 1.0] * 200)


@pytest.mark.parametrize(
    ("values", "interval"),
    [([3.0, 1.0], (1, 3)), ([1.0, 3.0, 2.0], (1, 3)), ([1.0, 3.0, 2.0, 2.5], (1, 3)), ([0.5] * 6, (0.5, 0.5))],
)
def test_fewer_than_five_values_have_their_range_and_equal_ones_a_point(
    values: list[float], interval: tuple[float, float]
) -> None:
    assert bootstrap_interval(values) == interval
    assert all(map(math.isnan, (*bootstrap_interval([1.0]), *bootstrap_interval([]))))


def test_differences_by_hand() -> None:
    # b - a = 1, 2, 3: mean 2, deviation 1, error 1/√3 = 0.57735, t(0.975; 2) = 4.30265: 2 ± 2.48414.
    found = mean_difference([1.0, 5.0, 3.0], [2.0, 7.0, 6.0])
    assert found == pytest.approx((2.0, -0.48414, 4.48414, 1.0), abs=1e-5)


def test_equal_differences_have_an_interval_from_six_on() -> None:
    # Five pairs that all go one way do so by chance in 2 · 0.5⁵ = 6 % of all cases, six in 3 %.
    for few in (2, 5):
        values = np.arange(few, dtype=float)
        # A third is added, which rounds differently for each.
        found = mean_difference(values, values + 1 / 3)
        assert found == pytest.approx((1 / 3, math.nan, math.nan, 0.0), nan_ok=True)
    six = np.arange(6.0)
    assert mean_difference(six, six) == (0.0, 0.0, 0.0, 0.0)
    assert mean_difference(six, six + 2) == (2.0, 2.0, 2.0, 0.0)
    found = mean_difference([1.0], [3.0])
    assert found[0] == 2.0 and all(map(math.isnan, found[1:]))


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (1.5, 6)])
def test_the_pairs_needed_are_those_of_the_tables(effect: float, pairs: int) -> None:
    # Two-sided paired t-test, significance 0.05, power 0.8, by effect size d = difference / deviation: as in G*Power.
    assert seeds_needed(effect, 1.0) == pairs and seeds_needed(-3 * effect, 3.0) == pairs


def test_differences_that_no_number_of_seeds_shows() -> None:
    for difference, deviation in ((0.0, 1.0), (0.0, 0.0), (1e-6, 1.0), (math.nan, math.nan)):
        assert seeds_needed(difference, deviation) is None
    assert seeds_needed(1.0, 0.0) == 2
