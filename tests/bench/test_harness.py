"""The benchmark harness: timer, statistics, cases that cannot be measured, results of several machines, the command."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from articles.studies import activations
from articles.studies.study_rows import distinct, measured

from jaxnn.bench import (
    Case,
    NotMeasured,
    Quantity,
    Results,
    Row,
    Rows,
    Study,
    bench,
    find_studies,
    interleaved,
    load_study,
    median_interval,
    merge,
    per_call,
    read_results,
    write_page,
)
from jaxnn.cli import command
from jaxnn.types import ConfigError, DataError, RecordError
from tests import studies
from tests.studies import CPU, GPU, Settings, interrupted_at, on_cpu, study

SILENT = [].append


def one_group(*cases: Case) -> Study:
    return study(lambda bench: [cases])


def measured_rows(study: Study, settings: Any = Settings()) -> Rows:  # noqa: B008
    return studies.measured_rows(study, on_cpu(settings))["cpu"]


def results(label: str = CPU, seconds: float = 0.5, **changes: Any) -> Results:
    """Results of the study of activations."""
    settings = dataclasses.replace(activations.STUDY.quick, **changes)
    rows = Rows([Row({"operation": "relu", "size": 100, "form": "jit"}, (seconds, 2 * seconds), 100.0, "elements")])
    return studies.results_of(activations.STUDY, settings, {label: rows})


def written(made: Results, folder: Path) -> Path:
    write_page(made, folder, {}, ())
    return folder / "results.json"


# --- timer and statistics ---


def test_interleaved_starts_with_another_contender_each_round() -> None:
    order: list[str] = []
    measures = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    assert interleaved(measures, rounds=3) == {name: (1.0, 1.0, 1.0) for name in "abc"}
    assert "".join(order) == "abcbcacab"


def test_interleaved_stops_when_the_median_is_precise_or_after_50_rounds() -> None:
    values = iter([1.0, 2.0, 0.5, *[1.0] * 40])
    precise = interleaved({"a": lambda: next(values)}, rounds=3, precision=0.01)["a"]
    # The 95 % interval of the median of n values is 1.0 to 1.0 once three of 1.0 are on either side.
    assert 6 < len(precise) < 30
    assert len(interleaved({"a": iter(range(1, 100)).__next__}, rounds=3, precision=0.01)["a"]) == 50


def test_per_call_repeats_a_call_for_the_given_seconds() -> None:
    calls: list[int] = []
    assert 0 < per_call(lambda: calls.append(1), 0.001)() < 1e-4 and len(calls) > 20
    assert per_call(lambda: None, 0.0)() > 0


def test_statistics_of_rounds() -> None:
    # Conover (1999): of 10 values the 2nd and 9th contain the median with 97.9 %.
    assert median_interval([float(value) for value in range(1, 11)]) == (2.0, 9.0)
    assert median_interval([1.0, 3.0, 2.0]) == (1.0, 3.0)
    assert Row({}).time is None and Row({}).rate is None
    rows = Rows([Row({"a": 1, "b": 1}), Row({"a": 1, "b": 2}, (1.0,)), Row({"a": 2, "b": 2})])
    assert [row.what["b"] for row in rows.where(a=1)] == [1, 2] and rows.one(a=1, b=2) is rows[1]
    assert distinct(rows, "a") == [1, 2] and measured(rows) == (rows[1],)
    assert rows.one(a=3).missing == "not measured" and rows.one(a=3).time is None


def test_quantities_have_a_prefix_and_three_digits() -> None:
    rate = Quantity(1.5e12, 1.4e12, 1.6e12, "FLOP/s")
    texts = [str(each) for each in (rate, Quantity(2.5e-7, 2.5e-7, 2.5e-7, "s"), Quantity(0.0, 0.0, 0.0, "B/s"))]
    assert texts == ["1.5 TFLOP/s (1.4–1.6)", "250 ns", "0 B/s"]


# --- cases ---


def test_each_case_has_a_row_and_its_first_call_is_not_timed() -> None:
    rows = measured_rows(study())
    assert [row.what["size"] for row in rows] == [10, 1000]
    assert all(len(row.seconds) == 3 for row in rows) and rows[1].work == 1000
    calls: list[int] = []

    def begin() -> Callable[[], object]:
        calls.append(-1)
        return lambda: calls.append(1)

    measured_rows(one_group(Case("cpu", {"size": 1}, begin)), Settings(rounds=2, seconds=0.0))
    assert calls == [-1, 1, 1, 1, 1]  # prepared, compiled, once for the estimate, and two rounds
    own = Case("cpu", {"size": 1}, lambda: (lambda: None, 7.0, {"form": "loop"}), observe=lambda: {"loss": 1.0})
    (row,) = measured_rows(one_group(own))
    assert row.work == 7.0 and row.observed == {"form": "loop", "loss": 1.0}


def failing(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotMeasured("there is none here"), "there is none here"),
        (DataError("no data."), "no data."),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore"), "RuntimeError: RESOURCE_EXHAUSTED: out of memory"),
    ],
)
@pytest.mark.parametrize("when", ["begin", "first call", "observe"])
def test_a_failing_case_has_a_reason_and_the_others_are_measured(error: Exception, reason: str, when: str) -> None:
    begin = {"begin": failing(error), "first call": lambda: failing(error), "observe": None}[when]
    bad, good = measured_rows(
        one_group(
            Case("cpu", {"size": 1}, begin, observe=failing(error) if when == "observe" else None),
            Case("cpu", {"size": 2}, lambda: lambda: None, observe=lambda: {"error": 0.5}),
        )
    )
    assert bad.missing == reason and bad.seconds == () and bad.observed == {}
    assert good.missing == "" and len(good.seconds) == 3 and good.observed == {"error": 0.5}


def test_a_case_that_fails_while_timed_and_a_bug_in_a_study() -> None:
    answers = iter([True])  # the first call succeeds
    broken = Case("cpu", {"size": 1}, lambda: lambda: next(answers, 0) or failing(MemoryError("full"))())
    rows = measured_rows(study(lambda bench: [[broken], [Case("cpu", {"size": 2}, lambda: lambda: None)]]))
    assert rows[0].missing == "MemoryError: full" and rows[0].seconds == () and rows[1].seconds
    with pytest.raises(TypeError, match="mine"):
        measured_rows(one_group(Case("cpu", {"size": 1}, failing(TypeError("mine")))))


# --- results ---


def test_results_survive_a_round_trip_and_damaged_files_are_errors(tmp_path: Path) -> None:
    file = written(results(), tmp_path)
    text = file.read_text()
    assert read_results(file) == results() == read_results(tmp_path)
    for damaged, words in (
        (text[:-200], "JSONDecodeError"),
        (text.replace('"format": 3', '"format": 2'), "format is 2, not 3"),
        (text.replace('"seconds": [', '"hours": ['), "'seconds'"),
        (text.replace('"parts"', '"bits"'), "'parts'"),
        ("[]", "TypeError"),
    ):
        file.write_text(damaged)
        with pytest.raises(RecordError, match=f"{re.escape(str(file))} cannot be read .*{words}"):
            read_results(tmp_path)


def test_merge_makes_one_table_with_speedups(tmp_path: Path) -> None:
    for folder, made in {"laptop": results(), "server": results(GPU, 0.025)}.items():
        written(made, tmp_path / folder)
    merged = merge([tmp_path / "laptop", tmp_path / "server"], tmp_path / "both")
    assert list(merged["activations"].parts) == [CPU, GPU] and read_results(tmp_path / "both") == merged
    page = (tmp_path / "both" / "results.md").read_text()
    # 100 elements in 0.5 and 1 s: 150/s is the median; the GPU takes a twentieth of the time.
    assert "| relu, jit, best rate | – | 150 elements/s (100–200) | 3 k elements/s (2–4), 20× |" in page
    assert "Quick settings." in page and "![" in page
    assert (tmp_path / "both" / "activations.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("other", "words"),
    [(results(GPU, sizes=(1, 2)), r"other settings, .*'sizes': \[1, 2\]"), (results(), f"b has activations on {CPU}")],
    ids=["settings", "twice"],
)
def test_merge_refuses_other_settings_and_duplicates(tmp_path: Path, other: Results, words: str) -> None:
    written(results(), tmp_path / "a")
    written(other, tmp_path / "b")
    with pytest.raises(RecordError, match=words):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert not (tmp_path / "both").exists()
    with pytest.raises(ConfigError, match="two or more"):
        merge([tmp_path / "a"], tmp_path / "both")


# --- running ---


def test_studies_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    known = find_studies()
    assert load_study("matmul", known) is known["matmul"]
    own, empty = tmp_path / "own.py", tmp_path / "empty.py"
    own.write_text("from tests.studies import study\nSTUDY = study()\n")
    empty.write_text("")
    assert load_study(str(own), {}).name == "sums"
    for name, words in (
        ("matmull", "did you mean 'matmul'"),
        (str(tmp_path / "no.py"), "the path of a file"),
        (str(empty), "defines no STUDY"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_study(name, known)


def test_a_page_grows_and_keeps_results_until_new_ones_are_complete(tmp_path: Path) -> None:
    before = bench(study(), out=tmp_path, say=SILENT)
    with pytest.raises(KeyboardInterrupt):
        bench(study(interrupted_at(0)), quick=True, out=tmp_path, say=SILENT)
    assert read_results(tmp_path) == before
    assert bench(study(), quick=True, out=tmp_path, say=SILENT) == read_results(tmp_path) != before
    (mine,) = before["sums"].rows
    written(studies.results_of(study(), Settings(), {GPU: Rows()}), tmp_path)
    bench(study(), out=tmp_path, say=SILENT)
    assert list(read_results(tmp_path)["sums"].parts) == [GPU, mine]
    lines: list[str] = []
    with pytest.raises(RecordError, match="other settings"):
        bench(study(), quick=True, out=tmp_path, say=lines.append)
    assert lines == []


def test_errors_come_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    lines: list[str] = []
    with pytest.raises(RecordError, match="file/page cannot be written"):
        bench(study(), out=tmp_path / "file" / "page", say=lines.append)
    for asked, words in ((("cpu", "gpu"), "gpu"), (("gpus",), "did you mean 'gpu'"), ((), "empty")):
        with pytest.raises(ConfigError, match=words):
            bench(study(), devices=asked, say=lines.append)
    assert lines == []


OWN = "from tests.studies import interrupted_at, study, sum_cases\nSTUDY = study({cases}, name='{name}')\n"


def test_the_bench_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, broken, page = tmp_path / "own_study.py", tmp_path / "broken_study.py", tmp_path / "page"
    own.write_text(OWN.format(cases="sum_cases", name="own"))
    broken.write_text(OWN.format(cases="interrupted_at(1)", name="broken"))
    command(["bench"])
    assert "matmul" in capsys.readouterr().out
    command(["bench", str(own), "--quick", "--out", str(page)])
    out = capsys.readouterr().out
    assert "sum of 10" in out and str(page / "results.md") in out
    assert {file.name for file in page.iterdir()} == {"results.json", "results.md", "own.png"}
    with pytest.raises(SystemExit, match="130"):
        command(["bench", str(broken), "--out", str(tmp_path / "part")])
    assert str(tmp_path / "part") in capsys.readouterr().err
    for wrong in (["--devices", "gpu"], ["--devices", "abacus"]):
        with pytest.raises(SystemExit, match="2"):
            command(["bench", str(own), *wrong, "--out", str(tmp_path / "none")])
        assert not (tmp_path / "none").exists()
    with pytest.raises(SystemExit):
        command(["bench", "merge", str(page), str(page)])
    assert "--out DIR" in capsys.readouterr().err
