"""The points of a sweep: grids, lists, draws, their sums, their scales, and what is wrong with them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.search import scale_of


def test_grids_lists_and_sums() -> None:
    points = jn.grid(a=[1, 2], b=["x", "y", "z"])
    assert [tuple(point.values()) for point in points] == [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z")]
    assert list(jn.search.zip(a=[1, 2], b=[3, 3])) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    joined = jn.grid(a=[1, 2]) + jn.grid(a=[2, 4])
    assert [point["a"] for point in joined] == [1, 2, 4] and joined.values("a") == (1, 2, 4)
    plain = jn.grid(a=np.array([0.5, 1.5]), b=jax.numpy.arange(2))
    assert all(type(value) in (int, float) for point in plain for value in point.values())


def test_draws_are_decided_by_the_key_and_lie_where_they_should() -> None:
    axes = {
        "rate": jn.search.log_uniform(1e-4, 1e-1),
        "drop": jn.search.uniform(0.2, 0.6),
        "width": jn.search.integers(3, 5),
        "kind": jn.search.choice(["a", "b"]),
    }
    points, again, other = (
        jn.search.random(400, 7, **axes),
        jn.search.random(400, 7, **axes),
        jn.search.random(400, 8, **axes),
    )
    assert points == again != other
    drawn = {name: np.array([point[name] for point in points]) for name in axes}
    assert drawn["drop"].min() >= 0.2 and drawn["drop"].max() <= 0.6
    assert set(drawn["width"]) == {3, 4, 5} and set(drawn["kind"]) == {"a", "b"}
    # A third of the logarithms lies in each decade: 133 of 400, give or take three standard deviations of 9.4.
    decades = np.histogram(np.log10(drawn["rate"]), bins=[-4, -3, -2, -1])[0]
    assert decades.sum() == 400 and all(105 < count < 162 for count in decades)


def test_draws_with_typed_keys_rounding_and_listed_values() -> None:
    rate = jn.search.uniform(0.0, 1.0)
    one, other = (jn.search.random(3, jax.random.key(seed), rate=rate) for seed in (0, 1))
    assert one == jn.search.random(3, jax.random.key(0), rate=rate) != other
    for point in jn.search.random(20, 0, rate=jn.search.log_uniform(1e-4, 1e-1)):
        assert float(f"{point['rate']:.6g}") == point["rate"], "the printed value is the one that runs"
    points = jn.search.random(2, 0, rate=rate, seed=range(3))
    assert [point["seed"] for point in points] == [0, 1, 2, 0, 1, 2] and len(points.values("rate")) == 2
    assert dict(points.scales) == {"rate": "linear", "seed": "nominal"}


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("rate", [1e-4, 1e-3, 1e-2], "log"),
        ("width", [16, 32, 64, 128, 256], "log"),
        ("drop", [0.1, 0.2, 0.3], "linear"),
        ("drop", [0.0, 0.5, 50.0], "linear"),  # zero has no logarithm
        ("steps", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "linear"),  # ten times as much, but evenly spaced
        ("seed", [1, 10, 100], "nominal"),
        ("model.seed", [1, 10, 100], "nominal"),
        ("kind", ["a", "b"], "nominal"),
        ("norm", [True, False], "nominal"),
    ],
)
def test_the_scale_of_an_axis(name: str, values: list[object], scale: str) -> None:
    assert scale_of(name, values) == scale


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jn.grid(), "grid needs at least one axis"),
        (lambda: jn.grid(rate=[]), "the axis 'rate' of grid is empty: give it at least one value."),
        (lambda: jn.grid(rate=0.1), r"the axis 'rate' of grid is 0.1, no list of values: write rate=\[0.1\]."),
        (lambda: jn.grid(kind="relu"), "the axis 'kind' of grid is 'relu', no list of values"),
        (lambda: jn.grid(seed=[0, 1, 0]), "the axis 'seed' of grid holds 0 twice"),
        (
            lambda: jn.grid(rate=jn.search.uniform(0, 1)),
            "is a distribution: give a list of values, or use jn.search.random",
        ),
        (lambda: jn.search.zip(a=[1, 2], b=[1]), "zipped needs axes of one length, but a has 2, b has 1"),
        (lambda: jn.grid(a=[1]) + jn.grid(b=[1]), "cannot be joined: give 'a' to both"),
        (lambda: jn.search.random(0, 0, a=jn.search.uniform(0, 1)), "random needs at least 1 draw, not 0"),
        (lambda: jn.search.random(3, 0, a=[1]), "random needs a field to draw"),
        (lambda: jn.search.uniform(1, 1), "uniform goes from 1 to 1: the first must be below the second"),
        (lambda: jn.search.log_uniform(0, 1), "log_uniform goes from 0, which has no logarithm"),
        (lambda: jn.search.integers(0.5, 2), "no whole numbers"),
        (lambda: jn.search.choice([]), "choice has nothing to choose from"),
        (lambda: jn.search.halving([{"a": 1}]), "halving needs points"),  # type: ignore[arg-type]
        (lambda: jn.search.halving(jn.grid(a=[1]), 1), "halving's eta is 1"),
        (lambda: jn.search.halving(jn.grid(a=[1]), min_fraction=0), "halving's min_fraction is 0"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(jn.ConfigError, match=message):
        make()  # type: ignore[operator]
