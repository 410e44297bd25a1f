"""Intervals hold their effect as often as they say, and evidence that is looked at all the time misleads rarely."""

import math

import numpy as np
import pytest

from jaxnn._statistics import mean_interval, online_level, rank_evidence, t_evidence

ALPHA, COUNT, PAIRS = 0.05, 240, 32
MAKERS = {
    "normal": lambda random: random.normal(size=PAIRS),
    "heavy tails": lambda random: random.standard_t(2, PAIRS),
    "few values": lambda random: np.round(random.normal(size=PAIRS)),
}


@pytest.mark.parametrize(("level", "low", "high"), [(0.95, 0.93, 0.97), (0.99, 0.98, 0.998)])
def test_mean_interval_holds_the_mean_of_normal_values(level, low, high):
    random = np.random.default_rng(0)
    ends = np.array([mean_interval(random.normal(1.0, 2.0, size=6), level=level) for _ in range(2000)])
    assert low <= np.mean((ends[:, 0] <= 1) & (ends[:, 1] >= 1)) <= high


@pytest.mark.parametrize("evidence", [t_evidence, rank_evidence])
@pytest.mark.parametrize("kind", MAKERS)
def test_evidence_misleads_in_few_cases_at_any_look(evidence, kind):
    random = np.random.default_rng(0)
    found = [evidence(0.5 + MAKERS[kind](random), ALPHA) for _ in range(COUNT)]
    # The interval at the last look is the one of all looks.
    assert np.mean([one.low[-1] <= 0.5 <= one.high[-1] for one in found]) >= 1 - ALPHA
    misled = [evidence(MAKERS[kind](random), ALPHA).log.max() >= -math.log(ALPHA) for _ in range(COUNT)]
    assert np.mean(misled) <= ALPHA
    if kind == "normal":  # also without being so careful that nothing is found
        assert np.mean([one.low[-1] > 0 for one in found]) > 0.3
        assert np.mean([one.high[-1] - one.low[-1] for one in found]) < 4 * 1.96 / math.sqrt(PAIRS)


def test_evidence_and_interval_agree():
    differences = np.random.default_rng(1).normal(0.8, size=PAIRS)
    for evidence in (t_evidence, rank_evidence):
        found = evidence(differences, ALPHA)
        reached = np.maximum.accumulate(found.log) >= -math.log(ALPHA)
        assert (reached == (found.low > 0)).all() and reached[-1] and not reached[4]
    # The likelihood ratio at ten pairs, by the integral over effects that it stands for.
    stats = pytest.importorskip("scipy.stats")
    mean, deviation = differences[:10].mean(), differences[:10].std(ddof=1)
    effects = np.linspace(-8, 8, 4001)
    ratios = stats.nct.pdf(math.sqrt(10) * mean / deviation, 9, math.sqrt(10) * effects)
    ratio = np.trapezoid(ratios * stats.norm.pdf(effects), effects) / stats.t.pdf(math.sqrt(10) * mean / deviation, 9)
    assert t_evidence(differences[:10], ALPHA).log[-1] == pytest.approx(math.log(ratio), rel=1e-4)


def test_equal_differences_are_evidence_by_their_signs():
    for values in (np.zeros(64), np.full(5, 0.1)):
        assert t_evidence(values, ALPHA).log.max() < -math.log(ALPHA) and not t_evidence(values, ALPHA).low[-1] > 0
    found = t_evidence(np.full(20, 0.1), ALPHA)
    assert found.low[-1] > 0 and found.low[4] <= 0 and t_evidence(np.zeros(64), ALPHA).high[-1] == math.inf
    assert rank_evidence(np.zeros(64), ALPHA).log.max() <= 1e-9


def test_levels_of_a_session_add_up_to_its_error_rate():
    levels = [online_level(0.1, number, 0) for number in range(1, 20_000)]
    assert sum(levels) < 0.1 and levels == sorted(levels, reverse=True)
    assert online_level(0.1, 7, 2) == pytest.approx(3 * levels[6])
