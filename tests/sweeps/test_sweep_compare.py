"""Comparisons of two sweeps or runs: pairs by seed, intervals, texts, and errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxnn.sweeps import Sweep, compare
from jaxnn.types import ConfigError, RecordError
from tests import swept, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

# The seed changes a loss far more than the difference of the sides: 0.1 to 0.13 better with each seed.
LUCK = [1.0, 3.0, 2.0, 4.0]
BETTER = [0.9, 2.87, 1.88, 3.9]


class Sides:
    """Makes sweeps of given losses."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __call__(self, losses: dict[Any, float | None], *names: str) -> Sweep:
        self.count += 1
        points = {key if isinstance(key, tuple) else (key,): loss for key, loss in losses.items()}
        return swept.sweep(self.folder / str(self.count), points, *names or ("seed",))

    def seeds(self, losses: list[float | None], first: int = 0) -> Sweep:
        return self(dict(enumerate(losses, first)))


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path)


def test_pairs_cancel_the_effect_of_the_seed(sides: Sides) -> None:
    a, b = sides.seeds(LUCK), sides.seeds(BETTER)
    found = compare(a, b)
    # Differences -0.1, -0.13, -0.12, -0.1: mean -0.1125, deviation 0.015, error 0.0075, t(0.975; 3) = 3.18245.
    assert found.num_seeds == 4 and found.by == ("seed",) and found.verdict == "better"
    assert found.difference == pytest.approx(-0.1125) and found.seeds_needed is None and found.left_out == ()
    assert found.interval == pytest.approx((-0.1125 - 0.0238684, -0.1125 + 0.0238684), abs=1e-6)
    assert compare(b, a).verdict == "worse"
    accuracy = compare(a, b, "test_accuracy")
    assert accuracy.verdict == "better" and accuracy.difference == pytest.approx(0.01125)
    higher = dataclasses.replace(a, higher_is_better=True)
    assert compare(higher, b).verdict == "worse"


def test_report_names_sides_interval_and_seeds_needed(sides: Sides) -> None:
    a, b = sides.seeds(LUCK), sides.seeds(BETTER)
    assert str(compare(a, b)).splitlines() == [
        f"A  {a.dir}",
        f"B  {b.dir}",
        "test_loss: B 2.388 against A 2.5, paired over 4 seeds.",
        "Difference -0.1125 (95 % interval -0.1364 to -0.08863): B is better.",
    ]
    unclear = compare(a, sides.seeds([1.1, 2.9, 2.2, 4.2]))
    # Differences 0.1, -0.1, 0.2, 0.2: mean 0.1, deviation 0.141421, so n with √n ≥ 1.41421 (t + t'): 18.
    assert unclear.seeds_needed == 18
    assert str(unclear).splitlines()[3] == (
        "Difference +0.1 (95 % interval -0.125 to +0.325): not separable with 4 seeds; about 18 would be needed to see "
        "a difference of this size."
    )


def test_one_pair_and_equal_differences_of_few_seeds_are_not_separable(sides: Sides) -> None:
    found = compare(sides.seeds([1.0]), sides.seeds([0.5]))
    assert found.verdict == "not separable" and all(map(math.isnan, found.interval))
    assert str(found).splitlines()[2:] == [
        "test_loss: B 0.5 against A 1, paired over 1 seed.",
        "Difference -0.5: not separable with 1 seed: run at least 2 more.",
    ]
    a = sides.seeds([1.0, 2.0, 4.0])
    same, shifted = compare(a, sides.seeds([1.0, 2.0, 4.0])), compare(a, sides.seeds([0.9, 1.9, 3.9]))
    for found in (same, shifted):
        assert found.verdict == "not separable" and found.seeds_needed is None and math.isnan(found.interval[0])
        assert str(found).endswith("not separable with 3 seeds: all differences are equal, run more.")
    many = [1.0, 2.0, 4.0, 3.0, 5.0, 6.0]
    found = compare(sides.seeds(many), sides.seeds([loss - 0.5 for loss in many]))
    assert (found.verdict, found.interval) == ("better", (-0.5, -0.5))


def test_members_that_were_cut_short_are_left_out_and_named(sides: Sides) -> None:
    a, b = sides.seeds(LUCK), sides.seeds(BETTER)
    members = tuple(
        dataclasses.replace(member, status=status)
        for member, status in zip(b.members, ("pruned", "finished", "stopped early", "interrupted"), strict=True)
    )
    found = compare(a, dataclasses.replace(b, members=members))
    assert found.num_seeds == 2 and found.mean_a == 2.5
    assert found.left_out[2:] == ("B seed 0 (pruned)", "B seed 3 (interrupted)")
    none = dataclasses.replace(b, members=(members[0], members[3]))
    with pytest.raises(
        ConfigError, match=r"1 pruned, 1 interrupted\): only members that finished or stopped early have one"
    ):
        compare(a, none)


def test_sides_are_named_by_what_differs(sides: Sides) -> None:
    a, b = (sides({(rate, 4, 0): 1.0, (rate, 4, 1): 2.0}, "learning_rate", "width", "seed") for rate in (0.01, 0.1))
    assert compare(a, b).sides == tuple(f"{side.dir}  learning_rate {x}, width 4" for side, x in ((a, 0.01), (b, 0.1)))
    bare = [dataclasses.replace(side, dir=None) for side in (a, b)]
    assert str(compare(*bare)).startswith("A  learning_rate 0.01, width 4\nB  learning_rate 0.1, width 4\n")
    parts = [a.select(seed=0), a.select(seed=1)]
    assert compare(parts, b).sides[0] == f"{a.dir} and 1 more  learning_rate 0.01, width 4"


def test_members_without_a_partner_or_a_result_are_left_out_and_named(sides: Sides) -> None:
    a = sides.seeds([1.0, 3.0, 2.0, None, 7.0])
    b = sides.seeds([0.9, 2.87, 1.88, 4.0])
    found = compare(a, b)
    assert found.num_seeds == 3 and (found.mean_a, found.mean_b) == pytest.approx((2.0, 1.883333))
    assert found.left_out == ("A seed 3 (diverged)", "A seed 4 (no partner)", "B seed 3 (no partner)")
    assert str(found).endswith("Left out: A seed 3 (diverged); A seed 4 (no partner); B seed 3 (no partner).")
    many = compare(sides.seeds([1.0, 2.0]), sides.seeds([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]))
    assert len(many.left_out) == 5 and str(many).endswith("B seed 5 (no partner); and 1 more.")


def test_pairs_of_one_seed_are_averaged(sides: Sides) -> None:
    losses = {(0.01, 0): 1.0, (0.01, 1): 3.0, (0.1, 0): 2.0, (0.1, 1): 4.0}
    better = {(0.01, 0): 0.9, (0.01, 1): 2.8, (0.1, 0): 1.8, (0.1, 1): 3.5}
    a, b = sides(losses, "learning_rate", "seed"), sides(better, "learning_rate", "seed")
    found = compare(a, b)
    assert found.by == ("learning_rate", "seed") and found.num_settings == 2
    # Of seed 0: -0.1 and -0.2, so -0.15; of seed 1: -0.2 and -0.5, so -0.35. Mean -0.25, deviation 0.1414,
    # error 0.1, t(0.975; 1) = 12.7062: -0.25 ± 1.27062. Four pairs would have given ± 0.276.
    assert found.num_seeds == 2 and found.difference == pytest.approx(-0.25) and found.verdict == "not separable"
    assert found.interval == pytest.approx((-1.52062, 1.02062), abs=1e-5)
    assert "paired over 2 seeds, averaged over 2 settings." in str(found)
    lost = sides(losses | {(0.1, 1): None}, "learning_rate", "seed")
    assert "averaged over up to 2 settings" in str(compare(lost, b))
    a, b = (sides(dict(zip((0.1, 0.2, 0.3, 0.4), losses, strict=True)), "learning_rate") for losses in (LUCK, BETTER))
    found = compare(a, b)
    assert found.num_seeds == 1 and found.verdict == "not separable"
    assert "paired over 1 seed, averaged over 4 settings.\n" in str(found)
    assert str(found).endswith("Difference -0.1125: not separable with 1 seed: run at least 2 more.")


ERRORS: dict[str, Callable[[Sides], Any]] = {
    "side B has 2 members with seed 0, .* differ in learning_rate: .*open_sweep.path..select.learning_rate=0.01.": (
        lambda s: compare(s.seeds(LUCK), s({(0.01, 0): 1.0, (0.1, 0): 2.0}, "learning_rate", "seed"))
    ),
    "side A has 2 members with seed 0, which are the same": lambda s: compare([s.seeds([1.0])] * 2, s.seeds(LUCK)),
    "side A: no member has a metric 'acuracy'": lambda s: compare(s.seeds(LUCK), s.seeds(LUCK), "acuracy"),
    "side B has no result in 'test_loss' .1 diverged.: only": lambda s: compare(s.seeds(LUCK), s.seeds([None])),
    "no member of A has a partner in B with the same seed": lambda s: compare(s.seeds([1.0]), s.seeds([1.0], first=2)),
    "side A is ..: give a sweep, a run": lambda s: compare([], s.seeds(LUCK)),
    "side B is 3: give a sweep, a run": lambda s: compare(s.seeds(LUCK), 3),  # type: ignore[arg-type]
    "nowhere holds no run": lambda s: compare(s.folder / "nowhere", s.seeds(LUCK)),
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_name_the_side_and_the_fix(sides: Sides, words: str) -> None:
    with pytest.raises((ConfigError, RecordError), match=words):
        ERRORS[words](sides)


def test_paths_and_runs_are_compared_like_sweeps(sides: Sides, tmp_path: Path) -> None:
    a = sides.seeds(LUCK)
    assert compare(str(a.dir), a).difference == 0.0
    runs = [tiny.fit(tiny.experiment(seed=seed), tmp_path / f"run{seed}", checkpoint_every=0) for seed in range(2)]
    losses = [run.final["test_loss"] for run in runs]
    found = compare(runs, [run.dir for run in runs if run.dir])
    assert found.metric == "test_loss" and found.num_seeds == 2 and found.difference == 0
    assert found.mean_a == pytest.approx(sum(losses) / 2)
    shifted = compare(runs[0], sides.seeds([losses[0] + 1]))
    assert shifted.num_seeds == 1 and shifted.difference == pytest.approx(1)
