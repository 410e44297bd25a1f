"""Figures of runs and sweeps: panels, titles, scales, ticks, curves and marks."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from jaxnn.record import draw_curves
from jaxnn.sweeps import Sweep
from tests import swept


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
    assert len(draw_curves([]).axes) == 1


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
