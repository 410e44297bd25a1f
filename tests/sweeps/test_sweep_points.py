"""The points of a sweep: grids, lists, draws, their sums, their scales, and errors."""

import math
from typing import Any

import jax
import numpy as np
import pytest

import jaxnn as jn


def test_grids_lists_and_sums():
    points = jn.grid(a=[1, 2], b=["x", "y", "z"])
    assert [tuple(point.values()) for point in points] == [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z")]
    assert list(jn.search.zip(a=[1, 2], b=[3, 3])) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    joined = jn.grid(a=[1, 2]) + jn.grid(a=[2, 4])
    assert [point["a"] for point in joined] == [1, 2, 4] and joined.values("a") == (1, 2, 4)
    plain = jn.grid(a=np.array([0.5, 1.5]), b=jax.numpy.arange(2))
    assert all(type(value) in (int, float) for point in plain for value in point.values())


def test_draws_follow_the_key_and_their_distributions():
    axes = {
        "rate": jn.search.log_uniform(1e-4, 1e-1),
        "drop": jn.search.uniform(0.2, 0.6),
        "width": jn.search.integers(3, 5),
        "kind": jn.search.choice(["a", "b"]),
    }
    points, again, other = (jn.search.random(400, key, **axes) for key in (7, 7, 8))
    assert points == again != other
    drawn = {name: np.array([point[name] for point in points]) for name in axes}
    assert drawn["drop"].min() >= 0.2 and drawn["drop"].max() <= 0.6
    assert set(drawn["width"]) == {3, 4, 5} and set(drawn["kind"]) == {"a", "b"}
    # A third of the logarithms is in each decade: 133 of 400, give or take three standard deviations of 9.4.
    decades = np.histogram(np.log10(drawn["rate"]), bins=[-4, -3, -2, -1])[0]
    assert decades.sum() == 400 and all(105 < count < 162 for count in decades)


def test_draws_of_narrow_ranges_are_within_them_and_differ():
    for low, high, of in ((0.9999991, 0.9999999, jn.search.uniform), (0.12345649, 0.1234566, jn.search.log_uniform)):
        drawn = [point["rate"] for point in jn.search.random(500, 0, rate=of(low, high))]
        assert low <= min(drawn) < max(drawn) <= high and len({*drawn}) == 500


def test_draws_run_with_listed_values():
    points = jn.search.random(2, 0, rate=jn.search.uniform(0.0, 1.0), seed=range(3))
    assert [point["seed"] for point in points] == [0, 1, 2, 0, 1, 2] and len(points.values("rate")) == 2
    assert dict(points.scales) == {"rate": "linear", "seed": "nominal"}


def test_scale_of_an_axis():
    cases: list[tuple[str, list[object], str]] = [
        ("rate", [1e-4, 1e-3, 1e-2], "log"),
        ("width", [16, 32, 64, 128, 256], "log"),
        ("drop", [0.1, 0.2, 0.3], "linear"),
        ("drop", [0.0, 0.5, 50.0], "linear"),  # zero has no logarithm
        ("steps", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "linear"),  # ten times as much, but evenly spaced
        ("seed", [1, 10, 100], "nominal"),
        ("model.seed", [1, 10, 100], "nominal"),
        ("kind", ["a", "b"], "nominal"),
        ("norm", [True, False], "nominal"),
    ]
    assert [jn.grid(**{name: values}).scales[name] for name, values, _ in cases] == [scale for *_, scale in cases]


UNIFORM: Any = jn.search.uniform(0, 1)
ERRORS: dict[str, Any] = {
    "grid needs at least one axis": lambda: jn.grid(),
    "'rate' of grid is empty": lambda: jn.grid(rate=[]),
    "'rate' of grid is 0.1, .*write rate=.0.1.": lambda: jn.grid(rate=0.1),  # type: ignore[arg-type]
    "'kind' of grid is 'relu'": lambda: jn.grid(kind="relu"),
    "'seed' of grid holds 0 twice": lambda: jn.grid(seed=[0, 1, 0]),
    "'rate' of grid holds an array of shape .2,.": lambda: jn.grid(rate=np.ones((2, 2))),
    "is a distribution: .*jn.search.random": lambda: jn.grid(rate=UNIFORM),
    "zip needs axes of one length, but a has 2, b has 1": lambda: jn.search.zip(a=[1, 2], b=[1]),
    "cannot be joined: give 'a' to both": lambda: jn.grid(a=[1]) + jn.grid(b=[1]),
    "num must be an integer >= 1, not 0": lambda: jn.search.random(0, 0, a=UNIFORM),
    "num must be an integer >= 1, not 2.5": lambda: jn.search.random(2.5, 0, a=UNIFORM),  # type: ignore[arg-type]
    "random: key must be an integer >= 0, not -1": lambda: jn.search.random(3, -1, a=UNIFORM),
    "random: key must be an integer >= 0, not 'a'": lambda: jn.search.random(3, "a", a=UNIFORM),  # type: ignore[arg-type]
    "random needs a field to draw": lambda: jn.search.random(3, 0, a=[1]),
    "uniform goes from 1 to 1": lambda: jn.search.uniform(1, 1),
    "uniform goes from 0 to inf": lambda: jn.search.uniform(0, math.inf),
    "log_uniform goes from 'a' to 3": lambda: jn.search.log_uniform("a", 3),  # type: ignore[arg-type]
    "log_uniform goes from 0, which has no logarithm": lambda: jn.search.log_uniform(0, 1),
    "integers needs two integers, not 0.5": lambda: jn.search.integers(0.5, 2),  # type: ignore[arg-type]
    "nothing to choose from": lambda: jn.search.choice([]),
    "halving needs points": lambda: jn.search.halving([{"a": 1}]),  # type: ignore[arg-type]
    "halving: eta must be an integer >= 2, not 1": lambda: jn.search.halving(jn.grid(a=[1]), 1),
    "halving's min_fraction is 0": lambda: jn.search.halving(jn.grid(a=[1]), min_fraction=0),
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_name_the_value_and_the_fix(words):
    with pytest.raises(jn.ConfigError, match=words):
        ERRORS[words]()
