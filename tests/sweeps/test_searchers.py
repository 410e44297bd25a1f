"""Searchers on learning curves that are known: what they propose, promote, copy and drop, and how they end."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn.search import Drop, Fork, Promote, Propose, Reached, Searcher, simulate

RATE = {"rate": jn.search.log_uniform(1e-4, 1.0)}
DRAWS = jn.search.random(81, 0, **RATE)


def curve(point: Mapping[str, Any], share: float) -> float:
    """The best rate is 0.01; all improve by as much while they train."""
    return (math.log10(point["rate"]) + 2) ** 2 + 0.3 / (1 + 9 * share)


BUILT_IN: dict[str, Callable[[], Searcher]] = {
    "asha": lambda: jn.search.asha(RATE, num=81),
    "asha of brackets": lambda: jn.search.asha(DRAWS, eta=2, brackets=3),
    "halving": lambda: jn.search.halving(DRAWS),
    "patience": lambda: jn.search.patience(RATE, num=24),
    "extrapolated of optuna": lambda: jn.search.extrapolated(jn.search.optuna(RATE, 24), reports=8, key=1),
    "pbt": lambda: jn.search.pbt({**RATE, "seed": [0, 1]}, 12, generations=5),
    "tpe": lambda: jn.search.tpe(RATE, 40),
    "asha of tpe": lambda: jn.search.asha(jn.search.tpe(RATE, 60)),
    "optuna": lambda: jn.search.optuna(RATE, 24),
    "asha of optuna": lambda: jn.search.asha(jn.search.optuna(RATE, 30)),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_searchers_conform_and_find_what_is_good(name):
    searcher = BUILT_IN[name]()
    assert set(jn.testing.check_searcher(searcher, curve, lanes=8).values()) == {"passed"}
    found = simulate(searcher, curve, lanes=8)
    best = found.best()
    assert best.status == "finished" and abs(math.log10(best.point["rate"]) + 2) < 0.35
    # As a record describes it, it is the same search.
    described = json.loads(json.dumps(searcher.settings | {"name": searcher.name}))
    again = jn.search.rebuilt(described)
    assert simulate(again, curve, lanes=8).members == found.members and again.settings == searcher.settings


def test_halving_trains_one_of_three_on_and_asha_wastes_little():
    halved = simulate(jn.search.halving(DRAWS), curve, lanes=16)
    ranked = sorted(halved.members, key=lambda member: curve(member.point, 1.0))
    # 81 members to 1/81, 27 on to 1/27, 9 to 1/9, 3 to 1/3, 1 to the end, the best of each.
    assert [member.share for member in ranked] == pytest.approx(
        [1, *[1 / 3] * 2, *[1 / 9] * 6, *[1 / 27] * 18, *[1 / 81] * 54]
    )
    assert {member.status for member in ranked[1:]} == {"pruned"} and halved.cost == pytest.approx(1 + 4 * 2 / 3)
    asynchronous = simulate(jn.search.asha(DRAWS, min_fraction=1 / 27), curve, lanes=16)
    assert asynchronous.best().point == ranked[0].point and asynchronous.cost < 81 / 4


def test_tpe_draws_near_the_best_in_every_kind_of_field():
    space = {
        **{"rate": RATE["rate"], "depth": jn.search.integers(1, 5), "kind": jn.search.choice(["a", "b", "c"])},
        "momentum": lambda point: jn.search.uniform(0.0, 1.0) if point["kind"] == "a" else 0.0,
    }

    def loss(point: Mapping[str, Any], share: float) -> float:
        if point["kind"] == "c":
            return math.inf  # it diverges
        missed = abs(point["depth"] - 2) + (point["kind"] != "a") + abs(point["momentum"] - 0.3)
        return (math.log10(point["rate"]) + 2) ** 2 + missed

    searcher = jn.search.tpe(space, 240)
    assert set(jn.testing.check_searcher(searcher, loss, lanes=8).values()) == {"passed"}
    points = [member.point for member in simulate(searcher, loss, lanes=8).members]

    def near(points: list[Any]) -> list[float]:
        rates = [abs(math.log10(point["rate"]) + 2) < 0.5 for point in points]
        momenta = [abs(point["momentum"] - 0.3) < 0.2 for point in points if point["kind"] == "a"]
        kinds, depths = [point["kind"] == "a" for point in points], [point["depth"] == 2 for point in points]
        return [sum(one) / len(one) for one in (rates, momenta, kinds, depths)]

    drawn = jn.search.random(1000, 0, **space)
    assert all(late > 1.8 * even for late, even in zip(near(points[120:]), near(list(drawn)), strict=True))


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_tpe_takes_for_the_best_those_that_trained_longest_unless_they_diverged(value):
    searcher = jn.search.tpe(RATE, 160)
    state, first = searcher.ask(searcher.init(), 60)
    rates = [one.point["rate"] for one in first]
    longest = sorted(range(60), key=rates.__getitem__)[-6:]
    reports = [jn.search.Reached(member, 1 / 27, 0.1, over=False) for member in range(60) if member not in longest]
    state, _ = searcher.tell(state, reports + [jn.search.Reached(member, 1.0, value, over=True) for member in longest])
    later = [one.point["rate"] for one in searcher.ask(state, 100)[1]]
    near = sum(rate > rates[longest[0]] for rate in later)
    assert near > 50 if math.isfinite(value) else near < 10


def test_asha_trains_one_to_the_end_also_if_the_first_to_come_there_diverges():
    def lost(point: Mapping[str, Any], share: float) -> float:
        return math.inf if share == 1 and point["seed"] == 0 else float(point["seed"])

    found = simulate(jn.search.asha(jn.grid(seed=range(9))), lost, lanes=4)
    assert found.best().point == {"seed": 1} and found.best().share == 1
    # Shares that end together are one rung.
    nine = simulate(jn.search.halving(jn.grid(seed=range(27))), lost, lanes=9, ends=(1 / 3, 1 / 3, 1 / 3, 1.0))
    assert [member.share for member in nine.members].count(1.0) == 1 and len(nine.members) == 27


def test_asha_promotes_the_best_third_of_those_that_came_so_far():
    searcher = jn.search.asha(jn.grid(seed=range(9)), eta=3, min_fraction=1 / 3)
    state, first = searcher.ask(searcher.init(), 4)
    assert first == [Propose({"seed": seed}) for seed in range(4)]
    told = [Reached(member, 1 / 3, value, False) for member, value in enumerate([0.3, 0.1, 0.2])]
    state, verdicts = searcher.tell(state, told)
    assert verdicts == ["pause"] * 3
    state, then = searcher.ask(state, 3)
    assert then == [Promote(1), Propose({"seed": 4}), Propose({"seed": 5})]
    # One that diverged counts, and is not promoted; the next of the best goes on when six came.
    more = [Reached(3, 1 / 3, math.inf, True), Reached(4, 1 / 3, 0.5, False), Reached(5, 1 / 3, 0.4, False)]
    state, _ = searcher.tell(state, more)
    assert searcher.ask(state, 1)[1] == [Promote(2)]


def test_stopping_rules_end_members_that_stall_or_promise_no_more():
    def falling(point: Mapping[str, Any], share: float) -> float:
        return float(point["end"] + point["fall"] * (share**-0.5 - 1)) + 2e-3 * math.sin(50 * share)

    # The best at the end is the worst at first; the second starts best and stays there.
    points = jn.search.zip(end=[0.2, 0.3, 0.9], fall=[0.3, 0.001, 0.1])
    found = simulate(jn.search.extrapolated(points), falling, lanes=3)
    first, second, third = found.members
    assert first.status == "finished" and third.status == "pruned" and third.share == pytest.approx(0.25)
    # The first is the best from t⁻⁰·⁵ = 4/3 on, a share of 0.56, and the band is narrow.
    assert second.status == "pruned" and 0.55 < second.share <= 0.65
    # Within the band of their noise both are trained to the end; so is the first of equals that surprise.
    close = jn.search.zip(end=[0.2, 0.2005], fall=[0.001, 0.001])
    noisy = simulate(jn.search.extrapolated(close), falling, lanes=2)
    assert [member.status for member in noisy.members] == ["finished"] * 2
    sure = jn.search.extrapolated(points, confidence=0.6)
    surprised = simulate(sure, lambda point, share: 0.5 if share > 0.85 else 1.0, lanes=3)
    assert [member.status for member in surprised.members] == ["finished", "pruned", "pruned"]
    stalled = simulate(jn.search.patience(points), lambda point, share: max(0.5, 1 - share), lanes=3)
    assert [(one.status, one.share) for one in stalled.members] == [("stopped early", pytest.approx(0.65))] * 3
    assert stalled.best().value == 0.5 and stalled.cost == pytest.approx(3 * 0.65)


def test_pbt_copies_the_best_and_changes_their_values():
    searcher = jn.search.pbt({**RATE, "width": jn.search.integers(2, 9), "seed": [5]}, 8, generations=2)
    state, started = searcher.ask(searcher.init(), 8)
    values = [abs(math.log10(one.point["rate"]) + 2) for one in started]
    state, verdicts = searcher.tell(state, [Reached(number, 0.5, value, False) for number, value in enumerate(values)])
    ranked = sorted(range(8), key=values.__getitem__)
    _, then = searcher.ask(state, 8)
    assert verdicts == ["pause"] * 8 and {*then[:2]} == {*map(Drop, ranked[6:])}
    for fork in then[2:4]:
        assert isinstance(fork, Fork) and fork.member in ranked[:2] and fork.point["seed"] == 5
        factor = fork.point["rate"] / started[fork.member].point["rate"]
        assert factor == pytest.approx(0.8) or factor == pytest.approx(1.2)
    assert {*then[4:]} == {*map(Promote, ranked[:6])}


def test_fields_may_depend_on_others_and_sobol_fills_the_space():
    space = {
        "kind": jn.search.choice(["sgd", "adam"]),
        "momentum": lambda point: MOMENTUM if point["kind"] == "sgd" else 0.0,
    }
    for draw in (jn.search.random, jn.search.sobol):
        points = draw(64, 3, **space, seed=[0, 1])
        assert len(points) == 128 and [point["seed"] for point in points][:3] == [0, 1, 0]
        assert points.scales["seed"] == "nominal" and draw(64, 3, **space, seed=[0, 1]) == points
        assert all((point["momentum"] > 0) == (point["kind"] == "sgd") for point in points)
    even = jn.search.sobol(32, 1, rate=jn.search.uniform(0, 1), layers=jn.search.integers(1, 4))
    assert np.histogram(even.values("rate"), bins=32, range=(0, 1))[0].tolist() == [1] * 32
    assert [list(point["layers"] for point in even).count(layers) for layers in (1, 2, 3, 4)] == [8] * 4


MOMENTUM = jn.search.uniform(0.5, 0.9)


RATES = iter([{"rate": 0.1}, {"rate": 0.2}, {"rate": 0.3}])
BAD: dict[str, tuple[Searcher, str]] = {
    "pure": (
        Searcher("bad", lambda: 0, lambda state, count: (0, [Propose(one) for one in RATES]), scales={"rate": "log"}),
        "others the second time",
    ),
    "end": (
        Searcher("bad", lambda: 0, lambda state, count: (0, [Propose({"rate": 1.0})] * count), scales={"rate": "log"}),
        "no end",
    ),
    "proposals": (
        Searcher("bad", lambda: 0, lambda state, count: (0, [Promote(3)]), scales={"rate": "log"}),
        "not paused",
    ),
    "description": (Searcher("bad", lambda: 0, lambda state, count: (0, []), shares=(0.5,)), "ascend to 1"),
}


@pytest.mark.parametrize("check", BAD)
def test_searchers_that_break_a_rule_are_named(check):
    searcher, words = BAD[check]
    with pytest.raises(
        jn.testing.ConformanceError, match=rf"check_searcher: 1 of 1 checks failed.\n{check}: .*{words}"
    ):
        jn.testing.check_searcher(searcher, curve, checks=(check,))


REFUSED: dict[str, Callable[[], Any]] = {
    "asha: rate is .0.0001, 1.*give a distribution": lambda: jn.search.asha({"rate": (1e-4, 1)}, num=3),
    "takes points or a searcher that only proposes them, and pbt": lambda: jn.search.asha(jn.search.pbt(RATE, 4)),
    "asha needs points": lambda: jn.search.asha([{"rate": 1}]),
    "asha draws from a space: say how many": lambda: jn.search.asha(RATE),
    "num is for a space": lambda: jn.search.asha(DRAWS, num=3),
    "asha has 9 brackets and 4 rungs": lambda: jn.search.asha(DRAWS, brackets=9),
    "halving ranks all members": lambda: jn.search.halving(BAD["pure"][0]),
    "extrapolated: first must be an integer >= 4": lambda: jn.search.extrapolated(DRAWS, first=3),
    "extrapolated's confidence is 0.5": lambda: jn.search.extrapolated(DRAWS, confidence=0.5),
    "pbt perturbs values": lambda: jn.search.pbt(DRAWS, 8),  # type: ignore[arg-type]
    "pbt's quantile is 0.9": lambda: jn.search.pbt(RATE, 8, quantile=0.9),
    "optuna: the field 'seed'": lambda: jn.search.optuna({"seed": [1, 2]}, 3),
    "tpe: the field 'seed'": lambda: jn.search.tpe({"seed": [1, 2]}, 3),
    "tpe proposes from a space, a dict of": lambda: jn.search.tpe(DRAWS, 3),  # type: ignore[arg-type]
    "check_searcher checks a jn.search.Searcher, not a int": lambda: jn.testing.check_searcher(5),  # type: ignore[arg-type]
    "has code that its record does not hold": lambda: jn.search.rebuilt({"name": "mine"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_searchers_refuse_what_they_cannot_use(words):
    with pytest.raises(jn.ConfigError, match=words):
        REFUSED[words]()
