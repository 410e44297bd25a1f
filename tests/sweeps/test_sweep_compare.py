"""Comparisons of two sweeps or runs: statistics, pairs by seed, errors; figures: panels, scales, ticks, marks."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from jaxnn._figures import draw_curves
from jaxnn._statistics import mean_difference, mean_interval, seeds_needed
from jaxnn.sweeps import Sweep, compare
from jaxnn.types import ConfigError, RecordError
from tests import swept, tiny

NAN = math.nan

type Sides = Callable[..., Sweep]

# The seed changes a loss far more than the difference of the sides: 0.1 to 0.13 better with each seed.
LUCK = [1.0, 3.0, 2.0, 4.0]
BETTER = [0.9, 2.87, 1.88, 3.9]


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    """Makes sweeps of losses by seed, or by the values of other fields."""
    counter = itertools.count()

    def make(losses: Any, *names: str) -> Sweep:
        points = losses if isinstance(losses, dict) else {(seed,): loss for seed, loss in enumerate(losses)}
        return swept.sweep(tmp_path / str(next(counter)), points, *names or ("seed",))

    return make


def test_interval_of_a_mean_by_hand():
    # Mean 2, deviation 1, error 1/√3, t(0.975; 2) = 4.30265.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-5)
    assert mean_interval([0.5] * 6) == (0.5, 0.5)
    assert all(map(math.isnan, (*mean_interval([1.0]), *mean_interval([]), *mean_interval([0.5] * 5))))


def test_difference_of_means_and_its_interval():
    # b - a = 1, 2, 3, as above.
    found = mean_difference([1.0, 5.0, 3.0], [2.0, 7.0, 6.0])
    assert found == pytest.approx((2.0, -0.48414, 4.48414, 1.0), abs=1e-5)
    assert mean_difference([1.0], [3.0]) == pytest.approx((2.0, NAN, NAN, NAN), nan_ok=True)
    # Five equal differences are so by chance in 2 · 0.5⁵ = 6 % of all cases, six in 3 %. Thirds round differently.
    for few in (2, 5):
        found = mean_difference(np.arange(few), np.arange(few) + 1 / 3)
        assert found == pytest.approx((1 / 3, NAN, NAN, 0.0), nan_ok=True)
    assert mean_difference(np.arange(6), np.arange(6)) == (0.0, 0.0, 0.0, 0.0)
    assert mean_difference(np.arange(6), np.arange(6) + 2) == (2.0, 2.0, 2.0, 0.0)


def test_seeds_needed_equal_published_tables():
    # Two-sided paired t-test, significance 0.05, power 0.8, by effect size d = difference / deviation: as in G*Power.
    for effect, pairs in ((0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (1.5, 6)):
        assert seeds_needed(effect, 1.0) == pairs and seeds_needed(-3 * effect, 3.0) == pairs
    for difference, deviation in ((0.0, 1.0), (0.0, 0.0), (1e-6, 1.0), (NAN, NAN)):
        assert seeds_needed(difference, deviation) is None
    assert seeds_needed(1.0, 0.0) == 2


def test_pairs_cancel_the_effect_of_the_seed(sides):
    a, b = sides(LUCK), sides(BETTER)
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
    # Of a metric whose direction is not known B is neither better nor worse.
    for side in (a, b):
        for member in side.members:
            member.final["test_gain"] = member.final["test_loss"]  # type: ignore[index]
    assert (compare(a, b, "test_gain").verdict, compare(b, a, "test_gain").verdict) == ("lower", "higher")


def test_several_metrics_and_groups_hold_at_once(sides):
    a, b = sides(LUCK), sides(BETTER)
    both = compare(a, b, ["test_loss", "test_accuracy"])
    # t(0.9875; 3) = 4.17653 for two intervals that hold at once.
    assert both.rows[0].interval == pytest.approx((-0.1125 - 0.0313240, -0.1125 + 0.0313240), abs=1e-6)
    assert [one.metric for one in both.rows] == ["test_loss", "test_accuracy"] and "97.5 %" in repr(both)
    assert both.rows[0].needed(0.015) == seeds_needed(1.0, 1.0) == 10 and compare(a, b).needed(0) is None
    with pytest.raises(ConfigError, match="empty"):
        compare(a, b, [])
    losses = {(rate, seed): loss - 10 * rate for rate in (0.0, 0.1, 0.2) for seed, loss in enumerate(LUCK)}
    losses[0.1, 2] += 0.5
    found = sides(losses, "learning_rate", "seed").compare()
    assert (found.best, found.names) == ("learning_rate 0.2", ("learning_rate 0.1", "learning_rate 0"))
    assert found.count == 3 and found.rows[0].level == pytest.approx(1 - 0.05 / 3)
    assert found.rows[0].difference == pytest.approx(1.125) and found.rows[0].verdict == "worse"
    with pytest.raises(ConfigError, match="one group"):
        a.compare("learning_rate")


def test_report_names_sides_interval_and_seeds_needed(sides):
    a, b = sides(LUCK), sides(BETTER)
    assert str(compare(a, b)).splitlines() == [
        f"A  {a.dir}",
        f"B  {b.dir}",
        "test_loss: B 2.388 against A 2.5, paired over 4 seeds.",
        "Difference -0.1125 (95 % interval -0.1364 to -0.08863): B is better.",
    ]
    unclear = compare(a, sides([1.1, 2.9, 2.2, 4.2]))
    # Differences 0.1, -0.1, 0.2, 0.2: mean 0.1, deviation 0.141421, so n with √n ≥ 1.41421 (t + t'): 18.
    assert unclear.seeds_needed == 18
    assert "not separable with 4 seeds; about 18 would be needed to see a difference of this size." in str(unclear)
    # One pair and few equal differences have no interval.
    for losses, better, words in (
        ([1.0], [0.5], "over 1 seed.\nDifference -0.5: not separable with 1 seed: run at least 2 more."),
        ([1.0, 2.0, 4.0], [0.9, 1.9, 3.9], "not separable with 3 seeds: all differences are equal, run more."),
    ):
        found = compare(sides(losses), sides(better))
        assert found.verdict == "not separable" and found.seeds_needed is None and math.isnan(found.interval[0])
        assert str(found).endswith(words)


def test_sides_are_named_by_what_differs(sides):
    a, b = (sides({(rate, 4, 0): 1.0, (rate, 4, 1): 2.0}, "learning_rate", "width", "seed") for rate in (0.01, 0.1))
    assert compare(a, b).sides == tuple(f"{side.dir}  learning_rate {x}, width 4" for side, x in ((a, 0.01), (b, 0.1)))
    bare = dataclasses.replace(a, dir=None, name="slow"), dataclasses.replace(b, dir=None)
    assert str(compare(*bare)).startswith("A  slow  learning_rate 0.01, width 4\nB  learning_rate 0.1, width 4\n")
    parts = [a.select(seed=0), a.select(seed=1)]
    assert compare(parts, b).sides[0] == f"{a.dir} and 1 more  learning_rate 0.01, width 4"


def test_members_without_a_partner_or_a_result_are_left_out_and_named(sides):
    a, b = sides([1.0, 3.0, 2.0, None, 7.0]), sides([0.9, 2.87, 1.88, 4.0])
    found = compare(a, b)
    assert found.num_seeds == 3 and (found.mean_a, found.mean_b) == pytest.approx((2.0, 1.883333))
    assert found.left_out == ("A seed 3 (diverged)", "A seed 4 (no partner)", "B seed 3 (no partner)")
    assert str(found).endswith("Left out: A seed 3 (diverged); A seed 4 (no partner); B seed 3 (no partner).")
    many = compare(sides([1.0, 2.0]), sides([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]))
    assert len(many.left_out) == 5 and str(many).endswith("B seed 5 (no partner); and 1 more.")
    # Members that were cut short have no result.
    statuses = ("pruned", "finished", "stopped early", "interrupted")
    members = [dataclasses.replace(one, status=status) for one, status in zip(b.members, statuses, strict=True)]
    found = compare(sides(LUCK), dataclasses.replace(b, members=tuple(members)))
    assert found.num_seeds == 2 and found.left_out[2:] == ("B seed 0 (pruned)", "B seed 3 (interrupted)")
    none = dataclasses.replace(b, members=(members[0], members[3]))
    with pytest.raises(ConfigError, match=r"1 pruned, 1 interrupted\): only members that finished or stopped early"):
        compare(a, none)


def test_pairs_of_one_seed_are_averaged(sides):
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
    # Equal values have equal partners, however they are written.
    whole, mixed = ({(rate, seed): rate + seed for rate in rates for seed in (0, 1)} for rates in ((0, 1), (0.0, 1)))
    assert compare(*(sides(each, "learning_rate", "seed") for each in (whole, mixed))).left_out == ()
    lost = sides(losses | {(0.1, 1): None}, "learning_rate", "seed")
    assert "averaged over up to 2 settings" in str(compare(lost, b))


ERRORS: dict[str, Callable[[Sides], Any]] = {
    "side B has 2 members with seed 0, .* differ in learning_rate: .*open_sweep.path..select.learning_rate=0.01.": (
        lambda s: compare(s(LUCK), s({(0.01, 0): 1.0, (0.1, 0): 2.0}, "learning_rate", "seed"))
    ),
    "side A has 2 members with seed 0, which are the same": lambda s: compare([s([1.0])] * 2, s(LUCK)),
    "side A: no member has a metric 'acuracy'": lambda s: compare(s(LUCK), s(LUCK), "acuracy"),
    "side B has no result in 'test_loss' .1 diverged.: only": lambda s: compare(s(LUCK), s([None])),
    "no member of A has a partner in B with the same seed: A has seed 0, and B seed 2: train both": lambda s: compare(
        s([1.0]), s({(2,): 1.0})
    ),
    "side A is ..: give a sweep, a run": lambda s: compare([], s(LUCK)),
    "nowhere holds no record": lambda s: compare("nowhere", s(LUCK)),
}


def test_errors_name_the_side_and_the_fix(sides):
    for words, call in ERRORS.items():
        with pytest.raises((ConfigError, RecordError), match=words):
            call(sides)


def test_paths_and_runs_are_compared_like_sweeps(sides, tmp_path):
    a = sides(LUCK)
    assert compare(str(a.dir), a).difference == 0.0
    runs = [tiny.fit(tiny.experiment(seed=seed), tmp_path / f"run{seed}", checkpoint_every=0) for seed in range(2)]
    losses = [run.final["test_loss"] for run in runs]
    found = compare(runs, [run.dir for run in runs if run.dir])
    assert found.metric == "test_loss" and found.num_seeds == 2 and found.difference == 0
    assert found.mean_a == pytest.approx(sum(losses) / 2)
    shifted = compare(runs[0], sides([losses[0] + 1]))
    assert shifted.num_seeds == 1 and shifted.difference == pytest.approx(1)


def grid(folder: Path, axes: dict[str, list[Any]], lost: set[int] = frozenset()) -> Sweep:  # type: ignore[assignment]
    """A full grid with losses 1.0, 1.1, 1.2, … in order; members ``lost`` diverged."""
    points = itertools.product(*axes.values())
    losses = {point: None if index in lost else 1.0 + 0.1 * index for index, point in enumerate(points)}
    return swept.sweep(folder / "sweep", losses, *axes)


def with_status(sweep: Sweep, statuses: dict[int, str]) -> Sweep:
    """The sweep with these members stopped at step 10, their first report."""
    members = (
        dataclasses.replace(m, status=statuses[m.index], step=10) if m.index in statuses else m for m in sweep.members
    )
    lines = (line for line in sweep.lines if line["member"] not in statuses or line["step"] == 10)
    return dataclasses.replace(sweep, members=tuple(members), lines=tuple(lines))


def panels(figure: Figure) -> dict[tuple[str, str], Axes]:
    """The panels by the labels of their axes, colour bars too."""
    return {(axes.get_xlabel(), axes.get_ylabel()): axes for axes in figure.axes}


def ticks(figure: Figure, axes: Axes, which: str = "x") -> list[str]:
    """The tick labels that a reader sees."""
    figure.draw_without_rendering()
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axis.get_view_interval())
    drawn = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label.get_text() for place, label in drawn if low <= place <= high]


def marks(axes: Axes, marker: str) -> np.ndarray:
    return np.concatenate([line.get_xydata() for line in axes.get_lines() if line.get_marker() == marker] or [[]])


def test_curves_of_a_run_have_three_panels_per_row_and_plain_ticks():
    lines: list[dict[str, Any]] = []
    for step in (10, 20, 30):
        values = {"loss": 6.0 / step, "accuracy": step / 40, "perplexity": 2.0, "bits": 1.0}
        lines.append({"step": step, "steps_per_second": 1234.5 * step, **{f"train_{k}": v for k, v in values.items()}})
    lines[1] |= {"test_loss": math.nan}
    lines[-1] |= {"test_loss": 0.25, "test_accuracy": 0.5}
    figure = draw_curves(lines, "char_gpt", "shakespeare")
    assert figure.get_suptitle() == "char_gpt · shakespeare"
    loss, accuracy, *_, speed = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["loss", "accuracy", "bits", "perplexity", "steps per second"]
    assert loss.get_subplotspec().get_gridspec().get_geometry() == (2, 3)  # type: ignore[union-attr]
    assert loss.get_yscale() == "log" and ticks(figure, loss, "y") == ["0.2", "0.3", "0.4", "0.6"]
    assert ticks(figure, accuracy, "y")[:2] == ["30 %", "40 %"] and "20,000" in ticks(figure, speed, "y")
    texts = [text.get_text() for text in accuracy.get_legend().get_texts()]  # type: ignore[union-attr]
    assert texts == ["train 75 %", "test 50 %"]
    train, test = loss.get_lines()
    assert train.get_xdata().tolist() == [10, 20, 30]
    np.testing.assert_array_equal(test.get_xydata(), [[20, math.nan], [30, 0.25]])
    assert len(draw_curves([]).axes) == 1
    for value in (math.nan, 0.0):  # without a finite loss too
        draw_curves([{"step": 1, "train_loss": value, "steps_per_second": 1.0}]).draw_without_rendering()


def test_one_setting_and_seeds(tmp_path):
    figure = grid(tmp_path, {"learning_rate": [0.1, 0.001, 0.01], "seed": [0, 1, 2, 3]}, lost={10, 11}).plot()
    assert list(panels(figure)) == [("step", "test loss"), ("learning_rate", "test loss")]
    curves, points = figure.axes
    assert figure.get_suptitle() == "test loss of 12 members (× 2 diverged)"
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["0.001", "0.01", "0.1"]
    assert curves.get_title() == "mean over seeds, with its 95 % interval"
    # The mean over seeds of 0.001, the second value: 20 / step · 1.55.
    np.testing.assert_allclose(curves.get_lines()[0].get_xydata(), [[10, 3.1], [20, 1.55]])
    np.testing.assert_allclose(marks(curves, "x"), [[10, 0.97]] * 2)
    assert len(curves.collections) == 3, "one band per learning rate"
    assert points.get_title() == "★ 1.15 at 0.1 (mean of 4 seeds)"
    assert points.get_xscale() == "log" and ticks(figure, points) == ["0.001", "0.01", "0.1"]
    np.testing.assert_allclose(points.get_lines()[0].get_xydata(), [[0.001, 1.55], [0.01, 1.85], [0.1, 1.15]])
    np.testing.assert_allclose(marks(points, "x"), [[0.01, 0.97]] * 2)
    (bars,) = (c for c in points.collections if isinstance(c, LineCollection))
    np.testing.assert_allclose(bars.get_segments()[2], [[0.1, 0.94458], [0.1, 1.35542]], atol=1e-5)


def test_seeds_alone_have_their_mean_and_interval(tmp_path):
    sweep = grid(tmp_path, {"seed": [3, 4, 5, 6, 7]}, lost={2})
    figure = sweep.plot()
    curves, strip = figure.axes
    assert len(curves.get_lines()) == 2 and len(curves.collections) == 1 and curves.get_legend() is None
    assert strip.get_xlabel() == "seed" and ticks(figure, strip) == ["3", "4", "5", "6", "7"]
    # 1.0, 1.1, 1.3, 1.4: mean 1.2, deviation √(0.1 / 3) = 0.1826.
    assert strip.get_title() == "4 seeds: 1.20 ± 0.18 (0.91 to 1.49)"
    mean, _ = strip.get_lines()
    assert mean.get_ydata() == pytest.approx([1.2, 1.2]) and len(strip.patches) == 1
    np.testing.assert_allclose(marks(strip, "x"), [[2, 0.97]])
    # Members have no curves of the accuracy, 1 - loss / 10; those without a value are at the bottom.
    figure = sweep.plot("test_accuracy")
    (strip,) = figure.axes
    assert strip.get_title() == "4 seeds: 88.0 ± 1.8 (85.1 to 90.9) %" and ticks(figure, strip, "y")[0] == "85 %"
    np.testing.assert_allclose(marks(strip, "x"), [[2, 0.03]])


def test_curves_end_when_a_member_stops_and_members_cut_short_are_rings(tmp_path):
    sweep = grid(tmp_path, {"learning_rate": [0.001, 0.01, 0.1], "seed": [0, 1]})
    first, second, _ = with_status(sweep, {1: "stopped early"}).plot().axes[0].get_lines()
    # Losses 1 and 1.1 at the end, twice that at step 10.
    np.testing.assert_allclose(first.get_xydata(), [[10, 2.1]])
    np.testing.assert_array_equal(second.get_xdata(), [10, 20])
    figure = with_status(sweep, {1: "pruned", 4: "pruned", 5: "interrupted"}).plot()
    curves, points = figure.axes
    assert figure.get_suptitle() == "test loss of 6 members (○ 2 pruned, 1 interrupted)"
    # The pruned one of 0.001 in grey, its finished member, a finished group, and a group without a finished member.
    drawn = [(line.get_xdata().tolist(), line.get_ydata()[0]) for line in curves.get_lines()]
    assert drawn == [([10], 2.2), ([10, 20], 2.0), ([10, 20], pytest.approx(2.5)), ([10], pytest.approx(2.9))]
    (rings,) = (line for line in points.get_lines() if line.get_label() == "cut short")
    np.testing.assert_allclose(rings.get_xydata(), [[0.001, 1.1], [0.1, 1.4], [0.1, 1.5]])
    assert points.get_title() == "★ 1.25 at 0.01 (mean of 2 seeds)"


def test_two_settings_have_a_heat_map(tmp_path):
    axes = {"learning_rate": [0.001, 0.01, 0.1], "model.dropout": [0.5, 0.0], "seed": [0, 1]}
    figure = grid(tmp_path, axes, lost={8, 9}).plot()
    found = panels(figure)
    cells = found["learning_rate", "model.dropout"]
    (image,) = cells.get_images()
    # Dropout upwards, so its row is turned; a cell is the mean of two losses 0.1 apart.
    np.testing.assert_allclose(image.get_array().filled(math.nan), [[1.25, 1.65, 2.05], [1.05, 1.45, math.nan]])
    assert ticks(figure, cells) == ["0.001", "0.01", "0.1"] and ticks(figure, cells, "y") == ["0", "0.5"]
    np.testing.assert_array_equal(marks(cells, "x"), [[2, 1]])
    np.testing.assert_array_equal(marks(cells, "*"), [[0, 1]])
    slice_ = found["learning_rate", "test loss"].get_lines()[0]
    np.testing.assert_allclose(slice_.get_xydata(), [[0.001, 1.05], [0.01, 1.45]])


def test_a_diverged_seed_does_not_take_all_colours_of_a_heat_map(tmp_path):
    losses: dict[Any, float | None] = {(10.0**-k, 0.1 * j): 1.0 + 0.1 * (k + j) for k in range(3) for j in range(2)}
    sweep = swept.sweep(tmp_path / "s", losses | {(1.0, 0.0): 1e6}, "learning_rate", "model.dropout")
    cells = panels(sweep.plot())["learning_rate", "model.dropout"]
    assert cells.get_images()[0].norm.vmax == 1.3 and {text.get_text() for text in cells.texts} >= {"1.1", "1e+06"}


def test_scattered_draws_are_points(tmp_path):
    points: dict[Any, float | None] = {(10.0**-k, 0.1 * k): 1.0 + k for k in range(1, 7)}
    sweep = swept.sweep(tmp_path / "s", points | {(1.0, 0.9): None}, "learning_rate", "model.dropout")
    drawn = panels(sweep.plot())["learning_rate", "model.dropout"]
    assert not drawn.get_images() and (drawn.get_xscale(), drawn.get_yscale()) == ("log", "linear")
    assert len(marks(drawn, "o")) == 6
    np.testing.assert_allclose(marks(drawn, "x"), [[1.0, 0.9]])


def test_losses_over_a_decade_have_a_logarithmic_axis(tmp_path):
    sweep = swept.sweep(tmp_path / "s", {(0.1,): 0.01, (0.01,): 1.0, (0.001,): 3.0}, "learning_rate")
    assert {axes.get_yscale() for axes in sweep.plot().axes} == {"log"}
    near = grid(tmp_path, {"learning_rate": [0.1, 0.2]})
    assert {axes.get_yscale() for axes in near.plot().axes} == {"linear"}


def test_plot_handles_sweeps_without_results(tmp_path):
    for losses in ((None, None), (math.nan, 1.0), (0.0, -1.0), (math.inf, 1.0), (1.0,)):
        points = {(0.1 * place + 0.1, place): loss for place, loss in enumerate(losses)}
        figure = swept.sweep(tmp_path / "s", points, "learning_rate", "width").plot()
        figure.draw_without_rendering()
        if losses == (None, None):
            assert figure.axes[0].get_title() == "no results" and not ticks(figure, figure.axes[0], "y")


SCALES: list[tuple[tuple[Any, ...], str, str]] = [
    ((0.1, 0.001), "log", "log"),
    ((0.0, 0.1), "log", "nominal"),
    ((0.0, 1e-4, 1e-3, 1e-2), "linear", "nominal"),
    ((0.0, 0.1, 0.2, 0.3), "linear", "linear"),
    ((1.0, math.inf), "linear", "nominal"),
    (("a", "b"), "log", "nominal"),
]


def test_scale_is_one_that_the_values_allow(tmp_path):
    for values, scale, kind in SCALES:
        losses = {(value,): 1.0 + place for place, value in enumerate(values)}
        sweep = swept.sweep(tmp_path / "s", losses, "x")
        sweep = dataclasses.replace(sweep, axes=(dataclasses.replace(sweep.axes[0], scale=scale),))
        drawn = panels(sweep.plot())["x", "test loss"]
        places = drawn.collections[0].get_offsets()[:, 0]
        assert drawn.get_xscale() == ("log" if kind == "log" else "linear"), values
        assert (places.tolist() == list(range(len(values)))) == (kind == "nominal"), values
