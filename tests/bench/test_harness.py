"""The benchmark harness: timer, cases that are not measured, results of several machines, the command, a GPU's day."""

import json
from typing import Any
from unittest.mock import Mock

import pytest

import jaxnn as jn
from jaxnn.bench import Case, Results, Row, Rows, bench, merge, read_results, write_page
from jaxnn.cli import command
from tests import studies
from tests.shell import python
from tests.studies import CPU, GPU, Settings, interrupted_at, on_cpu, study

ACTIVATIONS = jn.bench.find_studies()["activations"]
SILENT = list[str]().append


def measured_rows(*cases: Case, **settings: Any) -> Rows:
    """The rows of a study of one group."""
    return studies.measured_rows(study(lambda bench: [cases]), on_cpu(Settings(**settings)))["cpu"]


def results(label: str = CPU, seconds: float = 0.5, settings: Any = ACTIVATIONS.quick) -> Results:
    row = Row({"operation": "relu", "size": 100, "form": "jit"}, (seconds, 2 * seconds), 100.0, "elements")
    return studies.results_of(ACTIVATIONS, settings, {label: Rows([row])})


def test_interleaved_rotates_contenders_and_stops_when_the_median_is_precise():
    order: list[str] = []
    measures = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    assert jn.bench.interleaved(measures, rounds=3) == {name: (1.0, 1.0, 1.0) for name in "abc"}
    assert "".join(order) == "abcbcacab"
    values = iter([1.0, 2.0, 0.5, *[1.0] * 40])
    # The 95 % interval of the median of 9 values is that of the 2nd to the 8th.
    assert len(jn.bench.interleaved({"a": lambda: next(values)}, rounds=3, precision=0.01)["a"]) == 9
    assert len(jn.bench.interleaved({"a": lambda: 1.0}, rounds=3, precision=0.01)["a"]) == 3
    assert len(jn.bench.interleaved({"a": iter(range(1, 100)).__next__}, rounds=3, precision=0.01)["a"]) == 50
    # Conover (1999): of 10 values the 2nd and 9th contain the median with 97.9 %.
    assert jn.bench.median_interval([float(value) for value in range(1, 11)]) == (2.0, 9.0)
    assert jn.bench.median_interval([1.0, 3.0, 2.0]) == (1.0, 3.0)


def test_the_first_call_is_not_timed():
    call = Mock()
    begin = Mock(return_value=call)
    (row,) = measured_rows(Case("cpu", {"size": 1}, begin), rounds=2, seconds=0.0)
    assert row.what == {"size": 1} and len(row.seconds) == 2 and begin.call_count == 1
    assert call.call_count == 4, "to compile, once for the estimate, and two rounds"
    own = Case("cpu", {"size": 1}, lambda: (lambda: None, 7.0, {"form": "loop"}), observe=lambda: {"loss": 1.0})
    row = measured_rows(own)[0]
    assert row.work == 7.0 and row.observed == {"form": "loop", "loss": 1.0}


def test_a_failing_case_has_a_reason_and_the_others_are_measured():
    out_of_memory = RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
    for options, reason in (
        ({"begin": Mock(side_effect=jn.bench.NotMeasured("there is none here"))}, "there is none here"),
        ({"begin": lambda: Mock(side_effect=out_of_memory)}, "RuntimeError: RESOURCE_EXHAUSTED: out of memory"),
        ({"observe": Mock(side_effect=jn.DataError("no data."))}, "no data."),
    ):
        good = Case("cpu", {"size": 2}, lambda: lambda: None, observe=lambda: {"error": 0.5})
        bad, row = measured_rows(Case("cpu", {"size": 1}, **options), good)
        assert (bad.missing, bad.seconds, bad.observed, bad.time) == (reason, (), {}, None)
        assert row.missing == "" and len(row.seconds) == 3 and row.observed == {"error": 0.5}
    (bad,) = measured_rows(Case("cpu", {}, lambda: Mock(side_effect=[1, MemoryError("full")])))
    assert bad.missing == "MemoryError: full" and bad.seconds == ()
    with pytest.raises(TypeError, match="mine"):
        measured_rows(Case("cpu", {}, Mock(side_effect=TypeError("mine"))))


def test_damaged_results_are_errors(tmp_path):
    write_page(results(), tmp_path, {}, ())
    text = (tmp_path / "results.json").read_text()
    assert read_results(tmp_path / "results.json") == results() == read_results(tmp_path)
    for damaged, words in (
        (text[:-200], "JSONDecodeError"),
        (text.replace('"format": 3', '"format": 2'), "format is 2, not 3"),
        (text.replace('"seconds": [', '"hours": ['), "'seconds'"),
    ):
        (tmp_path / "results.json").write_text(damaged)
        with pytest.raises(jn.RecordError, match=f"results.json cannot be read .*{words}"):
            read_results(tmp_path)


def test_merge_makes_one_table_with_speedups_of_equal_settings(tmp_path):
    for folder, made in {
        "laptop": results(),
        "server": results(GPU, 0.025),
        "full": results(GPU, settings=ACTIVATIONS.full),
    }.items():
        write_page(made, tmp_path / folder, {}, ())
    merged = merge([tmp_path / "laptop", tmp_path / "server"], tmp_path / "both")
    assert list(merged["activations"].parts) == [CPU, GPU] and read_results(tmp_path / "both") == merged
    page = (tmp_path / "both" / "results.md").read_text()
    # 100 elements in 0.5 and 1 s: 150/s is the median; the GPU takes a twentieth of the time.
    assert "| relu, jit, best rate | – | 150 elements/s (100–200) | 3 k elements/s (2–4), 20× |" in page
    assert "Quick settings." in page and "![" in page
    assert (tmp_path / "both" / "activations.png").read_bytes().startswith(b"\x89PNG")
    for folders, error, words in (
        (["laptop", "full"], jn.RecordError, "other settings, .*'sizes'"),
        (["laptop", "laptop"], jn.RecordError, f"laptop has activations on {CPU}"),
        (["laptop"], jn.ConfigError, "two or more"),
    ):
        with pytest.raises(error, match=words):
            merge([tmp_path / folder for folder in folders], tmp_path / "none")
        assert not (tmp_path / "none").exists()


def test_a_page_grows_and_keeps_results_until_new_ones_are_complete(tmp_path):
    before = bench(study(), out=tmp_path, say=SILENT)
    with pytest.raises(KeyboardInterrupt):
        bench(study(interrupted_at(0)), quick=True, out=tmp_path, say=SILENT)
    assert read_results(tmp_path) == before
    assert bench(study(), quick=True, out=tmp_path, say=SILENT) == read_results(tmp_path) != before
    (mine,) = before["sums"].rows
    write_page(studies.results_of(study(), Settings(), {GPU: Rows()}), tmp_path, {}, ())
    bench(study(), out=tmp_path, say=SILENT)
    assert list(read_results(tmp_path)["sums"].parts) == [GPU, mine]


def test_errors_come_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("no folder")
    write_page(studies.results_of(study(), Settings(), {GPU: Rows()}), tmp_path, {}, ())
    lines: list[str] = []
    for options, error, words in (
        ({"out": tmp_path, "quick": True}, jn.RecordError, "other settings"),
        ({"out": tmp_path / "file" / "page"}, jn.RecordError, "file/page cannot be written"),
        ({"devices": ("cpu", "gpu")}, jn.ConfigError, "gpu"),
        ({"devices": ("gpus",)}, jn.ConfigError, "did you mean 'gpu'"),
        ({"devices": ()}, jn.ConfigError, "empty"),
    ):
        with pytest.raises(error, match=words):
            bench(study(), say=lines.append, **options)
    assert lines == []


def test_the_bench_command(tmp_path, capsys):
    own, empty, page = tmp_path / "own.py", tmp_path / "empty.py", tmp_path / "page"
    own.write_text("from tests.studies import study\nSTUDY = study(name='own')\n")
    empty.write_text("")
    command(["bench"])
    assert "matmul" in capsys.readouterr().out
    command(["bench", str(own), "--quick", "--out", str(page)])
    out = capsys.readouterr().out
    assert "sum of 10" in out and str(page / "results.md") in out
    assert {file.name for file in page.iterdir()} == {"results.json", "results.md", "own.png"}
    own.write_text("from tests.studies import interrupted_at, study\nSTUDY = study(interrupted_at(1))\n")
    with pytest.raises(SystemExit, match="130"):
        command(["bench", str(own), "--out", str(tmp_path / "part")])
    assert str(tmp_path / "part") in capsys.readouterr().err
    for words, error in (([str(own), "--devices", "abacus"], "abacus"), (["merge", str(page), str(page)], "--out DIR")):
        with pytest.raises(SystemExit, match="2"):
            command(["bench", *words])
        assert error in capsys.readouterr().err
    for name, words in (("matmull", "did you mean 'matmul'"), ("no.py", "path of a file"), (str(empty), "no STUDY")):
        with pytest.raises(jn.ConfigError, match=words):
            jn.bench.load_study(name, jn.bench.find_studies())


SCRIPT = "experiments/benchmarks/gpu_day.py"


@pytest.mark.slow
def test_gpu_day_records_parts_skips_complete_ones_and_fails_where_there_is_no_gpu(tmp_path):
    options = ("--small", "--device", "cpu", "--out", tmp_path)
    done = python(SCRIPT, *options, "--parts", "widths,bench")
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu_day.json").read_text())
    assert {name: part["complete"] for name, part in parts.items()} == {"widths": True, "bench": True}
    assert all(row["observed"]["member-steps/s"] > 0 for row in parts["widths"]["rows"])
    assert parts["widths"]["machine"]["label"].startswith("CPU")
    assert "| mlp | 4 |" in (tmp_path / "gpu_day.md").read_text()

    again = python(SCRIPT, *options, "--parts", "widths")
    assert again.stdout == "widths: complete, skipped\n"
    other = python(SCRIPT, "--device", "cpu", "--out", tmp_path, "--parts", "widths")
    assert other.returncode == 2 and "another device or size" in other.stderr

    # Results of another commit are kept aside, and a case that hung comes last.
    path = tmp_path / "parts" / "widths.json"
    part = json.loads(path.read_text())
    hung = part["rows"].pop(0)["what"]
    path.write_text(json.dumps(part | {"complete": False, "hung": [hung]}))
    assert python(SCRIPT, *options, "--parts", "widths").returncode == 0
    assert [row["what"] for row in json.loads(path.read_text())["rows"]][-1] == hung
    old = json.loads(path.read_text())
    path.write_text(json.dumps(old | {"machine": old["machine"] | {"commit": "another"}}))
    assert python(SCRIPT, *options, "--parts", "widths").returncode == 0
    (kept,) = (tmp_path / "earlier").glob("widths-*.json")
    assert json.loads(kept.read_text())["rows"] == old["rows"]
    assert json.loads(path.read_text())["machine"]["commit"] == old["machine"]["commit"]

    done = python(SCRIPT, "--small", "--out", tmp_path / "without", "--parts", "peers")
    peers = json.loads((tmp_path / "without" / "gpu_day.json").read_text())["peers"]
    assert done.returncode == 1 and not peers["complete"] and not peers["rows"]
    assert "device is 'gpu', which JAX cannot open" in peers["stopped"]
