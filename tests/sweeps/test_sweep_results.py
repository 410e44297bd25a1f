"""A sweep read from its record: reading and damage, shards, the best member, selections, groups, tables and frames."""

import dataclasses
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxnn._json import json_line
from jaxnn.record import Record
from jaxnn.sweeps import Sweep, open_sweep
from jaxnn.types import ConfigError, RecordError
from tests import swept, tiny

# Test losses by learning rate and seed; accuracy is 1 - loss / 10.
GRID = {(0.01, 0): 1.0, (0.01, 1): 2.0, (0.01, 2): 3.0, (0.1, 0): 0.5, (0.1, 1): 0.7, (0.1, 2): None}


@pytest.fixture
def grid(tmp_path: Path) -> Sweep:
    return swept.sweep(tmp_path / "grid", GRID, "learning_rate", "seed")


def edited(sweep: Sweep, *positions: int, **changes: Any) -> Sweep:
    """The sweep with these members changed, all of them by default."""
    chosen = positions or range(len(sweep.members))
    changed = {position: dataclasses.replace(sweep.members[position], **changes) for position in chosen}
    return dataclasses.replace(sweep, members=tuple(changed.get(i, member) for i, member in enumerate(sweep.members)))


def test_record_is_read_with_its_values_as_they_were(grid, tmp_path):
    axes = [dataclasses.astuple(axis) for axis in grid.axes]
    assert axes == [("learning_rate", (0.01, 0.1), "log"), ("seed", (0, 1, 2), "nominal")]
    assert (grid.status, grid.monitor, grid.higher_is_better) == ("finished", "test_loss", False)
    assert grid.dir == tmp_path / "grid" and sum(grid.summary["seconds"].values()) == 2.5 and grid.experiment is None
    member = grid.members[4]
    assert (member.index, member.status, member.step) == (4, "finished", 20)
    assert member.point == {"learning_rate": 0.1, "seed": 1}
    assert member.final["test_loss"] == 0.7 and member.best["step"] == 10
    assert member.config["features"] == (8, 8) and member.fields["model.dropout"] == 0.0
    assert math.isnan(grid.members[5].final["test_loss"]) and grid.members[5].best == {}
    first, second = {"features": [4, 4], "clip": 1.0, "norm": "inf"}, {"features": [8], "clip": math.inf, "norm": "l2"}
    lines = [swept.member(0, first, 1.0), swept.member(1, second, 2.0)]
    sweep = open_sweep(str(swept.write(tmp_path / "s", lines)))
    assert [axis.values for axis in sweep.axes] == [((4, 4), (8,)), (1.0, math.inf), ("inf", "l2")]
    assert sweep.members[1].point == {"features": (8,), "clip": math.inf, "norm": "l2"}


def test_killed_sweep_reads_as_interrupted_without_its_torn_last_line(tmp_path):
    lines = [swept.member(0, {"seed": 0}, 1.0)]
    lines += [swept.member(index, {"seed": index}, status=name) for index, name in ((1, "running"), (2, "waiting"))]
    path = swept.write(tmp_path / "s", lines, status="running", summary=None)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"member": 1, "st')
    with Record.open(path):
        running = open_sweep(path)
    assert running.status == running.members[1].status == "running" and running.summary == {}
    killed = open_sweep(path)
    assert killed.status == "interrupted" and len(killed.lines) == 3
    assert [member.status for member in killed.members] == ["finished", "interrupted", "waiting"]


# A text, or the number of characters that are cut off.
DAMAGES: list[tuple[str, Any, str]] = [
    ("record.json", "", "damaged"),
    ("record.json", '{"axes": [{"name": "seed"}]}', "damaged"),
    ("members.jsonl", json_line(swept.member(0, {}) | {"point": 3}), "damaged"),
    ("members.jsonl", None, "lacks member 0.*damaged"),
    ("members.jsonl", -1, "lacks member 5.*damaged"),
    ("metrics.jsonl", '{"step": 1}\n', "damaged"),
    ("metrics.jsonl", "[1]\n", "delete that line"),
    ("metrics.jsonl", None, "lacks the report of member 0 at step 20.*damaged"),
    ("metrics.jsonl", -9, "lacks the report of member 5 at step 10.*damaged"),
]


def test_damaged_records_of_finished_sweeps_are_refused(grid, tmp_path):
    for file, content, words in DAMAGES:
        path = tmp_path / "grid" / file
        whole = path.read_text()
        path.unlink()
        if content is not None:
            path.write_text(whole[:content] if isinstance(content, int) else content)
        with pytest.raises(RecordError, match=rf"{file}.*{words}") as caught:
            open_sweep(tmp_path / "grid")
        assert "\n" not in str(caught.value)
        path.write_text(whole)


def test_best_is_the_best_complete_member_by_the_monitored_metric(grid):
    assert grid.best().index == 3 and grid.best("test_accuracy").index == 3
    higher = dataclasses.replace(grid, higher_is_better=True)
    assert higher.best().index == 2 and higher.best("train_loss").index == 3
    assert "member 2 (learning_rate 0.01, seed 2), by the highest final test_loss, chosen on test: " in repr(higher)
    assert edited(grid, 0, best={"step": 5, "test_loss": 0.1}).best().index == 3, "last values count"
    without_result: list[dict[str, Any]] = [{"final": {"test_loss": value}} for value in (math.nan, -math.inf)]
    without_result += [{"status": name} for name in ("diverged", "failed", "pruned", "interrupted", "running")]
    for changes in without_result:
        assert edited(grid, 0, **{"final": {"test_loss": 0.001}, **changes}).best().index == 3
    left = edited(grid, *range(5), status="pruned")
    assert left.best().index == 3 and "best so far" in repr(left)
    assert edited(left, 0, status="stopped early").best().index == 0


def opened(sweep: Sweep, **changes: Any) -> Sweep:
    """The sweep with its experiment, and its member 3 changed."""
    return dataclasses.replace(edited(sweep, 3, **changes), experiment=tiny.experiment())


ERRORS: dict[str, Any] = {
    "no member has a metric 'test_los': did you mean 'test_loss'": lambda s: s.best("test_los"),
    "no report has a metric 'acc': known are 'test_loss'": lambda s: s.curves("acc"),
    "'learning_rates' to select by: did you mean 'learning_rate'": lambda s: s.select(learning_rates=1),
    "no member has learning_rate = 0.5: there are 0.01, 0.1": lambda s: s.select(learning_rate=0.5),
    "no member has seed as asked: there are 0, 1, 2": lambda s: s.select(seed=lambda seed: seed > 2),
    "'learningrate' to group by: did you mean 'learning_rate'": lambda s: s.group("learningrate"),
    "the groups have no metric 'acc'": lambda s: s.group().best("acc"),
    "no member has a metric 'acc'": lambda s: s.table("acc"),
    "no member 9: their numbers are 0 to 5": lambda s: s.run(9),
    "read without its experiment: open it with open_sweep(path, experiment)": lambda s: s.run(0),
    "(6 diverged): name another metric": lambda s: edited(s, status="diverged").best(),
    "the sweep was evaluated on validation: 'validation_accuracy'": (
        lambda s: edited(dataclasses.replace(s, monitor="validation_loss"), final={"validation_accuracy": 0.5}).best(
            "test_accuracy"
        )
    ),
    "no group has a result in 'test_loss'": lambda s: edited(s, status="diverged").group().best(),
    "member 3 is pruned, so it is not a complete run: jn.fit(": lambda s: opened(s, status="pruned").run(3),
    "run it alone with learning_rate 0.1, seed 0": lambda s: dataclasses.replace(opened(s), dir=None).run(3),
}


def test_errors_name_the_value_and_the_fix(grid):
    for words, call in ERRORS.items():
        with pytest.raises((ConfigError, RecordError), match=re.escape(words)):
            call(grid)


def test_members_are_selected_by_their_fields(grid):
    selections: list[tuple[dict[str, Any], list[int]]] = [
        ({"learning_rate": np.float32(0.1)}, [3, 4, 5]),
        ({"seed": [0, 2]}, [0, 2, 3, 5]),
        ({"seed": range(1, 3), "learning_rate": {0.01}}, [1, 2]),
        ({"learning_rate": lambda rate: rate < 0.05}, [0, 1, 2]),
        ({"features": [[8, 8], [4]], "seed": 0}, [0, 3]),
        ({"model.dropout": 0.0, "seed": 1}, [1, 4]),
    ]
    for fields, expected in selections:
        assert swept.indices(grid.select(**fields)) == expected


def test_selection_is_a_sweep_with_values_and_curves(grid, tmp_path):
    np.testing.assert_array_equal(grid.values("test_loss"), [1.0, 2.0, 3.0, 0.5, 0.7, math.nan])
    steps, values = grid.curves("test_loss")
    np.testing.assert_array_equal(steps, [10, 20])
    # A member's losses are 20 / step times its last; the one that diverged reported once.
    np.testing.assert_allclose(values[3], [1.0, 0.5])
    np.testing.assert_array_equal(values[5], [2.0, math.nan])
    left = grid.select(learning_rate=0.1)
    assert left.axes[0].values == (0.1,) and left.axes[1].values == (0, 1, 2)
    assert {line["member"] for line in left.lines} == {3, 4, 5}
    assert left.curves("test_loss")[1].shape == (3, 2) and left.select(seed=1).values("test_loss") == [0.7]
    sweep = swept.sweep(tmp_path / "s", {(True,): 1.0, (False,): 2.0}, "nesterov")
    assert swept.indices(sweep.select(nesterov=True)) == [0]
    with pytest.raises(ConfigError, match="no member has nesterov = 1: there are True, False"):
        sweep.select(nesterov=1)


def test_near_values_are_selected_apart_if_they_are_given_exactly(tmp_path):
    near = swept.sweep(tmp_path / "n", {(0.1,): 1.0, (0.1000001,): 2.0, (np.nextafter(0.1, 1),): 3.0}, "learning_rate")
    assert swept.indices(near.select(learning_rate=0.1)) == [0]
    assert swept.indices(near.select(learning_rate=0.10000005)) == [0, 1, 2]


def test_groups_have_mean_deviation_and_interval(grid, tmp_path):
    first, second = grid.group().rows
    spread = first.metrics["test_loss"]
    # 1, 2, 3: mean 2, deviation 1, error 1/√3, t(0.975; 2) = 4.30265.
    assert (spread.n, spread.mean, spread.deviation) == (3, 2.0, 1.0)
    assert (spread.low, spread.high) == pytest.approx((-0.48414, 4.48414), abs=1e-5)
    assert first.point == {"learning_rate": 0.01} and first.members == (0, 1, 2) and first.num_lost == 0
    # 0.5 and 0.7, and one that diverged: mean 0.6, deviation 0.2 / √2 = 0.141421.
    spread = second.metrics["test_loss"]
    assert (second.n, second.left_out, second.num_lost) == (2, {"diverged": 1}, 1)
    assert (spread.mean, spread.deviation) == pytest.approx((0.6, 0.141421), abs=1e-6)
    by_seed = grid.group("seed", metric="test_accuracy")
    assert by_seed.by == ("seed",) and [row.members for row in by_seed.rows] == [(0, 3), (1, 4), (2, 5)]
    assert list(by_seed.rows[0].metrics) == ["test_accuracy"]
    # Of seed 0: 1 and 0.5, so 0.75; of seed 1: 1.35; of seed 2 only 3.
    averaged = grid.group("features", "test_loss")
    assert [(row.n, row.num_settings) for row in averaged.rows] == [(3, 2)]
    assert "averaged over up to 2 settings" in repr(averaged)
    row = grid.select(seed=[0, 1]).group("features", "test_loss").rows[0]
    assert "averaged over 2 settings" in repr(row) and row.spread.deviation == pytest.approx(0.6 / math.sqrt(2))
    one = grid.group(("seed", "learning_rate")).rows[0].metrics["test_loss"]
    assert (one.n, one.mean) == (1, 1.0) and math.isnan(one.deviation) and math.isnan(one.low)
    lines = [swept.member(index, {"model": {"dropout": rate}}, rate) for index, rate in enumerate((0.1, 0.2, 0.2))]
    dataclass_values = open_sweep(swept.write(tmp_path / "s", lines))
    assert [row.n for row in dataclass_values.group().rows] == [1, 1]
    assert swept.indices(dataclass_values.select(**{"model.dropout": 0.2})) == [1, 2]


def test_best_group_lost_no_member_if_there_is_one(grid):
    assert grid.group().best().point == {"learning_rate": 0.01}
    assert grid.group().best("test_accuracy").point == {"learning_rate": 0.01}
    # If all have lost members, or none has, it is by the mean; pruned members count for less than lost ones.
    both = edited(grid, 0, status="failed").group()
    assert repr(both.best()).startswith("learning_rate 0.1: n 2, 1 diverged, test_loss 0.60 ± 0.14")
    complete = edited(grid, 5, status="finished", final={"test_loss": 0.6})
    assert complete.group().best().point == {"learning_rate": 0.1}
    pruned = edited(complete, 5, status="pruned")
    assert pruned.group().best().point == {"learning_rate": 0.01}
    assert edited(pruned, 0, status="failed").group().best().left_out["pruned"] == 1


def test_members_without_a_result_are_counted_and_not_averaged(grid):
    sweep = edited(edited(grid, 0, status="pruned"), 1, status="running")
    row = sweep.group().rows[0]
    assert (row.n, row.num_lost) == (1, 0) and row.left_out == {"pruned": 1, "running": 1}
    assert row.metrics["test_loss"].mean == 3.0
    header, first, *_ = repr(sweep.group(metric="test_loss")).splitlines()
    assert header.split() == ["learning_rate", "n", "pruned", "running", "diverged", "test_loss"]
    assert first.split() == ["0.01", "1", "1", "1", "0", "3"]
    np.testing.assert_array_equal(sweep.scores("test_loss"), [math.nan, math.nan, 3.0, 0.5, 0.7, math.nan])
    assert [member.index for member in sweep.ranked("test_loss")] == [3, 4, 2, 0, 1, 5]
    diverged = edited(grid, 5, final={"test_loss": 1e30, "test_accuracy": 0.1})
    assert diverged.group().rows[1].metrics["test_accuracy"].mean == pytest.approx(0.94)
    # Finished without a finite value: as lost, in that metric.
    infinite = edited(edited(grid, 0, final={"test_loss": 0.1}), 4, final={"test_loss": math.inf})
    assert infinite.group().rows[1].without["test_loss"] == 1 and "0.5, 1 without" in repr(infinite.group())
    assert infinite.group().best("test_loss").point == {"learning_rate": 0.01}


def test_summary_has_axes_throughput_best_and_errors(grid, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    status, rates, _, *speed, best, diverged, cause, path = (line[15:] for line in repr(grid).splitlines())
    assert status == "sweep of 6: 5 finished, 1 diverged" and rates == "0.01, 0.1" and path == str(grid.dir)
    assert speed == ["1,234 member steps/s", "2.50 s (train 2.00 s, load 0.50 s), 1 program compiled"]
    assert diverged == "member 5 (learning_rate 0.1, seed 2)"
    assert cause.startswith(f"jaxnn autopsy {grid.dir} --script ") and cause.endswith(" --member 5")
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py"])
    assert f"jn.autopsy('{grid.dir}', experiment, member=5)" in repr(grid)
    assert best.startswith("member 3 (learning_rate 0.1, seed 0), by the lowest final test_loss, chosen on test: train")
    for html in (grid._repr_html_(), grid.table()._repr_html_(), grid.group()._repr_html_()):
        assert "<td" in html and "diverged" in html
    assert "no member has a result in test_loss" in repr(edited(grid, status="diverged"))
    failed = edited(grid, 0, 1, status="failed", error="units is 0.")
    assert "failed         2 with: units is 0.\n" in repr(failed)
    table = failed.table()
    assert table.header[-1] == "error" and [row[-1] for row in table.rows].count("units is 0.") == 2


def test_table_has_the_best_first_and_the_lost_last(grid, tmp_path):
    header, *rows, more = str(grid.table(limit=5)).splitlines()
    metrics = ["test_loss", "train_loss", "test_accuracy"]
    assert header.split() == ["member", "learning_rate", "seed", "status", "step", *metrics]
    assert [row.split()[0] for row in rows] == ["3", "4", "0", "1", "2"]
    assert rows[1].split() == ["4", "0.1", "1", "finished", "20", "0.7", "0.35", "0.93"] and more == "… and 1 more"
    assert str(grid.table()).splitlines()[-1].split() == ["5", "0.1", "2", "diverged", "10", "nan", "–", "–"]
    other = grid.table("test_accuracy", limit=1)
    assert list(other.header[5:]) == ["test_accuracy", "test_loss", "train_loss"] and other.rows[0][0] == "3"
    rates = [1.00000499, 10**-1.5, 10**-4.5, 0.0123456789]
    sweep = swept.sweep(tmp_path / "s", {(rate,): 1.0 + rate for rate in rates}, "learning_rate")
    assert "learning_rate 3.16228e-05" in repr(sweep) and "0.0316228" in repr(sweep.group())
    for index, rate in {row[0]: float(row[1]) for row in sweep.table().rows}.items():
        assert swept.indices(sweep.select(learning_rate=rate)) == [int(index)], "a printed value selects its member"
    widths = swept.sweep(tmp_path / "w", {((8,),): 1.0, ((4, 2),): 2.0}, "features")
    assert [row[1] for row in widths.table().rows] == ["(8,)", "(4, 2)"]


def test_groups_are_shown_with_the_decimals_of_their_deviation(grid, tmp_path):
    _, first, second, *_, note = repr(grid.group(metric="test_loss")).splitlines()
    assert first == "0.01           3  0         2.0 ± 1.0 (-0.5 to 4.5)"
    assert second == "0.1            2  1         0.60 ± 0.14 (-0.67 to 1.87)"
    assert note == "mean ± standard deviation (95 % interval of the mean, by Student's t)"
    smallest = swept.sweep(tmp_path / "s", {(0,): 1e-7, (1,): 3e-7}, "seed")
    assert "2e-07 ± 1.414e-07 (-1.071e-06 to 1.471e-06)" in repr(smallest.group())
    close = swept.sweep(tmp_path / "c", {(0,): 1.0, (1,): 1.00001}, "seed")
    assert "1.000005 ± 7.071e-06 (0.99994147 to 1.0000685)" in repr(close.group())
    equal = swept.sweep(tmp_path / "t", {(0,): 100.0, (1,): 100.0}, "seed")
    assert "  100 ± 0  " in repr(equal.group()), "two equal values are no evidence"
    empty = open_sweep(swept.write(tmp_path / "e", [], status="running"))
    assert "sweep of 0: no members" in repr(empty) and empty.table() and repr(empty.group())
    waiting = open_sweep(swept.write(tmp_path / "w", [swept.member(0, {"seed": 0}, status="waiting", step=0)]))
    assert "1 waiting" in repr(waiting) and "waiting" in str(waiting.table()) and repr(waiting.group())


def test_frames_have_a_row_per_member_or_report(grid, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"needs pandas, which is not installed: pip install pandas$"):
        grid.frame()
    # pandas is optional; its stand-in returns what it is given.
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    rows: Any = grid.frame()
    assert rows[3] == {
        **{"member": 3, "learning_rate": 0.1, "features": (8, 8), "model.dropout": 0.0, "num_steps": 20, "seed": 0},
        **{"status": "finished", "step": 20, "train_loss": 0.25, "test_loss": 0.5, "test_accuracy": 0.95},
        **{"best_step": 10, "best_train_loss": 0.25, "best_test_loss": 0.5, "best_test_accuracy": 0.95},
    }
    failed: Any = edited(grid, 0, status="failed", error="units is 0.").frame()
    assert failed[0]["error"] == "units is 0." and failed[2]["error"] is None
    curves: Any = grid.select(seed=1).frame(curves=True)
    first = {"member": 1, "learning_rate": 0.01, "seed": 1, "step": 10, "test_loss": 4.0}
    assert len(curves) == 4 and curves[0] == first
