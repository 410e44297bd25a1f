"""A sweep read back: its members, the best of them, groups with their intervals, shards, and mistakes named."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn import record
from jaxnn.record import json_line, write_json
from jaxnn.sweeps.results.reading import is_sweep, open_sweep
from jaxnn.sweeps.results.sweep import Axis, Sweep
from jaxnn.types import ConfigError, RecordError
from tests import swept, tiny

# Test losses by learning rate and seed; accuracy is 1 - loss / 10.
GRID = {
    (0.01, 0): 1.0,
    (0.01, 1): 2.0,
    (0.01, 2): 3.0,
    (0.1, 0): 0.5,
    (0.1, 1): 0.7,
    (0.1, 2): None,
}

FACTS = {"status": "", "started": "", "config": {}, "axes": [], "monitor": "test_loss", "higher_is_better": False}


@pytest.fixture
def grid(tmp_path: Path) -> Sweep:
    return swept.sweep(tmp_path / "grid", GRID, "learning_rate", "seed")


def edited(sweep: Sweep, position: int, **changes: Any) -> Sweep:
    """The sweep with another member in that place."""
    members = list(sweep.members)
    members[position] = dataclasses.replace(members[position], **changes)
    return dataclasses.replace(sweep, members=tuple(members))


# --- reading ---


def test_what_was_written_is_read(grid: Sweep, tmp_path: Path) -> None:
    assert grid.axes == (Axis("learning_rate", (0.01, 0.1), "log"), Axis("seed", (0, 1, 2), "nominal"))
    assert (grid.status, grid.monitor, grid.higher_is_better) == ("finished", "test_loss", False)
    assert grid.dir == tmp_path / "grid" and grid.summary["seconds"] == 2.5 and grid.experiment is None
    member = grid.members[4]
    assert (member.index, member.point, member.status, member.step) == (
        4,
        {"learning_rate": 0.1, "seed": 1},
        "finished",
        20,
    )
    assert member.final["test_loss"] == 0.7 and member.best["step"] == 10 and member.dir is None
    assert member.config["features"] == (8, 8) and member.fields["model.dropout"] == 0.0
    assert math.isnan(grid.members[5].final["test_loss"]) and grid.members[5].best == {}


def test_a_directory_is_found_relative_to_its_sweep(tmp_path: Path) -> None:
    path = swept.write(tmp_path / "s", [swept.member(0, {"seed": 0}, 1.0, dir="members/0000")])
    assert open_sweep(str(path)).members[0].dir == path / "members" / "0000"


def test_swept_tuples_and_infinities_are_what_they_were(tmp_path: Path) -> None:
    lines = [
        swept.member(0, {"features": [4, 4], "clip": 1.0, "norm": "inf"}, 1.0),
        swept.member(1, {"features": [8, 8], "clip": math.inf, "norm": "l2"}, 2.0),
    ]
    sweep = open_sweep(swept.write(tmp_path / "s", lines))
    assert [axis.values for axis in sweep.axes] == [((4, 4), (8, 8)), (1.0, math.inf), ("inf", "l2")]
    assert sweep.members[1].point == {"features": (8, 8), "clip": math.inf, "norm": "l2"}


def test_a_torn_last_line_is_dropped(grid: Sweep) -> None:
    assert grid.dir is not None
    for name in ("members.jsonl", "metrics.jsonl"):
        with (grid.dir / name).open("a") as file:
            file.write('{"member": 6, "po')
    again = open_sweep(grid.dir)
    assert len(again.members) == 6 and again.lines == grid.lines


def test_the_last_line_of_a_member_counts(grid: Sweep) -> None:
    assert grid.dir is not None
    with (grid.dir / "members.jsonl").open("a") as file:
        file.write(json_line(swept.member(1, {"learning_rate": 0.01, "seed": 1}, 9.0)))
    assert open_sweep(grid.dir).values("test_loss")[1] == 9.0


def test_a_sweep_that_was_killed_reads_as_interrupted(tmp_path: Path) -> None:
    lines = [
        swept.member(0, {"seed": 0}, 1.0),
        swept.member(1, {"seed": 1}, status="running"),
        swept.member(2, {"seed": 2}, status="waiting"),
    ]
    path = swept.write(tmp_path / "s", lines, status="running", summary=None)
    with record.open_record(path):
        running = open_sweep(path)
    assert running.status == "running" and running.members[1].status == "running" and running.summary == {}
    killed = open_sweep(path)
    assert [killed.status, *(member.status for member in killed.members)] == [
        "interrupted",
        "finished",
        "interrupted",
        "waiting",
    ]


def test_where_there_is_no_sweep(tmp_path: Path) -> None:
    sentence = f"{tmp_path} holds no sweep (no sweep.json in it): give the directory of one sweep; `jaxnn runs` lists"
    with pytest.raises(RecordError, match=re.escape(sentence)):
        open_sweep(tmp_path)
    assert not is_sweep(tmp_path) and not is_sweep(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sweep.json", ""),
        ("sweep.json", '{"status": "finished"}'),
        ("sweep.json", json.dumps(FACTS | {"axes": 3})),
        ("sweep.json", json.dumps(FACTS | {"axes": [{"name": "seed"}]})),
        ("members.jsonl", '{"member": 0}\n'),
        ("members.jsonl", json.dumps(swept.member(0, {}) | {"point": 3}) + "\n"),
        ("metrics.jsonl", '{"step": 1}\n'),
        ("metrics.jsonl", "[1]\n"),
    ],
)
def test_a_damaged_record_is_named(grid: Sweep, file: str, text: str) -> None:
    assert grid.dir is not None
    (grid.dir / file).write_text(text)
    with pytest.raises(RecordError, match=rf"{file}.*(damaged|delete that line)") as caught:
        open_sweep(grid.dir)
    assert "\n" not in str(caught.value)


# --- shards ---


def shards(path: Path, *, top: bool) -> Path:
    """Four seeds, of which two shards ran two each, the second diverging once."""
    done = {
        "a": [swept.member(0, {"seed": 0}, 1.0, dir="members/0000"), swept.member(2, {"seed": 2}, 3.0)],
        "b": [swept.member(1, {"seed": 1}, 2.0), swept.member(3, {"seed": 3}, status="diverged")],
    }
    if top:
        waiting = [swept.member(index, {"seed": index}, status="waiting") for index in range(4)]
        old = [{"member": 0, "step": 5, "test_loss": 4.0}]
        swept.write(path, waiting, old, status="running", summary=None)
    for name, members in done.items():
        lines = [{"member": line["member"], "step": 10, "test_loss": 2.0} for line in members]
        swept.write(path / "shards" / name, members, lines)
    return path


def test_shards_are_merged_into_the_whole(tmp_path: Path) -> None:
    path = shards(tmp_path / "s", top=True)
    sweep = open_sweep(path)
    assert sweep.status == "finished" and sweep.axes[0].values == (0, 1, 2, 3)
    assert [member.index for member in sweep.members] == [0, 1, 2, 3]
    assert [member.status for member in sweep.members] == ["finished", "finished", "finished", "diverged"]
    np.testing.assert_array_equal(sweep.values("test_loss"), [1.0, 2.0, 3.0, math.nan])
    assert sweep.members[0].dir == path / "shards" / "a" / "members" / "0000"
    steps, values = sweep.curves("test_loss")
    np.testing.assert_array_equal(steps, [5, 10])
    np.testing.assert_array_equal(values[0], [4.0, 2.0])


def test_shards_alone_are_a_sweep(tmp_path: Path) -> None:
    path = shards(tmp_path / "s", top=False)
    sweep = open_sweep(path)
    assert is_sweep(path) and len(sweep.members) == 4 and sweep.status == "finished"
    # Two shards of 2468 member-steps in 2 seconds of training each.
    assert sweep.summary["seconds"] == 5.0 and sweep.summary["member_steps_per_second"] == 1234.0


def test_shards_that_are_not_done_leave_the_whole_as_it_says(tmp_path: Path) -> None:
    path = shards(tmp_path / "s", top=True)
    (path / "shards" / "b" / "sweep.json").unlink()
    sweep = open_sweep(path)
    assert sweep.status == "interrupted" and [m.status for m in sweep.members].count("waiting") == 2


def test_a_shard_that_runs_makes_the_whole_run(tmp_path: Path) -> None:
    path = shards(tmp_path / "s", top=True)
    shard = path / "shards" / "b"
    write_json(shard / "sweep.json", tiny.read(shard, "sweep.json") | {"status": "running"})
    (shard / "members.jsonl").write_text(json_line(swept.member(1, {"seed": 1}, status="running")))
    with record.open_record(shard):
        assert open_sweep(path).status == "running"
    assert open_sweep(path).status == "interrupted"


# --- the best ---


def test_the_best_is_by_the_monitored_metric_and_its_direction(grid: Sweep) -> None:
    assert grid.best().index == 3
    assert grid.best("test_accuracy").index == 3
    assert grid.best(mode="max").index == 2 and grid.best("test_accuracy", mode="min").index == 2
    told = dataclasses.replace(grid, higher_is_better=True)
    assert told.best().index == 2 and told.best("train_loss").index == 3


def test_the_best_evaluation_may_be_anothers(grid: Sweep) -> None:
    overfitted = edited(grid, 0, best={"step": 5, "test_loss": 0.1})
    assert overfitted.best().index == 3 and overfitted.best(at="best").index == 0


def test_nan_and_lost_members_are_never_best_and_those_cut_short_only_where_no_other_is(grid: Sweep) -> None:
    wonderful = {"test_loss": 0.001}
    for status in ("diverged", "failed"):
        assert edited(grid, 0, final=wonderful, status=status).best().index == 3
    assert edited(grid, 0, final={"test_loss": math.nan}).best().index == 3
    assert edited(grid, 0, final={"test_loss": -math.inf}).best().index == 3
    for status in ("pruned", "interrupted", "running"):
        assert edited(grid, 0, final=wonderful, status=status).best().index == 3
    pruned = [dataclasses.replace(member, status="pruned") for member in grid.members[:5]]
    left = dataclasses.replace(grid, members=(*pruned, grid.members[5]))
    assert left.best().index == 3 and "best so far" in repr(left)
    assert edited(left, 0, status="stopped early").best().index == 0


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (
            lambda s: s.best("test_los"),
            "no member has a metric 'test_los' (final): did you mean 'test_loss'? Known are",
        ),
        (lambda s: s.best(mode="most"), "mode is 'most', and must be one of auto, min, max."),
        (lambda s: s.best(at="end"), "at is 'end', and must be 'final' or 'best'."),
        (lambda s: s.curves("acc"), "no report has a metric 'acc': Known are 'test_loss'."),
        (
            lambda s: s.select(learning_rates=1),
            "the config has no field 'learning_rates' to select by: did you mean 'l",
        ),
        (lambda s: s.select(learning_rate=0.5), "no member has learning_rate = 0.5: there are 0.01, 0.1."),
        (lambda s: s.select(seed=lambda seed: seed > 2), "no member has seed as asked: there are 0, 1, 2."),
        (lambda s: s.group("learningrate"), "the config has no field 'learningrate' to group by: did you mean 'learn"),
        (lambda s: s.group(metric="acc"), "no member has a metric 'acc' (final)"),
        (lambda s: s.group().best("acc"), "the groups have no metric 'acc'"),
        (lambda s: s.run(9), "there is no member 9: their numbers are 0 to 5."),
        (lambda s: s.run(0), "the sweep was read without its experiment: open it with open_sweep(path, experiment)."),
    ],
)
def test_a_mistake_is_named(grid: Sweep, ask: Callable[[Sweep], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        ask(grid)


def test_where_no_member_has_a_result(tmp_path: Path) -> None:
    sweep = swept.sweep(tmp_path / "s", {(0,): None, (1,): None}, "seed")
    with pytest.raises(ConfigError, match=r"no member has a result in 'test_loss' \(2 diverged\): name another metric"):
        sweep.best()
    with pytest.raises(ConfigError, match="no group has a result in 'test_loss'"):
        sweep.group().best()
    assert "no member has a result in test_loss" in repr(sweep)


# --- selecting ---


def numbers(sweep: Sweep) -> list[int]:
    return [member.index for member in sweep.members]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"learning_rate": 0.1}, [3, 4, 5]),
        ({"learning_rate": np.float32(0.1)}, [3, 4, 5]),
        ({"seed": [0, 2]}, [0, 2, 3, 5]),
        ({"seed": range(1, 3), "learning_rate": {0.01}}, [1, 2]),
        ({"learning_rate": lambda rate: rate < 0.05}, [0, 1, 2]),
        ({"features": (8, 8), "seed": 0}, [0, 3]),
        ({"features": [[8, 8], [4]], "seed": 0}, [0, 3]),
        ({"model.dropout": 0.0, "seed": 1}, [1, 4]),
    ],
)
def test_members_are_selected_by_their_fields(grid: Sweep, fields: dict[str, Any], expected: list[int]) -> None:
    assert numbers(grid.select(**fields)) == expected


def test_a_selection_is_a_sweep_of_what_is_left(grid: Sweep) -> None:
    left = grid.select(learning_rate=0.1)
    assert left.axes[0].values == (0.1,) and left.axes[1].values == (0, 1, 2)
    assert {line["member"] for line in left.lines} == {3, 4, 5}
    assert left.best().index == 3 and left.curves("test_loss")[1].shape == (3, 2)
    assert left.select(seed=1).values("test_loss") == [0.7]


def test_true_is_not_one(tmp_path: Path) -> None:
    sweep = swept.sweep(tmp_path / "s", {(True,): 1.0, (False,): 2.0}, "nesterov")
    assert numbers(sweep.select(nesterov=True)) == [0]
    with pytest.raises(ConfigError, match="no member has nesterov = 1: there are True, False"):
        sweep.select(nesterov=1)


# --- numbers ---


def test_values_are_those_of_the_members_and_curves_those_of_the_reports(grid: Sweep) -> None:
    np.testing.assert_array_equal(grid.values("test_loss"), [1.0, 2.0, 3.0, 0.5, 0.7, math.nan])
    np.testing.assert_array_equal(grid.values("train_loss", at="best")[:2], [0.5, 1.0])
    steps, values = grid.curves("test_loss")
    np.testing.assert_array_equal(steps, [10, 20])
    # A member's losses are 20 / step times its last; the one that diverged reported once.
    np.testing.assert_allclose(values[3], [1.0, 0.5])
    np.testing.assert_array_equal(values[5], [2.0, math.nan])


def test_reports_of_a_member_whose_own_line_was_torn_are_passed_over(grid: Sweep) -> None:
    assert grid.dir is not None
    file = grid.dir / "members.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    left = open_sweep(grid.dir)
    assert left.curves("test_loss")[1].shape == (5, 2)


def test_groups_by_hand(grid: Sweep) -> None:
    first, second = grid.group().rows
    spread = first.metrics["test_loss"]
    # 1, 2, 3: mean 2, deviation 1; of three values the interval is the range.
    assert (spread.n, spread.mean, spread.deviation, spread.low, spread.high) == (3, 2.0, 1.0, 1.0, 3.0)
    assert first.point == {"learning_rate": 0.01} and first.members == (0, 1, 2) and first.num_diverged == 0
    # 0.5 and 0.7, and one that diverged: mean 0.6, deviation 0.2 / √2 = 0.141421.
    spread = second.metrics["test_loss"]
    assert (second.n, second.num_diverged, second.num_failed) == (2, 1, 0)
    assert (spread.mean, spread.deviation) == pytest.approx((0.6, 0.141421), abs=1e-6)


def test_the_best_group_has_lost_no_members_where_there_is_such_a_one(grid: Sweep) -> None:
    assert grid.group().best().point == {"learning_rate": 0.01}
    assert grid.group().best("test_accuracy").point == {"learning_rate": 0.01}
    # Where all have lost some, as where none has, it is by the mean; pruned ones count for less than lost ones.
    both = edited(grid, 0, status="failed").group()
    assert repr(both.best()).startswith("learning_rate 0.1: n 2, 1 diverged, test_loss 0.6000 ± 0.1414")
    whole = edited(grid, 5, status="finished", final={"test_loss": 0.6})
    assert whole.group().best().point == {"learning_rate": 0.1}
    assert edited(whole, 5, status="pruned").group().best().point == {"learning_rate": 0.01}
    assert edited(edited(whole, 5, status="pruned"), 0, status="failed").group().best().num_pruned == 1


def test_members_that_were_cut_short_are_counted_and_not_averaged(grid: Sweep) -> None:
    sweep = edited(edited(grid, 0, status="pruned"), 1, status="running")
    row = sweep.group().rows[0]
    assert (row.n, row.num_pruned, row.num_unfinished, row.num_lost) == (1, 1, 1, 0)
    assert row.metrics["test_loss"].mean == 3.0
    lines = repr(sweep.group(metric="test_loss")).splitlines()
    assert lines[0].split() == ["learning_rate", "n", "diverged", "pruned", "unfinished", "test_loss"]
    assert lines[1].split() == ["0.01", "1", "0", "1", "1", "3"]
    np.testing.assert_array_equal(sweep.scores("test_loss"), [math.nan, math.nan, 3.0, 0.5, 0.7, math.nan])
    assert [member.index for member in sweep.ranked("test_loss")] == [3, 4, 2, 0, 1, 5]


def test_what_a_lost_member_measured_is_not_averaged(grid: Sweep) -> None:
    sweep = edited(grid, 5, final={"test_loss": 1e30, "test_accuracy": 0.1})
    assert sweep.group().rows[1].metrics["test_accuracy"].mean == pytest.approx(0.94)
    failed = edited(grid, 5, status="failed").group()
    assert failed.rows[1].num_failed == 1 and "failed" in repr(failed) and "diverged" not in repr(failed)


def test_groups_by_other_fields(grid: Sweep) -> None:
    by_seed = grid.group("seed", metric="test_accuracy")
    assert by_seed.by == ("seed",) and [row.members for row in by_seed.rows] == [(0, 3), (1, 4), (2, 5)]
    assert list(by_seed.rows[0].metrics) == ["test_accuracy"]
    assert len(grid.group(["learning_rate", "seed"]).rows) == 6
    assert [row.n for row in grid.group("features").rows] == [5]
    one = grid.group(("seed", "learning_rate")).rows[0].metrics["test_loss"]
    assert (one.n, one.mean) == (1, 1.0) and math.isnan(one.deviation) and math.isnan(one.low)


def test_a_nested_config_may_be_an_axis(tmp_path: Path) -> None:
    lines = [swept.member(index, {"model": {"dropout": rate}}, rate) for index, rate in enumerate((0.1, 0.2, 0.2))]
    sweep = open_sweep(swept.write(tmp_path / "s", lines))
    assert [row.n for row in sweep.group().rows] == [1, 2]
    assert numbers(sweep.select(**{"model.dropout": 0.2})) == [1, 2]


# --- what is shown ---


def test_the_summary_says_how_many_how_fast_and_which_is_best(grid: Sweep) -> None:
    assert repr(grid).splitlines() == [
        "finished         sweep of 6: 5 finished, 1 diverged",
        "learning_rate    0.01, 0.1",
        "seed             0, 1, 2",
        "throughput       1,234 member steps/s",
        "time             2.50 s, 1 program compiled",
        "best at the end  member 3 (learning_rate 0.1, seed 0): train_loss 0.25, test_loss 0.5, test_accuracy 0.95",
        f"record           {grid.dir}",
    ]
    assert "<td" in grid._repr_html_() and "5 finished, 1 diverged" in grid._repr_html_()


def test_the_table_has_the_best_first_and_the_lost_last(grid: Sweep) -> None:
    header, *rows, more = str(grid.table(limit=5)).splitlines()
    assert header.split() == ["member", "learning_rate", "seed", "status", "step"] + [
        "test_loss",
        "train_loss",
        "test_accuracy",
    ]
    assert [row.split()[0] for row in rows] == ["3", "4", "0", "1", "2"]
    assert rows[1].split() == ["4", "0.1", "1", "finished", "20", "0.7", "0.35", "0.93"] and more == "… and 1 more"
    assert str(grid.table()).splitlines()[-1].split() == ["5", "0.1", "2", "diverged", "10", "nan", "–", "–"]
    assert "<th" in grid.table()._repr_html_() and "… and 1 more" in grid.table(limit=5)._repr_html_()


def test_the_table_is_by_another_metric_or_evaluation_where_asked(grid: Sweep) -> None:
    by_accuracy = grid.table("test_accuracy", limit=1)
    assert (
        list(by_accuracy.header[5:]) == ["test_accuracy", "test_loss", "train_loss"] and by_accuracy.rows[0][0] == "3"
    )
    best = edited(grid, 0, best={"step": 5, "test_loss": 0.1}).table(at="best", limit=1)
    assert best.header[4] == "best step" and best.rows[0] == ["0", "0.01", "0", "finished", "5", "0.1", "–", "–"]
    with pytest.raises(ConfigError, match="no member has a metric 'acc'"):
        grid.table("acc")


def test_why_members_failed_is_told(grid: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = edited(grid, 0, status="failed", error="hidden is 0.\nTraceback: …", final={})
    sweep = edited(sweep, 1, status="failed", error="hidden is 0.", final={})
    assert "failed           member 0 (learning_rate 0.01, seed 0) and 1 more: hidden is 0.\n" in repr(sweep)
    table = sweep.table()
    assert table.header[-1] == "error" and [row[-1] for row in table.rows].count("hidden is 0.") == 2
    assert "error" not in grid.table().header
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    rows: Any = sweep.frame()
    assert rows[0]["error"].startswith("hidden is 0.") and rows[2]["error"] is None


def test_a_point_that_is_printed_can_be_selected(tmp_path: Path) -> None:
    rates = [1.00000499, 10**-1.5, 10**-4.5, 0.0123456789]
    sweep = swept.sweep(tmp_path / "s", {(rate,): 1.0 + rate for rate in rates}, "learning_rate")
    assert "learning_rate 3.16228e-05" in repr(sweep) and "0.0316228" in repr(sweep.group())
    printed = {row[0]: float(row[1]) for row in sweep.table().rows}
    for index, rate in printed.items():
        assert numbers(sweep.select(learning_rate=rate)) == [int(index)]


def test_groups_are_shown_with_as_many_decimals_as_their_mean(grid: Sweep) -> None:
    assert repr(grid.group(metric="test_loss")).splitlines() == [
        "learning_rate  n  diverged  test_loss",
        "0.01           3  0         2.000 ± 1.000 (1.000 to 3.000)",
        "0.1            2  1         0.6000 ± 0.1414 (0.5000 to 0.7000)",
        "mean ± standard deviation (95 % bootstrap interval of the mean)",
        "Of fewer than 5 members it is their range, and holds the mean less often than 95 %.",
    ]
    assert "<th" in grid.group()._repr_html_() and "0.6000 ± 0.1414" in grid.group()._repr_html_()


def test_numbers_too_small_for_decimals_have_exponents(tmp_path: Path) -> None:
    sweep = swept.sweep(tmp_path / "s", {(0,): 1e-7, (1,): 3e-7}, "seed")
    assert "2e-07 ± 1.4e-07 (1e-07 to 3e-07)" in repr(sweep.group())
    sweep = swept.sweep(tmp_path / "t", {(0,): 100.0, (1,): 100.0001}, "seed")
    assert "100 ± 7.1e-05 (100 to 100)" in repr(sweep.group())


def test_a_sweep_of_nothing_yet_is_shown(tmp_path: Path) -> None:
    sweep = open_sweep(swept.write(tmp_path / "s", [], status="running"))
    assert "sweep of 0: no members" in repr(sweep) and sweep.table() and repr(sweep.group())
    waiting = open_sweep(swept.write(tmp_path / "w", [swept.member(0, {"seed": 0}, status="waiting", step=0)]))
    assert "1 waiting" in repr(waiting) and "waiting" in str(waiting.table()) and repr(waiting.group())


# --- frames ---


def test_frames_without_pandas_say_how_to_get_it(grid: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for ask in (grid.frame, grid.curves_frame, grid.group().frame):
        with pytest.raises(ConfigError, match=r"needs pandas, which is not installed: pip install pandas$"):
            ask()


def test_what_frames_hold(grid: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    # pandas is optional: here stands in for it what it is given.
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    rows: Any = grid.frame()
    assert rows[3] == {
        **{"member": 3, "learning_rate": 0.1, "features": (8, 8), "model.dropout": 0.0, "num_steps": 20, "seed": 0},
        **{"status": "finished", "step": 20, "train_loss": 0.25, "test_loss": 0.5, "test_accuracy": 0.95},
        **{"best_step": 10, "best_train_loss": 0.25, "best_test_loss": 0.5, "best_test_accuracy": 0.95},
    }
    curves: Any = grid.select(seed=1).curves_frame()
    assert len(curves) == 4
    assert curves[0] == {"member": 1, "learning_rate": 0.01, "seed": 1, "step": 10, "test_loss": 4.0}
    groups: Any = grid.group().frame()
    assert groups[0]["learning_rate"] == 0.01 and groups[0]["test_loss_mean"] == 2.0 and groups[1]["diverged"] == 1
    assert groups[0]["test_loss_std"] == 1.0 and groups[0]["test_loss_high"] == 3.0


# --- one member as a run ---


def test_a_member_is_loaded_as_the_run_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s"
    experiment = tiny.experiment(learning_rate=0.5)
    alone = tiny.fit(experiment.replace(learning_rate=0.25, seed=1), path / "members" / "0000", monitor="accuracy")
    config = tiny.read(path / "members" / "0000")["config"]
    point = {"learning_rate": 0.25, "seed": 1}
    line = swept.member(7, point, config=config, dir="members/0000", final=dict(alone.final))
    sweep = open_sweep(swept.write(path, [line]), experiment)
    for run in (sweep.run(7), sweep.run(sweep.members[0])):
        assert isinstance(run, jn.Run) and run.summary.status == "finished"
        tiny.assert_bitwise_equal(run.state.params, alone.state.params)
        assert run.experiment.config == tiny.Config(learning_rate=0.25, seed=1)


def test_a_member_without_a_directory_cannot_be_loaded(grid: Sweep) -> None:
    sweep = dataclasses.replace(grid, experiment=tiny.experiment())
    with pytest.raises(
        RecordError,
        match="member 3 has no run directory: .*options record and member_runs .*alone with learning_rate 0.1, seed 0",
    ):
        sweep.run(3)
