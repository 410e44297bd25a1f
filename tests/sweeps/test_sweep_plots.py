"""The figure of a sweep: panels, scales, lines and marks; not pixels."""

from __future__ import annotations

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

from jaxnn.sweeps import Sweep
from jaxnn.types import ConfigError
from tests import swept


def over(folder: Path, axes: dict[str, list[Any]], lost: set[int] = frozenset()) -> Sweep:  # type: ignore[assignment]
    """A full grid whose losses grow with the position in it; members ``lost`` diverged."""
    points = itertools.product(*axes.values())
    losses = {point: None if index in lost else 1.0 + 0.1 * index for index, point in enumerate(points)}
    return swept.sweep(folder / "sweep", losses, *axes)


def panels(figure: Figure, folder: Path) -> dict[tuple[str, str], Axes]:
    """The panels by the labels of their axes, colour bars too; drawn once, which warns of what cannot be drawn."""
    figure.savefig(folder / "sweep.png", dpi=30)
    return {(axes.get_xlabel(), axes.get_ylabel()): axes for axes in figure.axes}


def ticks(axes: Axes, which: str = "x") -> list[str]:
    return [label.get_text() for label in (axes.get_xticklabels() if which == "x" else axes.get_yticklabels())]


def crosses(axes: Axes) -> np.ndarray:
    """The marks of lost members: x in data, y in shares of the panel's height."""
    return np.concatenate([line.get_xydata() for line in axes.get_lines() if line.get_marker() == "x"] or [[]])


def test_plot_of_one_axis_and_seeds(tmp_path: Path) -> None:
    sweep = over(tmp_path, {"learning_rate": [0.1, 0.001, 0.01], "seed": [0, 1, 2, 3]}, lost={10, 11})
    figure = sweep.plot()
    found = panels(figure, tmp_path)
    assert list(found) == [("step", "test loss"), ("learning_rate", "test loss")]
    curves, points = found.values()
    assert figure.get_suptitle() == "test loss of 12 members (× 2 diverged)"
    # A line a learning rate, least first, of the mean over seeds: of 0.001, the second, 20 / step · 1.55 at step 20.
    legend = curves.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["0.001", "0.01", "0.1"]
    assert legend.get_title().get_text() == "learning_rate"
    assert curves.get_title() == "mean over seeds, with the range of few seeds"
    np.testing.assert_allclose(curves.get_lines()[0].get_xydata(), [[10, 3.1], [20, 1.55]])
    assert len(curves.collections) == 3, "a band a learning rate"
    assert points.get_xscale() == "log" and points.get_title() == "★ 1.15 at 0.1, mean over 4 of 4 seeds"
    np.testing.assert_array_equal(points.get_lines()[0].get_xdata(), [0.001, 0.01, 0.1])
    np.testing.assert_allclose(points.get_lines()[0].get_ydata(), [1.55, 1.85, 1.15])
    assert points.collections[0].get_offsets().shape == (12, 2)
    (bars,) = (c for c in points.collections if isinstance(c, LineCollection))
    np.testing.assert_allclose(bars.get_segments()[2], [[0.1, 1.0], [0.1, 1.3]])


def test_plot_marks_lost_members_and_prefers_groups_that_lost_none(tmp_path: Path) -> None:
    sweep = over(tmp_path, {"learning_rate": [0.001, 0.01], "seed": [0, 1]}, lost={3})
    for metric, edge in (("test_loss", 0.97), ("test_accuracy", 0.03)):
        found = panels(sweep.plot(metric), tmp_path)
        np.testing.assert_allclose(crosses(found["learning_rate", metric.replace("_", " ")]), [[0.01, edge]])
    curves = panels(sweep.plot(), tmp_path)["step", "test loss"]
    np.testing.assert_allclose(crosses(curves), [[10, 0.97]])
    # The curve of 0.01 is that of its one member that did not diverge, whose loss is 1.2 at the end.
    np.testing.assert_allclose(curves.get_lines()[1].get_ydata(), [2.4, 1.2])
    for lost, title in (
        ({0}, "★ 1.25 at 0.01, mean over 2 of 2 seeds"),
        ({0, 2}, "★ 1.1 at 0.001, mean over 1 of 2 seeds"),
    ):
        figure = over(tmp_path, {"learning_rate": [0.001, 0.01], "seed": [0, 1]}, lost=lost).plot()
        assert panels(figure, tmp_path)["learning_rate", "test loss"].get_title() == title


def test_plot_of_seeds_alone(tmp_path: Path) -> None:
    sweep = over(tmp_path, {"seed": [3, 4, 5, 6, 7]}, lost={2})
    curves, strip = panels(sweep.plot(), tmp_path).values()
    assert len(curves.get_lines()) == 2 and len(curves.collections) == 1 and curves.get_legend() is None
    assert strip.get_xlabel() == "seed" and ticks(strip) == ["3", "4", "5", "6", "7"]
    # 1.0, 1.1, 1.3, 1.4: mean 1.2, deviation √(0.1 / 3) = 0.1826.
    assert strip.get_title() == "4 seeds: 1.20 ± 0.18 (1.00 to 1.40)"
    mean, _ = strip.get_lines()
    assert mean.get_ydata() == pytest.approx([1.2, 1.2]) and len(strip.patches) == 1
    np.testing.assert_allclose(crosses(strip), [[2, 0.97]])


def test_title_names_the_band(tmp_path: Path) -> None:
    few, many = "mean over seeds, with the range of few seeds", "mean over seeds, with its 95 % interval"
    for seeds, title in (((1, 1), "curves"), ((2, 4), few), ((4, 5), few), ((5, 6), many)):
        points = {(rate, seed): 1.0 + seed for rate, n in zip((0.1, 0.2), seeds, strict=True) for seed in range(n)}
        sweep = swept.sweep(tmp_path / str(seeds), points, "learning_rate", "seed")
        assert panels(sweep.plot(), tmp_path)["step", "test loss"].get_title() == title


def cut(sweep: Sweep, statuses: dict[int, str]) -> Sweep:
    """The sweep with these members cut short, or stopped, at step 10, their first report."""
    changed = {index: {"status": status, "step": 10} for index, status in statuses.items()}
    members = (dataclasses.replace(m, **changed.get(m.index, {})) for m in sweep.members)
    lines = (line for line in sweep.lines if line["member"] not in statuses or line["step"] == 10)
    return dataclasses.replace(sweep, members=tuple(members), lines=tuple(lines))


def test_plot_marks_members_that_were_cut_short_with_rings(tmp_path: Path) -> None:
    axes = {"learning_rate": [0.001, 0.01, 0.1], "seed": [0, 1]}
    stopped = cut(over(tmp_path, axes), {1: "stopped early"})
    first, second, _ = panels(stopped.plot(), tmp_path)["step", "test loss"].get_lines()
    # Losses 1 and 1.1 at the end, twice that at step 10.
    np.testing.assert_allclose(first.get_xydata(), [[10, 2.1]])
    np.testing.assert_array_equal(second.get_xdata(), [10, 20])
    sweep = cut(over(tmp_path, axes), {1: "pruned", 4: "pruned", 5: "interrupted"})
    figure = sweep.plot()
    curves, points = panels(figure, tmp_path).values()
    assert figure.get_suptitle() == "test loss of 6 members (○ 2 pruned, 1 interrupted)"
    # The pruned one of 0.001, grey; its member that finished; a group that did; one of which none did.
    drawn = [(line.get_xdata().tolist(), line.get_ydata()[0]) for line in curves.get_lines()]
    assert drawn == [([10], 2.2), ([10, 20], 2.0), ([10, 20], pytest.approx(2.5)), ([10], pytest.approx(2.9))]
    (rings,) = (line for line in points.get_lines() if line.get_label() == "cut short")
    np.testing.assert_allclose(rings.get_xydata(), [[0.001, 1.1], [0.1, 1.4], [0.1, 1.5]])
    assert points.get_title() == "★ 1.25 at 0.01, mean over 2 of 2 seeds"


def test_plot_of_two_axes_has_a_heat_map(tmp_path: Path) -> None:
    axes = {"learning_rate": [0.001, 0.01, 0.1], "model.dropout": [0.5, 0.0], "seed": [0, 1]}
    found = panels(over(tmp_path, axes, lost={8, 9}).plot(), tmp_path)
    assert ("model.dropout", "test loss") in found
    cells = found["learning_rate", "model.dropout"]
    (image,) = cells.get_images()
    # Dropout upwards, so its row is turned; a cell is the mean of two losses 0.1 apart.
    np.testing.assert_allclose(image.get_array().filled(math.nan), [[1.25, 1.65, 2.05], [1.05, 1.45, math.nan]])
    assert ticks(cells) == ["0.001", "0.01", "0.1"] and ticks(cells, "y") == ["0", "0.5"]
    np.testing.assert_array_equal(crosses(cells), [[2, 1]])
    (star,) = (line for line in cells.get_lines() if line.get_marker() == "*")
    np.testing.assert_array_equal(star.get_xydata(), [[0, 1]])
    slice_ = found["learning_rate", "test loss"].get_lines()[0]
    np.testing.assert_allclose(slice_.get_xydata(), [[0.001, 1.05], [0.01, 1.45]])


def test_plot_of_scattered_draws_has_a_point_each(tmp_path: Path) -> None:
    points: dict[Any, float | None] = {(10.0**-k, 0.1 * k): 1.0 + k for k in range(1, 7)}
    points[(1.0, 0.9)] = None
    sweep = swept.sweep(tmp_path / "s", points, "learning_rate", "model.dropout")
    drawn = panels(sweep.plot(), tmp_path)["learning_rate", "model.dropout"]
    assert not drawn.get_images() and (drawn.get_xscale(), drawn.get_yscale()) == ("log", "linear")
    assert sum(line.get_marker() == "o" for line in drawn.get_lines()) == 6
    np.testing.assert_allclose(crosses(drawn), [[1.0, 0.9]])
    drawn = panels(cut(sweep, dict.fromkeys(range(2, 6), "pruned")).plot(), tmp_path)["learning_rate", "model.dropout"]
    assert sum(line.get_markerfacecolor() == "none" for line in drawn.get_lines()) == 4


def test_plot_of_three_axes_has_a_panel_each(tmp_path: Path) -> None:
    axes = {"learning_rate": [0.001, 0.1], "model.dropout": [0.0, 0.5], "nesterov": [True, False], "seed": [0, 1]}
    found = panels(over(tmp_path, axes, lost={14, 15}).plot(), tmp_path)
    assert [name for name, _ in found] == ["step", "learning_rate", "model.dropout", "nesterov"]
    assert ticks(found["nesterov", "test loss"]) == ["True", "False"]


def test_plot_of_many_groups_has_a_colour_bar(tmp_path: Path) -> None:
    sweep = over(tmp_path, {"learning_rate": [10.0**-k for k in range(9)], "seed": [0, 1]})
    figure = sweep.plot()
    curves = figure.axes[0]
    found = panels(figure, tmp_path)
    assert len(curves.get_lines()) == 9 and not curves.collections and curves.get_legend() is None
    bar = found["", "learning_rate"]
    assert bar.get_yscale() == "log" and len({line.get_color() for line in curves.get_lines()}) == 9


def test_plot_of_losses_over_a_decade_has_a_logarithmic_axis(tmp_path: Path) -> None:
    sweep = swept.sweep(tmp_path / "s", {(0.1,): 0.01, (0.01,): 1.0, (0.001,): 3.0}, "learning_rate")
    assert {axes.get_yscale() for axes in sweep.plot().axes} == {"log"}
    assert {axes.get_yscale() for axes in sweep.plot("test_accuracy").axes} == {"linear"}
    near = over(tmp_path, {"learning_rate": [0.1, 0.2]})
    assert [axes.get_yscale() for axes in near.plot().axes] == ["linear"] * 2
    assert [axes.get_xlabel() for axes in near.plot("test_accuracy").axes] == ["learning_rate"], "it has no curves"
    with pytest.raises(ConfigError, match="no member has a metric 'acc'"):
        near.plot("acc")


AXES = (("seed",), ("learning_rate",), ("learning_rate", "model.dropout"), ("learning_rate", "a", "b"))
LOSSES: list[list[float | None]] = [[None, None], [math.nan, 1.0], [0.0, -1.0], [math.inf, 1.0], [1.0]]


@pytest.mark.parametrize(("axes", "losses"), [(axes, LOSSES[n % 5]) for n, axes in enumerate((*AXES, *AXES[1:3]))])
def test_plot_handles_results_without_usable_values(
    tmp_path: Path, axes: tuple[str, ...], losses: list[float | None]
) -> None:
    points = {(0.1 * place + 0.1, *[place] * (len(axes) - 1)): loss for place, loss in enumerate(losses)}
    panels(swept.sweep(tmp_path / "s", points, *axes).plot(), tmp_path)


def test_scale_is_one_that_the_values_allow(tmp_path: Path) -> None:
    cases: list[tuple[tuple[Any, ...], str, str]] = [
        ((0.1, 0.001), "log", "log"),
        ((0.0, 0.1), "log", "nominal"),
        ((0.0, 1e-4, 1e-3, 1e-2), "linear", "nominal"),
        ((0.0, 0.1, 0.2, 0.3), "linear", "linear"),
        ((1.0, math.inf), "linear", "nominal"),
        ((True, False), "linear", "nominal"),
        (("a", "b"), "log", "nominal"),
        ((1, 2), "nominal", "nominal"),
    ]
    for number, (values, scale, kind) in enumerate(cases):
        sweep = swept.sweep(tmp_path / str(number), {(value,): 1.0 + n for n, value in enumerate(values)}, "x")
        sweep = dataclasses.replace(sweep, axes=(dataclasses.replace(sweep.axes[0], scale=scale),))
        (drawn,) = (axes for axes in sweep.plot().axes if axes.get_xlabel() == "x")
        places = drawn.collections[0].get_offsets()[:, 0]  # type: ignore[index]
        assert np.isfinite(places).all() and drawn.get_xscale() == ("log" if kind == "log" else "linear")
        assert (places.tolist() == list(range(len(values)))) == (kind == "nominal"), values
