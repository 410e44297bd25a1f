"""Studies: what is timed and how, what cannot be is said, and the figures of several machines make one page."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxnn import bench as room
from jaxnn.bench import STUDIES, bench, merge, read_results
from jaxnn.bench.machine import Column
from jaxnn.bench.numbers import format_quantity
from jaxnn.bench.page import make_page
from jaxnn.bench.render import to_html, to_markdown
from jaxnn.bench.results import Measured, Part, Results, write_results
from jaxnn.bench.rows import Quantity, Row, Rows
from jaxnn.bench.running import run_study
from jaxnn.bench.studies import activations, find_study, matmul
from jaxnn.bench.study import Begun, Bench, Case, Finding, NotMeasured, Study
from jaxnn.bench.timing import time_in_turn
from jaxnn.bench.training import training_call
from jaxnn.bench.writing import draw
from jaxnn.cli.app import main
from jaxnn.parallel import first_devices
from jaxnn.types import ConfigError, DataError, RecordError
from tests import tiny


@dataclasses.dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = (10, 1000)
    rounds: int = 3
    seconds: float = 0.001


def sum_cases(bench: Bench) -> Iterator[Sequence[Case]]:
    for size in bench.settings.sizes:
        yield [Case(kind, {"size": size}, lambda size=size: lambda: sum(range(size)), size) for kind in bench.devices]


def sum_findings(rows: Rows) -> list[Finding]:
    return [Finding("A0", f"sum of {row.what['size']}", row.time, "fast") for row in rows]


def study(cases: Callable[[Bench], Any] = sum_cases, **changes: Any) -> Study:
    fields: dict[str, Any] = {
        "name": "sums",
        "claims": ("A0",),
        "title": "How long?",
        "method": "All of it.",
        "full": Settings(),
        "quick": Settings((10,)),
        "cases": cases,
        "findings": sum_findings,
        "draw": lambda columns, figure: None,
    }
    return Study(**{**fields, **changes})


def on_cpu(settings: Any = Settings()) -> Bench:  # noqa: B008
    return Bench({"cpu": jax.devices()[0]}, settings)


def column(device: str, kind: str) -> Column:
    return Column(device, kind, 2, 0.5, {"jax": "0.12"}, "abc", "2026-11-21")


def results(kind: str = "Chip", device: str = "cpu", seconds: float = 0.5, **definition: Any) -> Results:
    """Made-up figures of the activations."""
    known = activations.STUDY.definition(activations.STUDY.quick) | definition
    rows = Rows([Row({"operation": "relu", "size": 100, "form": "jit"}, (seconds, 2 * seconds), 100.0, "elements")])
    one = column(device, kind)
    return {"activations": Measured(known, True, {one.label: Part(one, rows)})}


# --- timing ---


def test_each_call_is_made_in_turn_another_first_each_round_and_as_often_as_its_time_allows() -> None:
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in "abc"}
    timed = time_in_turn(calls, 3, 0.0)
    assert {name: len(figures) for name, figures in timed.items()} == {"a": 3, "b": 3, "c": 3}
    assert "".join(seen[3:]) == "abcbcacab"  # after one each, to know how long it takes
    before = len(seen)
    time_in_turn({"a": calls["a"]}, 2, 0.001)
    assert len(seen) - before > 20


def test_a_row_tells_time_and_rate_with_their_spread() -> None:
    row = Row({}, (0.5, 0.25, 1.0), 100.0, "elements")
    assert row.time == Quantity(0.5, 0.25, 1.0, "s")
    assert row.rate == Quantity(200.0, 100.0, 400.0, "elements/s")
    assert Row({}).time is None and Row({}).rate is None


def test_rows_are_found_by_what_they_are() -> None:
    rows = Rows([Row({"a": 1, "b": 1}), Row({"a": 1, "b": 2}, (1.0,)), Row({"a": 2, "b": 2})])
    assert [row.what["b"] for row in rows.where(a=1)] == [1, 2]
    assert rows.one(a=1, b=2) is rows[1] and rows.values("a") == [1, 2] and rows.measured() == (rows[1],)
    assert rows.one(a=3).missing == "not measured" and rows.one(a=3).time is None


# --- running ---


def test_a_study_has_a_row_for_each_case_in_order() -> None:
    rows = run_study(study(), on_cpu(), lambda line: None)["cpu"]
    assert [row.what["size"] for row in rows] == [10, 1000]
    assert all(len(row.seconds) == 3 for row in rows) and rows[1].work == 1000


def test_the_first_call_is_not_timed() -> None:
    calls: list[int] = []

    def cases(bench: Bench) -> Iterator[Sequence[Case]]:
        def begin() -> Callable[[], object]:
            calls.append(-1)
            return lambda: calls.append(1)

        yield [Case("cpu", {"size": 1}, begin)]

    run_study(study(cases), on_cpu(Settings(rounds=2, seconds=0.0)), lambda line: None)
    assert calls == [-1, 1, 1, 1, 1]  # begun, compiled, once to know how long it takes, and two rounds


def refuse(error: Exception) -> Callable[[], Any]:
    def begin() -> Any:
        raise error

    return begin


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NotMeasured("there is none here"), "there is none here"),
        (DataError("no data."), "no data."),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore"), "RuntimeError: RESOURCE_EXHAUSTED: out of memory"),
    ],
)
@pytest.mark.parametrize("when", ["begin", "first call", "observe"])
def test_what_cannot_be_measured_says_why_and_the_rest_goes_on(error: Exception, told: str, when: str) -> None:
    def cases(bench: Bench) -> Iterator[Sequence[Case]]:
        begin = {"begin": refuse(error), "first call": lambda: refuse(error), "observe": None}[when]
        yield [
            Case("cpu", {"size": 1}, begin, observe=refuse(error) if when == "observe" else None),
            Case("cpu", {"size": 2}, lambda: lambda: None, observe=lambda: {"error": 0.5}),
        ]

    bad, good = run_study(study(cases), on_cpu(), lambda line: None)["cpu"]
    assert bad.missing == told and bad.seconds == () and bad.observed == {}
    assert good.missing == "" and len(good.seconds) == 3 and good.observed == {"error": 0.5}


def test_a_mistake_in_a_study_is_not_swallowed() -> None:
    def cases(bench: Bench) -> Iterator[Sequence[Case]]:
        yield [Case("cpu", {"size": 1}, refuse(TypeError("mine")))]

    with pytest.raises(TypeError, match="mine"):
        run_study(study(cases), on_cpu(), lambda line: None)


def test_a_training_call_goes_on_from_where_the_one_before_left_off() -> None:
    def losses(num_steps: int, times: int) -> list[float]:
        train, _, _ = training_call(tiny.experiment(), tiny.splits(), "cpu", num_steps)
        return [float(train().sums["loss"]) for _ in range(times)]

    parts = losses(5, 3)
    assert sum(parts) == pytest.approx(losses(15, 1)[0], rel=1e-6) and parts[2] < parts[0]


def test_a_training_call_is_as_long_as_a_run_s_where_nothing_is_said() -> None:
    train, num_steps, _ = training_call(tiny.experiment(num_steps=500), tiny.splits(), "cpu")
    # A step of tens of microseconds is less than a call.
    assert 500 >= num_steps > 16 and 500 % num_steps == 0
    # It may be a few steps only where the machine is busy, and few need not make a loss smaller.
    losses = [float(train().sums["loss"]) for _ in range(20)]
    assert losses[0] > losses[-1] > 0


def test_the_work_is_what_was_found_out_when_the_call_was_made() -> None:
    def cases(bench: Bench) -> Iterator[Sequence[Case]]:
        begun = Begun(lambda: None, 7.0, {"form": "loop"})
        yield [Case("cpu", {"size": 1}, lambda: begun, observe=lambda: {"loss": 1.0})]

    (row,) = run_study(study(cases), on_cpu(), lambda line: None)["cpu"]
    assert row.work == 7.0 and row.observed == {"form": "loop", "loss": 1.0}


def test_what_breaks_while_it_is_timed_is_not_measured() -> None:
    def cases(bench: Bench) -> Iterator[Sequence[Case]]:
        answers = iter([None])
        # The first call is made before others of the group hold their memory.
        yield [Case("cpu", {"size": 1}, lambda: lambda: next(answers, 0) or refuse(MemoryError("full"))())]
        yield [Case("cpu", {"size": 2}, lambda: lambda: None)]

    broken, whole = run_study(study(cases), on_cpu(), lambda line: None)["cpu"]
    assert broken.missing == "MemoryError: full" and broken.seconds == () and whole.seconds


# --- results ---


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = results()
    assert read_results(write_results(written, tmp_path)) == written
    assert read_results(tmp_path) == written


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text[:-200], "is no whole JSON file"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "is no results file of format 1"),
        (lambda text: text.replace('"seconds": [', '"hours": ['), "is partial or was changed (KeyError: 'hours'"),
        (lambda text: text.replace('"parts"', '"bits"'), "is partial or was changed (KeyError: 'parts')"),
        (lambda text: "[]", "is no results file of format 1"),
    ],
)
def test_a_partial_file_is_refused_with_its_name(tmp_path: Path, change: Callable[[str], str], told: str) -> None:
    file = write_results(results(), tmp_path)
    file.write_text(change(file.read_text()))
    told = told.replace("'hours'", "'seconds'") if "hours" in told else told
    with pytest.raises(RecordError, match=re.escape(f"{file} {told}")):
        read_results(tmp_path)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"results\.json cannot be read: No such file"):
        read_results(tmp_path)


def test_two_machines_make_one_table_with_speedups(tmp_path: Path) -> None:
    for folder, made in {"laptop": results("Chip"), "server": results("H100", "gpu", 0.025)}.items():
        write_results(made, tmp_path / folder)
    merged = merge([tmp_path / "laptop", tmp_path / "server"], tmp_path / "both")
    assert list(merged["activations"].parts) == ["CPU, Chip, 2 cores", "GPU, H100"]
    page = (tmp_path / "both" / "results.md").read_text()
    # 100 elements in 0.5 and 1 s: 150 a second in the middle; a twentieth of the time on the other.
    assert "| relu, jit, at its best size | – | 150 elements/s (100–200) | 3 k elements/s (2–4), 20× |" in page
    assert (tmp_path / "both" / "activations.png").read_bytes().startswith(b"\x89PNG")
    assert read_results(tmp_path / "both") == merged


def test_different_definitions_are_not_merged(tmp_path: Path) -> None:
    write_results(results(), tmp_path / "a")
    write_results(results("H100", "gpu", sizes=[1, 2]), tmp_path / "b")
    told = r"activations was defined differently: sizes is \[100, .*\] in .*a and \[1, 2\] in .*b\. Measure one of them"
    with pytest.raises(RecordError, match=told):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_a_device_measured_twice_is_not_merged(tmp_path: Path) -> None:
    write_results(results(), tmp_path / "a")
    with pytest.raises(RecordError, match="both have figures of activations on CPU, Chip, 2 cores: leave one of them"):
        merge([tmp_path / "a", tmp_path / "a"], tmp_path / "both")


# --- the page ---


def test_a_kind_of_device_that_nobody_measured_has_a_column_that_says_so() -> None:
    page = to_markdown(make_page(results(), STUDIES))
    assert "| claim | what | the article | CPU, Chip, 2 cores | GPU |" in page
    assert "| 150 elements/s (100–200) | not measured |" in page
    assert "Measured quickly, with small sizes and few rounds: activations." in page
    assert "matmul" in page.split("## Not measured")[1]


def test_html_escapes_and_tells_the_same() -> None:
    page = to_html(make_page(results("<Chip>"), STUDIES))
    assert "CPU, &lt;Chip&gt;, 2 cores" in page and "150 elements/s (100–200)" in page and "<Chip>" not in page
    assert '<img src="activations.png"' in page


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (Quantity(0.00123, 0.001, 0.002, "s"), "1.23 ms (1–2)"),
        (Quantity(300.0, 300.0, 300.0, "s"), "5 min"),
        (Quantity(2.5e-7, 2.5e-7, 2.5e-7, "s"), "250 ns"),
        (Quantity(1.5e12, 1.4e12, 1.6e12, "FLOP/s"), "1.5 TFLOP/s (1.4–1.6)"),
        (Quantity(12_345.0, 12_345.0, 12_345.0, "elements/s"), "12.3 k elements/s"),
        (Quantity(0.714, 0.714, 0.714, ""), "0.714"),
        (Quantity(0.0, 0.0, 0.0, ""), "0"),
    ],
)
def test_figures_as_text(quantity: Quantity, text: str) -> None:
    assert format_quantity(quantity) == text


# --- asking for it ---


def test_the_devices_that_there_are_and_no_others() -> None:
    assert list(first_devices(None)) == ["cpu"] == list(first_devices(("cpu",)))
    with pytest.raises(ConfigError, match="devices asks for gpu, which is not there: "):
        first_devices(("cpu", "gpu"))
    with pytest.raises(ConfigError, match="devices has 'gpus', and there is no such kind: did you mean 'gpu'"):
        first_devices(("gpus",))
    with pytest.raises(ConfigError, match="devices is empty"):
        first_devices(())


def test_a_study_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="no study 'matmull': did you mean 'matmul'"):
        find_study("matmull")
    with pytest.raises(ConfigError, match="no study is named"):
        bench([])


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations alone, and quick ones quicker."""
    quick = dataclasses.replace(activations.QUICK, sizes=(10, 100), seconds=0.0, rounds=2)
    fast = dataclasses.replace(activations.STUDY, quick=quick)
    monkeypatch.setattr("jaxnn.bench.studies.STUDIES", (fast,))
    monkeypatch.setattr("jaxnn.bench.measuring.STUDIES", (fast,))


def test_a_page_may_be_made_study_by_study_and_the_figures_of_other_devices_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    first = bench("activations", quick=True, out=tmp_path, say=lambda line: None)
    (mine,) = first["activations"].parts
    known = first["activations"].parts[mine]._asdict()
    other = column("gpu", "H100")
    write_results(
        {"activations": first["activations"]._replace(parts={other.label: Part(other, known["rows"])})}, tmp_path
    )
    bench("activations", quick=True, out=tmp_path, say=lambda line: None)
    assert list(read_results(tmp_path)["activations"].parts) == [other.label, mine]
    with pytest.raises(RecordError, match="activations was defined differently: sizes is "):
        bench("activations", out=tmp_path, say=lambda line: None)


def test_a_part_is_not_merged_and_nothing_is_concluded_from_it(tmp_path: Path) -> None:
    part, other = results("Chip"), results("Other")
    (label,) = part["activations"].parts
    halved = part["activations"].parts[label]._replace(whole=False)
    part = {"activations": part["activations"]._replace(parts={label: halved})}
    write_results(part, tmp_path / "part")
    write_results(other, tmp_path / "other")
    with pytest.raises(RecordError, match=f"part has only a part of activations on {label}, interrupted: measure it"):
        merge([tmp_path / "other", tmp_path / "part"], tmp_path / "both")
    told = to_markdown(make_page(part, STUDIES))
    assert f"Interrupted on {label} after 1 cases" in told and "| A1 |" not in told


def test_each_commit_that_a_page_was_measured_at_is_told() -> None:
    first, second = results("Chip"), results("Chip")
    (label,) = first["activations"].parts
    later = second["activations"].parts[label]
    later = later._replace(column=later.column._replace(commit="fedcba", load=3.0))
    both = {**first, "more": second["activations"]._replace(parts={label: later})}
    (line,) = [line for line in to_markdown(make_page(both, [])).splitlines() if line.startswith(f"| {label} |")]
    assert "; fedcba |" in line and "to 3.0 |" in line


def interrupted_at(number: int) -> Callable[[Bench], Iterator[Sequence[Case]]]:
    def cases(bench: Bench) -> Iterator[Sequence[Case]]:
        for count, group in enumerate(sum_cases(bench)):
            if count == number:
                raise KeyboardInterrupt
            yield group

    return cases


def test_what_was_measured_before_an_interruption_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxnn.bench.studies.STUDIES", (broken := study(interrupted_at(1)),))
    monkeypatch.setattr("jaxnn.bench.measuring.STUDIES", (broken,))
    with pytest.raises(SystemExit, match="130"):
        main(["bench", broken.name, "--out", str(tmp_path)])
    assert f"interrupted; what is kept is in {tmp_path / 'results.json'}" in capsys.readouterr().err
    (part,) = read_results(tmp_path)[broken.name].parts.values()
    first, *_ = sum_cases(on_cpu())
    assert [row.what for row in part.rows] == [case.what for case in first] and not part.whole


def on_one(bench: Bench) -> Iterator[Sequence[Case]]:
    yield [Case("cpu", {"size": 1}, lambda: lambda: 1)]


def broken_off_and_begun_again(folder: Path, monkeypatch: pytest.MonkeyPatch, commits: tuple[str, str]) -> list[str]:
    """What is said when a study that was interrupted in its second group, at one commit, is measured at another."""
    said: list[str] = []
    for tried, commit in zip((study(interrupted_at(1)), study()), commits, strict=True):
        monkeypatch.setattr("jaxnn.bench.studies.STUDIES", (tried,))
        monkeypatch.setattr("jaxnn.bench.measuring.STUDIES", (tried,))
        here = column("cpu", "Chip")._replace(commit=commit)
        monkeypatch.setattr("jaxnn.bench.measuring.describe_column", lambda device, here=here: here)
        said.clear()
        with contextlib.suppress(KeyboardInterrupt):
            bench(tried.name, out=folder, say=said.append)
    return said


def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = broken_off_and_begun_again(tmp_path, monkeypatch, ("abcdef", "abcdef"))
    assert ["was measured before" in line for line in said[1:-1]] == [True, *[False] * (len(said) - 3)]
    (part,) = read_results(tmp_path)[study().name].parts.values()
    assert part.whole and [row.what for row in part.rows] == [
        case.what for group in sum_cases(on_cpu()) for case in group
    ]


@pytest.mark.parametrize("commits", [("abcdef", "fedcba"), ("abcdef+", "abcdef+")])
def test_what_other_code_measured_is_measured_again(
    commits: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("before" in line for line in broken_off_and_begun_again(tmp_path, monkeypatch, commits))


def test_the_figures_of_other_prices_are_measured_again() -> None:
    assert [one.name for one in STUDIES if not one.goes_on] == ["cost"]


@pytest.mark.parametrize(
    "row", [Row({"size": 1, "form": "loop"}, (0.5,)), Row({"size": 1}, missing="no data")], ids=["other", "missing"]
)
def test_only_the_figures_of_the_same_case_are_kept(row: Row) -> None:
    (found,) = run_study(study(on_one), on_cpu(), lambda line: None, before={"cpu": Rows([row])})["cpu"]
    assert found.what == {"size": 1} and found.seconds not in ((), row.seconds)


def test_whole_figures_stay_until_those_that_follow_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tried in (study(), study(interrupted_at(1))):
        monkeypatch.setattr("jaxnn.bench.studies.STUDIES", (tried,))
        monkeypatch.setattr("jaxnn.bench.measuring.STUDIES", (tried,))
        with contextlib.suppress(KeyboardInterrupt):
            whole = bench(tried.name, out=tmp_path, say=lambda line: None)
    assert read_results(tmp_path) == whole


def test_a_page_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    lines: list[str] = []
    with pytest.raises(RecordError, match="file/page cannot be written"):
        bench("matmul", out=tmp_path / "file" / "page", say=lines.append)
    assert lines == []


def test_the_command_lists_measures_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    main(["bench"])
    assert "matmul" in capsys.readouterr().out
    main(["bench", "activations", "--quick", "--out", str(tmp_path / "page")])
    told = capsys.readouterr()
    assert "relu, jit, at its best size" in told.out and str(tmp_path / "page" / "results.md") in told.out
    assert {file.name for file in (tmp_path / "page").iterdir()} == {
        "results.json",
        "results.md",
        "results.html",
        "activations.png",
    }
    for wrong in (["--devices", "gpu"], ["--devices", "abacus"]):
        with pytest.raises(SystemExit) as exit_:
            main(["bench", "activations", *wrong, "--out", str(tmp_path / "none")])
        assert exit_.value.code == 2 and not (tmp_path / "none").exists()
    with pytest.raises(SystemExit):
        main(["bench", "merge", str(tmp_path / "page"), str(tmp_path / "page")])
    assert "give --out DIR" in capsys.readouterr().err


# --- the studies themselves ---


@pytest.mark.parametrize("one", STUDIES, ids=lambda one: one.name)
def test_a_study_says_what_it_needs_to(one: Study) -> None:
    assert one.title[-1] == "?" and len(one.method) > 40 and re.fullmatch(r"[a-z_]+", one.name)
    assert all(re.fullmatch(r"A\d+", claim) for claim in one.claims)
    for settings in (one.full, one.quick):
        assert settings.rounds >= 2
        json.dumps(one.definition(settings))
    assert one.definition(one.full) != one.definition(one.quick)
    # Of nothing measured it tells nothing, and draws it.
    nothing = Measured({}, True, {"CPU": Part(column("cpu", "Chip"), Rows())})
    assert all(found.quantity is None for found in one.findings(Rows())) and list(one.conclude(nothing.rows)) == []
    assert draw(one, nothing).startswith(b"\x89PNG")


def test_no_two_studies_have_one_name() -> None:
    assert len({one.name for one in room.STUDIES}) == len(STUDIES)


def test_every_way_of_running_an_activation_computes_the_same() -> None:
    vector = np.linspace(-3, 3, 50, dtype=np.float32)
    for operation in activations.OPERATIONS:
        values = [activations.make_call(operation, form, vector, jax.devices()[0])() for form in activations.FORMS]
        for found in values[1:]:
            np.testing.assert_allclose(np.asarray(found), values[0], rtol=1e-5, atol=1e-6)


def test_the_error_of_a_precision_is_that_of_its_rounding() -> None:
    def error(name: str) -> float:
        return float(matmul._error(name, 128, "cpu", jax.devices()[0])["error"])  # type: ignore[arg-type]

    # Rounding to m bits is off by 2**-(m+1) at most, and by 0.4 of that on average; two factors, so √2 of it.
    assert 0.2 * 2**-8 < error("bfloat16") < 2**-8 and 0.2 * 2**-11 < error("float16") < 2**-11
    assert 1e-17 < error("float64") < 1e-14 and 1e-8 < error("float32") < 1e-6
    # Steps of 1/32 are off by 1/32/√12 each: 0.9 % of a standard deviation, in two factors 1.3 %.
    assert error("int8") == pytest.approx(0.0128, rel=0.1)


def test_precisions_that_a_device_lacks_are_not_measured() -> None:
    with pytest.raises(NotMeasured, match="CPUs do not have it in hardware"):
        matmul._begin("tf32", 8, "cpu", jax.devices()[0])
