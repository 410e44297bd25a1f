"""The benchmark harness: what is timed and how, what cannot be measured, and pages of several machines."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from articles.studies import activations
from articles.studies.study_rows import distinct, measured

from jaxnn.bench import (
    Bench,
    Case,
    Machine,
    Measured,
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
    make_page,
    median_interval,
    merge,
    per_call,
    read_results,
    write_page,
)
from jaxnn.cli import command
from jaxnn.parallel import first_devices
from jaxnn.types import ConfigError, DataError, RecordError
from tests import benched
from tests.benched import Settings, interrupted_at, study

STUDIES = find_studies()
SILENT = [].append


def one_group(*cases: Case) -> Study:
    return study(lambda bench: [cases])


def measured_rows(study: Study, context: Bench) -> Rows:
    return benched.measured_rows(study, context)["cpu"]


def on_cpu(settings: Any = Settings()) -> Bench:  # noqa: B008
    return Bench({"cpu": jax.devices()[0]}, settings)


CPU, GPU = "CPU, Chip, 2 cores", "GPU, H100"


def results(label: str = CPU, seconds: float = 0.5, commit: str = "abc", **definition: Any) -> Results:
    """Figures of the activations, made by hand."""
    known = activations.STUDY.definition(activations.STUDY.quick) | definition
    rows = Rows([Row({"operation": "relu", "size": 100, "form": "jit"}, (seconds, 2 * seconds), 100.0, "elements")])
    return {"activations": Measured(known, {label: (Machine(label, {"jax": "0.12"}, commit, "2026-11-21"), rows)})}


def written(made: Results, folder: Path) -> Path:
    write_page(made, folder, {}, ())
    return folder / "results.json"


# --- timer and figures ---


def test_contenders_alternate_and_another_starts_each_round() -> None:
    order: list[str] = []
    measures = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    assert interleaved(measures, rounds=3) == {name: (1.0, 1.0, 1.0) for name in "abc"}
    assert "".join(order) == "abcbcacab"


def test_rounds_continue_until_the_median_is_precise_enough() -> None:
    figures = iter([1.0, 2.0, 0.5, *[1.0] * 40])
    precise = interleaved({"a": lambda: next(figures)}, rounds=3, precision=0.01)["a"]
    # Three of 1.0 must stand on either side of the median of n for the 95 % interval to be all ones.
    assert 6 < len(precise) < 30
    assert len(interleaved({"a": iter(range(1, 100)).__next__}, rounds=3, precision=0.01)["a"]) == 50


def test_a_measurement_lasts_as_long_as_asked_by_repeating_calls() -> None:
    calls: list[int] = []
    measure = per_call(lambda: calls.append(1), 0.001)
    assert 0 < measure() < 1e-4 and len(calls) > 20
    assert per_call(lambda: None, 0.0)() > 0


def test_statistics_are_the_spread_over_rounds_and_order_statistics_of_the_median() -> None:
    # Conover (1999): of 10 values the 2nd and 9th hold the median with 97.9 %.
    assert median_interval([float(value) for value in range(1, 11)]) == (2.0, 9.0)
    assert median_interval([1.0, 3.0, 2.0]) == (1.0, 3.0)
    row = Row({}, (0.5, 0.25, 1.0), 100.0, "elements")
    assert row.time == Quantity(0.5, 0.25, 1.0, "s")
    assert row.rate == Quantity(200.0, 100.0, 400.0, "elements/s")
    assert Row({}).time is None and Row({}).rate is None


def test_rows_are_found_by_what_identifies_them() -> None:
    rows = Rows([Row({"a": 1, "b": 1}), Row({"a": 1, "b": 2}, (1.0,)), Row({"a": 2, "b": 2})])
    assert [row.what["b"] for row in rows.where(a=1)] == [1, 2]
    assert rows.one(a=1, b=2) is rows[1] and distinct(rows, "a") == [1, 2] and measured(rows) == (rows[1],)
    assert rows.one(a=3).missing == "not measured" and rows.one(a=3).time is None


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (Quantity(0.00123, 0.001, 0.002, "s"), "1.23 ms (1–2)"),
        (Quantity(300.0, 300.0, 300.0, "s"), "5 min"),
        (Quantity(2.5e-7, 2.5e-7, 2.5e-7, "s"), "250 ns"),
        (Quantity(1.5e12, 1.4e12, 1.6e12, "FLOP/s"), "1.5 TFLOP/s (1.4–1.6)"),
        (Quantity(12_345.0, 12_345.0, 12_345.0, "elements/s"), "12.3 k elements/s"),
        (Quantity(0.714, 0.714, 0.714, ""), "0.714"),
        (Quantity(0.0, 0.0, 0.0, "B/s"), "0 B/s"),
    ],
)
def test_figures_as_text(quantity: Quantity, text: str) -> None:
    assert str(quantity) == text


# --- cases ---


def test_a_study_has_a_row_for_each_case_and_the_first_call_is_not_timed() -> None:
    rows = measured_rows(study(), on_cpu())
    assert [row.what["size"] for row in rows] == [10, 1000]
    assert all(len(row.seconds) == 3 for row in rows) and rows[1].work == 1000
    calls: list[int] = []

    def begin() -> Callable[[], object]:
        calls.append(-1)
        return lambda: calls.append(1)

    measured_rows(one_group(Case("cpu", {"size": 1}, begin)), on_cpu(Settings(rounds=2, seconds=0.0)))
    assert calls == [-1, 1, 1, 1, 1]  # prepared, compiled, once for the estimate, and two rounds


def refuse(error: Exception) -> Callable[[], Any]:
    def begin() -> Any:
        raise error

    return begin


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotMeasured("there is none here"), "there is none here"),
        (DataError("no data."), "no data."),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore"), "RuntimeError: RESOURCE_EXHAUSTED: out of memory"),
    ],
)
@pytest.mark.parametrize("when", ["begin", "first call", "observe"])
def test_a_case_that_cannot_be_measured_says_why_and_others_are(error: Exception, reason: str, when: str) -> None:
    begin = {"begin": refuse(error), "first call": lambda: refuse(error), "observe": None}[when]
    bad, good = measured_rows(
        one_group(
            Case("cpu", {"size": 1}, begin, observe=refuse(error) if when == "observe" else None),
            Case("cpu", {"size": 2}, lambda: lambda: None, observe=lambda: {"error": 0.5}),
        ),
        on_cpu(),
    )
    assert bad.missing == reason and bad.seconds == () and bad.observed == {}
    assert good.missing == "" and len(good.seconds) == 3 and good.observed == {"error": 0.5}


def test_a_bug_in_a_study_is_raised() -> None:
    with pytest.raises(TypeError, match="mine"):
        measured_rows(one_group(Case("cpu", {"size": 1}, refuse(TypeError("mine")))), on_cpu())


def test_a_prepared_call_brings_its_own_amount_of_work() -> None:
    case = Case("cpu", {"size": 1}, lambda: (lambda: None, 7.0, {"form": "loop"}), observe=lambda: {"loss": 1.0})
    (row,) = measured_rows(one_group(case), on_cpu())
    assert row.work == 7.0 and row.observed == {"form": "loop", "loss": 1.0}


def test_a_case_that_breaks_while_timed_is_not_measured() -> None:
    answers = iter([None])  # the first call is made before others of the group hold their memory
    broken = Case("cpu", {"size": 1}, lambda: lambda: next(answers, 0) or refuse(MemoryError("full"))())
    whole = Case("cpu", {"size": 2}, lambda: lambda: None)
    rows = measured_rows(study(lambda bench: [[broken], [whole]]), on_cpu())
    assert rows[0].missing == "MemoryError: full" and rows[0].seconds == () and rows[1].seconds


# --- results ---


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    assert read_results(written(results(), tmp_path)) == results() == read_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-200], "JSONDecodeError"),
        (lambda text: text.replace('"format": 3', '"format": 2'), "its format is 2, not 3"),
        (lambda text: text.replace('"seconds": [', '"hours": ['), "'seconds'"),
        (lambda text: text.replace('"parts"', '"bits"'), "'parts'"),
        (lambda text: "[]", "TypeError"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, change: Callable[[str], str], words: str) -> None:
    file = written(results(), tmp_path)
    file.write_text(change(file.read_text()))
    with pytest.raises(RecordError, match=f"{re.escape(str(file))} cannot be read .*{words}"):
        read_results(tmp_path)


def test_two_machines_make_one_table_with_speedups(tmp_path: Path) -> None:
    for folder, made in {"laptop": results(), "server": results(GPU, 0.025)}.items():
        written(made, tmp_path / folder)
    merged = merge([tmp_path / "laptop", tmp_path / "server"], tmp_path / "both")
    assert list(merged["activations"].parts) == [CPU, GPU] and read_results(tmp_path / "both") == merged
    page = (tmp_path / "both" / "results.md").read_text()
    # 100 elements in 0.5 and 1 s: 150 per second in the middle; a twentieth of the time on the other.
    assert "| relu, jit, at its best size | – | 150 elements/s (100–200) | 3 k elements/s (2–4), 20× |" in page
    assert "Quick settings." in page and "![" in page
    assert (tmp_path / "both" / "activations.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (results(GPU, sizes=[1, 2]), r"has activations defined differently, .*and not .*'sizes': \[1, 2\]"),
        (results(), f"b has activations on {CPU}, and so has"),
    ],
    ids=["definition", "twice"],
)
def test_figures_that_do_not_fit_together_are_not_merged(tmp_path: Path, other: Results, words: str) -> None:
    written(results(), tmp_path / "a")
    written(other, tmp_path / "b")
    with pytest.raises(RecordError, match=words):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_the_page_names_every_commit_it_was_measured_at() -> None:
    both = {**results(), "more": results(commit="fedcba")["activations"]}
    assert [line.split(" | ")[2] for line in make_page(both, {}).splitlines() if CPU in line] == ["abc", "fedcba"]


# --- running ---


def test_only_devices_that_are_available_are_measured() -> None:
    assert list(first_devices(None)) == ["cpu"] == list(first_devices(("cpu",)))
    for asked, words in ((("cpu", "gpu"), "gpu, which is not there"), (("gpus",), "did you mean 'gpu'"), ((), "empty")):
        with pytest.raises(ConfigError, match=words):
            bench(study(), devices=asked, say=SILENT)


def test_studies_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert load_study("matmul", STUDIES) is STUDIES["matmul"]
    own = tmp_path / "own.py"
    own.write_text("from tests.benched import study\nSTUDY = study()\n")
    assert load_study(str(own), {}).name == "sums"
    own_none = tmp_path / "none.py"
    own_none.write_text("")
    for name, words in (
        ("matmull", "did you mean 'matmul'"),
        (str(tmp_path / "no.py"), "give the path of a file"),
        (str(own_none), "defines no STUDY"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_study(name, STUDIES)


def test_a_page_grows_and_keeps_figures_of_other_devices(tmp_path: Path) -> None:
    (mine,) = bench(study(), out=tmp_path, say=SILENT)["sums"].rows
    other = results(GPU)["activations"]._replace(definition=study().definition(Settings()))
    written({"sums": other}, tmp_path)
    bench(study(), out=tmp_path, say=SILENT)
    assert list(read_results(tmp_path)["sums"].parts) == [GPU, mine]
    with pytest.raises(RecordError, match="has sums defined differently"):
        bench(study(), quick=True, out=tmp_path, say=SILENT)


def test_figures_stay_until_new_ones_are_complete(tmp_path: Path) -> None:
    before = bench(study(), out=tmp_path, say=SILENT)
    with pytest.raises(KeyboardInterrupt):
        bench(study(interrupted_at(0)), quick=True, out=tmp_path, say=SILENT)
    assert read_results(tmp_path) == before
    assert bench(study(), quick=True, out=tmp_path, say=SILENT) == read_results(tmp_path) != before


def test_a_page_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    lines: list[str] = []
    with pytest.raises(RecordError, match="file/page cannot be written"):
        bench(study(), out=tmp_path / "file" / "page", say=lines.append)
    assert lines == []


OWN = """
from tests.benched import interrupted_at, study, sum_cases
STUDY = study({cases}, name="{name}")
"""


def test_the_command_lists_measures_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert f"interrupted; the figures of the studies before are in {tmp_path / 'part'}" in capsys.readouterr().err
    for wrong in (["--devices", "gpu"], ["--devices", "abacus"]):
        with pytest.raises(SystemExit, match="2"):
            command(["bench", str(own), *wrong, "--out", str(tmp_path / "none")])
        assert not (tmp_path / "none").exists()
    with pytest.raises(SystemExit):
        command(["bench", "merge", str(page), str(page)])
    assert "give --out DIR" in capsys.readouterr().err
