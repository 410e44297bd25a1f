"""Intervals that cover what they say, and how many seeds a difference needs: against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxnn.sweeps.results import Difference, bootstrap_interval, mean_difference, seeds_needed

# --- bootstrap ---


def coverage(n: int, repeats: int = 1000) -> float:
    """How often the interval of ``n`` normal values holds their true mean, 0."""
    samples = np.random.default_rng(100 + n).normal(size=(repeats, n))
    return float(np.mean([low <= 0 <= high for low, high in map(bootstrap_interval, samples)]))


@pytest.mark.parametrize(("n", "least", "most"), [(5, 0.90, 0.97), (8, 0.91, 0.98), (20, 0.92, 0.98)])
def test_the_bootstrap_interval_covers_the_mean_as_often_as_it_says(n: int, least: float, most: float) -> None:
    # The plain percentile interval covers 84 % for n = 5 and 89 % for n = 8.
    assert least <= coverage(n) <= most


def test_a_wide_sample_has_the_interval_of_the_central_limit() -> None:
    # 400 values, 0 and 1 by halves: mean 0.5, deviation 0.5, so 0.5 ± 1.96 · 0.5 / 20 = 0.451 to 0.549.
    low, high = bootstrap_interval([0.0, 1.0] * 200)
    assert low == pytest.approx(0.451, abs=0.003) and high == pytest.approx(0.549, abs=0.003)


def test_less_confidence_is_narrower() -> None:
    values = np.random.default_rng(0).normal(size=12)
    (low, high), (lower, higher) = bootstrap_interval(values, 0.5), bootstrap_interval(values, 0.95)
    assert lower < low < high < higher


@pytest.mark.parametrize("values", [[3.0, 1.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0, 2.5]])
def test_the_interval_of_fewer_than_five_is_their_range(values: list[float]) -> None:
    assert bootstrap_interval(values) == (1.0, 3.0)


def test_one_value_has_no_interval_and_equal_ones_a_point() -> None:
    assert all(map(math.isnan, (*bootstrap_interval([1.0]), *bootstrap_interval([]))))
    assert bootstrap_interval([0.5] * 6) == (0.5, 0.5)


def test_the_interval_is_the_same_each_time() -> None:
    values = np.random.default_rng(1).normal(size=9)
    assert bootstrap_interval(values) == bootstrap_interval(values)


# --- differences ---


def test_the_paired_difference_by_hand() -> None:
    # b - a = 1, 2, 3: mean 2, deviation 1, error 1/√3 = 0.57735, t(0.975; 2) = 4.30265: 2 ± 2.48414.
    found = paired_difference([1.0, 5.0, 3.0], [2.0, 7.0, 6.0])
    assert found == pytest.approx((2.0, -0.48414, 4.48414, 1.0), abs=1e-5)
    assert found.sign == 0


def test_welch_by_hand() -> None:
    # a: mean 2, variance 1, n = 3, so 1/3; b: mean 6, variance 4, n = 3, so 4/3. Error √(5/3) = 1.290994.
    # Degrees of freedom (5/3)² / ((1/3)²/2 + (4/3)²/2) = 25/8.5 = 2.941176, t(0.975) = 3.21876: 4 ± 4.15540.
    found = welch_difference([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert found == pytest.approx((4.0, -0.15540, 8.15540, math.sqrt(5)), abs=1e-5)


def test_differences_that_do_not_vary() -> None:
    # Five pairs that all go one way do so by chance in 2 · 0.5⁵ = 6 % of all cases, six in 3 %.
    for few in (2, 5):
        values = np.arange(few, dtype=float)
        # A third is added, which rounds differently for each.
        for found in (paired_difference(values, values + 1 / 3), welch_difference([1.0] * few, [4 / 3] * few)):
            assert found.mean == pytest.approx(1 / 3) and found.deviation == 0.0
            assert math.isnan(found.low) and math.isnan(found.high) and found.sign == 0
    six = np.arange(6.0)
    assert paired_difference(six, six) == (0.0, 0.0, 0.0, 0.0) and paired_difference(six, six).sign == 0
    assert paired_difference(six, six + 2).sign == 1 and paired_difference(six + 2, six).sign == -1
    assert welch_difference([2.0] * 6, [1.0] * 6) == (-1.0, -1.0, -1.0, 0.0)


def test_too_few_values_have_a_difference_and_no_interval() -> None:
    for found in (paired_difference([1.0], [3.0]), welch_difference([1.0], [2.0, 4.0])):
        assert found.mean == 2.0 and math.isnan(found.low) and math.isnan(found.high) and found.sign == 0


# --- how many ---


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (1.5, 6)])
def test_the_pairs_needed_are_those_of_the_tables(effect: float, pairs: int) -> None:
    # Two-sided paired t-test, significance 0.05, power 0.8, by effect size d = difference / deviation: as in G*Power.
    assert seeds_needed(effect, 1.0) == pairs
    assert seeds_needed(-3 * effect, 3.0) == pairs


def test_the_pairs_needed_give_the_power_they_are_for() -> None:
    n = seeds_needed(0.7, 1.0)
    assert n is not None
    rng = np.random.default_rng(0)

    def power(pairs: int) -> float:
        trials = rng.normal(0.7, 1.0, size=(2000, pairs))
        return float(np.mean([paired_difference(np.zeros(pairs), trial).sign == 1 for trial in trials]))

    assert power(n) == pytest.approx(0.8, abs=0.035)


def test_more_power_or_confidence_needs_more() -> None:
    few = seeds_needed(0.5, 1.0) or 0
    assert few < (seeds_needed(0.5, 1.0, power=0.95) or 0) and few < (seeds_needed(0.5, 1.0, confidence=0.99) or 0)


def test_what_no_number_of_seeds_shows() -> None:
    assert seeds_needed(0.0, 1.0) is None and seeds_needed(0.0, 0.0) is None
    assert seeds_needed(1e-6, 1.0) is None
    assert seeds_needed(1.0, 0.0) == 2
    assert seeds_needed(math.nan, math.nan) is None
