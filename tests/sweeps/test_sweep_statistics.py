"""Statistics of sweeps: coverage of intervals, differences by hand, and the number of seeds that one needs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxnn.sweeps import bootstrap_interval, mean_difference, seeds_needed

NAN = math.nan


def test_bootstrap_interval_covers_the_mean() -> None:
    # The target is 95 %; the plain percentile interval covers 84 % for n = 5 and 89 % for n = 8.
    for n, least, most in ((5, 0.90, 0.97), (8, 0.91, 0.98)):
        samples = np.random.default_rng(100 + n).normal(size=(400, n))
        assert least <= np.mean([low <= 0 <= high for low, high in map(bootstrap_interval, samples)]) <= most


def test_bootstrap_interval_of_large_and_small_samples() -> None:
    # 400 values, 0 and 1 by halves: mean 0.5, deviation 0.5, so 0.5 ± 1.96 · 0.5 / 20 = 0.451 to 0.549.
    interval = bootstrap_interval([0.0, 1.0] * 200)
    assert interval == pytest.approx((0.451, 0.549), abs=0.003) and interval == bootstrap_interval([0.0, 1.0] * 200)
    # Fewer than five values have their range.
    for values in ([3.0, 1.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0, 2.5]):
        assert bootstrap_interval(values) == (1, 3)
    assert bootstrap_interval([0.5] * 6) == (0.5, 0.5)
    assert all(map(math.isnan, (*bootstrap_interval([1.0]), *bootstrap_interval([]))))


def test_difference_of_means_and_its_interval() -> None:
    # b - a = 1, 2, 3: mean 2, deviation 1, error 1/√3 = 0.57735, t(0.975; 2) = 4.30265: 2 ± 2.48414.
    found = mean_difference([1.0, 5.0, 3.0], [2.0, 7.0, 6.0])
    assert found == pytest.approx((2.0, -0.48414, 4.48414, 1.0), abs=1e-5)
    assert mean_difference([1.0], [3.0]) == pytest.approx((2.0, NAN, NAN, NAN), nan_ok=True)
    # Five equal differences are so by chance in 2 · 0.5⁵ = 6 % of all cases, six in 3 %. Thirds round differently.
    for few in (2, 5):
        found = mean_difference(np.arange(few), np.arange(few) + 1 / 3)
        assert found == pytest.approx((1 / 3, NAN, NAN, 0.0), nan_ok=True)
    assert mean_difference(np.arange(6), np.arange(6)) == (0.0, 0.0, 0.0, 0.0)
    assert mean_difference(np.arange(6), np.arange(6) + 2) == (2.0, 2.0, 2.0, 0.0)


def test_seeds_needed_equal_published_tables() -> None:
    # Two-sided paired t-test, significance 0.05, power 0.8, by effect size d = difference / deviation: as in G*Power.
    for effect, pairs in ((0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (1.5, 6)):
        assert seeds_needed(effect, 1.0) == pairs and seeds_needed(-3 * effect, 3.0) == pairs
    for difference, deviation in ((0.0, 1.0), (0.0, 0.0), (1e-6, 1.0), (NAN, NAN)):
        assert seeds_needed(difference, deviation) is None
    assert seeds_needed(1.0, 0.0) == 2
