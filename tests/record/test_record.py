"""The run directory: whole files, one writer, what was computed on what, and a record that can be read back."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxnn import record
from jaxnn.record import is_locked, jsonable, write_json
from jaxnn.types import RecordError

RUN = {
    "name": "tiny",
    "status": "finished",
    "started": "2026-01-02T03:04:05+0000",
    "config": {"num_steps": 10},
    "options": {"monitor": "loss", "monitor_mode": "auto"},
    "steps_per_call": 1,
    "seconds_per_step_measured": {},
    "jax_flags": {},
    "layout": {"strategy": "one device", "mesh": None},
    "fingerprint": {"program": "p", "data": "d"},
    "devices": {"devices": [{"kind": "cpu"}], "versions": {"jax": "1"}},
}


def write_run(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    write_json(path / "run.json", {**RUN, **changes})
    return path


# --- what JSON can hold ---


def test_what_json_lacks_is_written_as_words_and_read_back_as_numbers(tmp_path: Path) -> None:
    with record.open_record(tmp_path) as opened:
        opened.report({"step": 1, "train_loss": math.nan, "test_loss": -math.inf, "rate": np.float32(0.5)})
    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    # parse_constant is called for NaN and infinities, which are not JSON.
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "train_loss": "nan",
        "test_loss": "-inf",
        "rate": 0.5,
    }
    (line,) = record.read_metrics(tmp_path)
    assert math.isnan(line["train_loss"]) and line["test_loss"] == -math.inf


def test_jsonable_keeps_whole_numbers_whole_and_truth_true() -> None:
    found = jsonable({"a": (1, np.int64(2), np.bool_(True), None, True, Path("x/y")), 3: [np.float32(0.5)]})
    assert json.dumps(found) == '{"a": [1, 2, true, null, true, "x/y"], "3": [0.5]}'


def test_the_old_file_survives_a_failing_write(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_json(file, {"status": "running"})
    with pytest.raises(TypeError):
        write_json(file, {"status": "finished", "bad": object()})
    assert json.loads(file.read_text()) == {"status": "running"}


def test_a_reader_sees_the_old_file_whole_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_json(file, {"status": "running"})
    with file.open() as reader:
        write_json(file, {"status": "finished"})
        assert json.load(reader) == {"status": "running"}
    assert json.loads(file.read_text()) == {"status": "finished"}


def test_the_old_file_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    write_json(file, {"status": "running"})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=r"run\.json cannot be written \(No space left on device\): free disk space"):
        write_json(file, {"status": "finished"})
    assert json.loads(file.read_text()) == {"status": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


# --- metrics.jsonl ---


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "train_l')
    assert [line["step"] for line in record.read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("text", ['{"step": 1}\n{"st\n{"step": 3}\n', "[1]\n", "\xff\n"])
def test_a_damaged_line_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordError, match=r"metrics\.jsonl holds a line that is not JSON"):
        record.read_metrics(tmp_path)


def test_no_metrics_yet(tmp_path: Path) -> None:
    assert record.read_metrics(tmp_path) == []


# --- one directory, one writer ---


def test_a_second_process_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    probe = (
        "import sys, pathlib\nfrom jaxnn.record import open_record\nopen_record(pathlib.Path(sys.argv[1])).__enter__()"
    )
    command = [sys.executable, "-c", probe, str(tmp_path)]
    with record.open_record(tmp_path):
        refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode != 0
    sentence = f"another process is writing the run directory {tmp_path}: wait for it, or choose another --run-dir."
    assert sentence in refused.stderr
    assert subprocess.run(command, capture_output=True).returncode == 0, "the lock was not let go"


def test_the_lock_is_let_go_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), record.open_record(tmp_path):
        assert is_locked(tmp_path)
        raise RuntimeError
    assert not is_locked(tmp_path)


def test_an_occupied_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match=f"{tmp_path} is not empty.*--resume {tmp_path}"):
        record.create_run_dir(tmp_path)
    with pytest.raises(RecordError, match=r"notes\.txt"):
        record.create_run_dir(tmp_path / "notes.txt")
    with pytest.raises(RecordError, match="cannot be written .*Not a directory"):
        record.create_run_dir(tmp_path / "notes.txt" / "run")


def test_an_empty_or_absent_directory_is_taken(tmp_path: Path) -> None:
    assert record.create_run_dir(tmp_path) == tmp_path
    assert record.create_run_dir(tmp_path / "a" / "b").is_dir()
    paths = {record.new_run_dir("tiny", tmp_path) for _ in range(3)}
    assert len(paths) == 3 and all(path.parent == tmp_path / "tiny" for path in paths)


# --- reading ---


def test_runs_are_found_oldest_first_whatever_their_names(tmp_path: Path) -> None:
    write_run(tmp_path / "b", started="2026-01-01T00:00:00+0000")
    write_run(tmp_path / "deep" / "er" / "a", started="2026-01-03T00:00:00+0000")
    write_run(tmp_path / "c", started="2026-01-02T00:00:00+0000")
    assert [path.name for path in record.find_records(tmp_path)] == ["b", "c", "a"]
    assert record.find_records(tmp_path / "b") == [tmp_path / "b"]
    assert record.find_records(tmp_path / "nowhere") == []


def test_a_sweep_stands_for_the_runs_of_its_members(tmp_path: Path) -> None:
    write_run(tmp_path / "alone")
    early, late = tmp_path / "early", tmp_path / "late"
    write_run(early / "members" / "0000")
    write_run(late / "shards" / "a" / "members" / "0000")
    write_json(early / "sweep.json", {"status": "finished", "started": "2026-01-01"})
    write_json(late / "shards" / "a" / "sweep.json", {"status": "finished", "started": "2026-01-02"})
    assert record.find_records(tmp_path) == [early, late, tmp_path / "alone"]
    assert record.find_records(early) == [early]
    assert record.find_records(early / "members") == [early / "members" / "0000"]


def test_a_run_that_was_killed_reads_as_interrupted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", status="running")
    with record.open_record(path):
        assert record.read_run(path)["status"] == "running"
    assert record.read_run(path)["status"] == "interrupted"


@pytest.mark.parametrize("text", ["", '{"status": "fini', "[]", "{}", '{"status": "finished"}', "\xff\xfe"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordError, match=r"run\.json cannot be read .*the record is damaged") as caught:
        record.read_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run"):
        record.read_run(tmp_path)
    with pytest.raises(RecordError, match="holds no run"):
        record.read_run(tmp_path / "nowhere")


# --- curves ---


def lines() -> list[dict[str, float]]:
    found = [
        {"step": step, "train_loss": 1.0 / step, "steps_per_second": 100.0, "examples_per_second": 800.0}
        for step in range(1, 7)
    ]
    found[1] |= {"test_loss": 0.7, "test_accuracy": 0.5}
    found[3] |= {"test_loss": math.nan, "test_accuracy": 0.75}
    found[5]["train_loss"] = math.nan
    return found


def test_curves_show_every_split_of_every_metric(tmp_path: Path) -> None:
    figure = record.draw_curves(lines(), "tiny")
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["loss", "accuracy", "steps per second"]
    train, test = panels["loss"].get_lines()
    np.testing.assert_array_equal(train.get_xdata(), [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(test.get_ydata(), [0.7, math.nan])
    np.testing.assert_array_equal(panels["accuracy"].get_lines()[0].get_xydata(), [[2, 0.5], [4, 0.75]])
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_curves_of_one_hopeless_line_are_drawn(tmp_path: Path, value: float) -> None:
    line = {"step": 1, "train_loss": value, "steps_per_second": 1.0, "examples_per_second": 8.0}
    record.draw_curves([line]).savefig(tmp_path / "curves.png")
    assert os.path.getsize(tmp_path / "curves.png") > 1000
