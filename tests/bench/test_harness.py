"""Benchmarks: timer, cases that are not measured, results of several machines, the command; every study runs."""

import dataclasses
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import harness
import jax
import numpy as np
import pytest
from articles import bench as script
from articles import mnist_mlp
from articles.studies import activations, boosting_devices, convolution, inference, pipeline, tables, text
from articles.studies.scaling import PictureSettings, picture_cnn
from articles.studies.study_scaling import make_study
from articles.studies.study_training import network, training_call, training_cases
from benchmarks import gpu_day
from flax import linen
from harness import Case, Results, Row, Rows, bench, find_studies, load_study, merge, read_results, write_page
from matplotlib.figure import Figure

import jaxnn as jn
from jaxnn import data, kernels
from jaxnn.models import Bottleneck, MobileNetV2, ResNet
from jaxnn.observe import available_bytes
from jaxnn.types import Splits
from tests import draws, shell, tiny
from tests.studies import CPU, GPU, Settings, interrupted, measured_rows, on_cpu, results_of, study, two_devices

STUDIES = find_studies()
ACTIVATIONS = STUDIES["activations"]
SILENT = list[str]().append


def rows_of(*cases: Case, **settings: Any) -> Rows:
    """The rows of a study of one group."""
    return measured_rows(study(lambda bench: [cases]), on_cpu(Settings(**settings)))["cpu"]


def results(label: str = CPU, seconds: float = 0.5, settings: Any = ACTIVATIONS.quick) -> Results:
    row = Row({"operation": "relu", "size": 100, "form": "jit"}, (seconds, 2 * seconds), 100.0, "elements")
    return results_of(ACTIVATIONS, settings, {label: Rows([row])})


def test_interleaved_rotates_contenders_and_stops_when_the_median_is_precise():
    order: list[str] = []
    measures = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    assert harness.interleaved(measures, rounds=3) == {name: (1.0, 1.0, 1.0) for name in "abc"}
    assert "".join(order) == "abcbcacab"
    values = iter([1.0, 2.0, 0.5, *[1.0] * 40])
    # The 95 % interval of the median of 9 values is that of the 2nd to the 8th.
    assert len(harness.interleaved({"a": lambda: next(values)}, rounds=3, precision=0.01)["a"]) == 9
    assert len(harness.interleaved({"a": lambda: 1.0}, rounds=3, precision=0.01)["a"]) == 3
    assert len(harness.interleaved({"a": iter(range(1, 100)).__next__}, rounds=3, precision=0.01)["a"]) == 50
    # Conover (1999): of 10 values the 2nd and 9th contain the median with 97.9 %.
    assert harness.median_interval([float(value) for value in range(1, 11)]) == (2.0, 9.0)
    assert harness.median_interval([1.0, 3.0, 2.0]) == (1.0, 3.0)


def test_the_first_call_is_not_timed():
    call = Mock()
    begin = Mock(return_value=call)
    (row,) = rows_of(Case("cpu", {"size": 1}, begin), rounds=2, seconds=0.0)
    assert row.what == {"size": 1} and len(row.seconds) == 2 and begin.call_count == 1
    assert call.call_count == 4, "to compile, once for the estimate, and two rounds"
    own = Case("cpu", {"size": 1}, lambda: (lambda: None, 7.0, {"form": "loop"}), observe=lambda: {"loss": 1.0})
    row = rows_of(own)[0]
    assert row.work == 7.0 and row.observed == {"form": "loop", "loss": 1.0}


def test_a_failing_case_has_a_reason_and_the_others_are_measured():
    out_of_memory = RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
    for options, reason in (
        ({"begin": Mock(side_effect=harness.NotMeasured("there is none here"))}, "there is none here"),
        ({"begin": lambda: Mock(side_effect=out_of_memory)}, "RuntimeError: RESOURCE_EXHAUSTED: out of memory"),
        ({"observe": Mock(side_effect=jn.DataError("no data."))}, "no data."),
    ):
        good = Case("cpu", {"size": 2}, lambda: lambda: None, observe=lambda: {"error": 0.5})
        bad, row = rows_of(Case("cpu", {"size": 1}, **options), good)
        assert (bad.missing, bad.seconds, bad.observed, bad.time) == (reason, (), {}, None)
        assert row.missing == "" and len(row.seconds) == 3 and row.observed == {"error": 0.5}
    (bad,) = rows_of(Case("cpu", {}, lambda: Mock(side_effect=[1, MemoryError("full")])))
    assert bad.missing == "MemoryError: full" and bad.seconds == ()
    with pytest.raises(TypeError, match="mine"):
        rows_of(Case("cpu", {}, Mock(side_effect=TypeError("mine"))))


@pytest.mark.parametrize(
    ("until", "kind", "share", "sizes"),
    [
        (0.002, "gpu", 0.0, [1, 4, 16]),  # the last takes at least 3.2 ms
        (0.002, "gpu", 0.02, [1, 4]),  # 16 would need more than an eighth of the memory
        (0.0, "gpu", 0.0, [1, 4]),
        (0.002, "cpu", 0.0, [1, 4]),
    ],
)
@pytest.mark.several_devices
def test_sizes_grow_on_an_accelerator_until_a_call_is_long_or_takes_much_memory(until, kind, share, sizes):
    memory = available_bytes(jax.devices()[0])

    def case(size: int) -> Case:
        call = partial(time.sleep, size * 2e-4)
        return Case(kind, {"size": size}, lambda: call, num_bytes=share * memory * size, larger=lambda: case(4 * size))

    rows = measured_rows(study(lambda bench: [[case(1)], [case(4)]]), two_devices(Settings(grow_until=until)))[kind]
    assert [row.what["size"] for row in rows] == sizes
    # Cases of a CPU may be no compiled calls.
    assert all(0 < row.overhead < 0.01 if kind == "gpu" else not row.overhead for row in rows)


@pytest.mark.parametrize(("kind", "order"), [("cpu", "cw+(cw)+"), ("gpu", "cw(cw)+(c{3,}w){2}")])
@pytest.mark.several_devices
def test_queued_calls_are_waited_for_together_on_an_accelerator(kind, order):
    events: list[str] = []
    result = Mock(block_until_ready=lambda: events.append("w"))
    case = Case(kind, {}, lambda: lambda: time.sleep(1e-3) or events.append("c") or result, queued=True)
    measured_rows(study(lambda bench: [[case]]), two_devices(Settings(rounds=2, seconds=0.01)))
    assert re.fullmatch(order, "".join(events)), events


def test_nothing_is_concluded_from_the_measured_overhead_of_a_call():
    """The page of an H200, below, shows the same for times that do not grow with the size."""

    def rows(seconds: float, **more: Any) -> Rows:
        return Rows([Row({"network": "cats_and_dogs", "batch_size": 32}, (seconds,), 32.0, "images", **more)])

    for seconds, is_hidden in ((80e-6, True), (2e-3, False)):
        columns = {CPU: rows(0.1), GPU: rows(seconds, overhead=60e-6)}
        said = " ".join(STUDIES["cats_vs_dogs"].conclude(columns))
        assert (f"{GPU}: mostly the overhead of a call: " in said) == is_hidden != ("as fast as" in said)


def test_damaged_results_are_errors(tmp_path):
    write_page(results(), tmp_path, {}, ())
    text = (tmp_path / "results.json").read_text()
    assert read_results(tmp_path / "results.json") == results() == read_results(tmp_path)
    for damaged, words in (
        (text[:-200], "JSONDecodeError"),
        (text.replace('"format": 4', '"format": 3'), "format is 3, not 4"),
        (text.replace('"seconds": [', '"hours": ['), "'seconds'"),
    ):
        (tmp_path / "results.json").write_text(damaged)
        with pytest.raises(jn.RecordError, match=f"results.json cannot be read .*{words}"):
            read_results(tmp_path)


def test_merge_makes_one_table_with_speedups_of_equal_settings(tmp_path):
    full = results("GPU, full", 0.025, ACTIVATIONS.full)
    for folder, made in (("laptop", results()), ("server", results(GPU, 0.025)), ("full", full)):
        write_page(made, tmp_path / folder, {}, ())
    merged = merge([tmp_path / "laptop", tmp_path / "server"], tmp_path / "both")
    assert list(merged["activations"].parts) == [CPU, GPU] and read_results(tmp_path / "both") == merged
    page = (tmp_path / "both" / "results.md").read_text()
    # 100 elements in 0.5 and 1 s: 150/s is the median; the GPU takes a twentieth of the time.
    assert "| relu, jit, best rate | – | 150 elements/s (100–200) | 3 k elements/s (2–4), 20× |" in page
    assert "Quick settings." in page and "![" in page
    # Other settings stand beside them and are not compared.
    merge([tmp_path / "laptop", tmp_path / "full"], tmp_path / "beside")
    page = (tmp_path / "beside" / "results.md").read_text()
    assert "| 150 elements/s (100–200) | 3 k elements/s (2–4) |" in page and f"Quick settings on {CPU}." in page
    assert (tmp_path / "both" / "activations.png").read_bytes().startswith(b"\x89PNG")
    for folders, error, words in (
        (["laptop", "laptop"], jn.RecordError, f"laptop has activations on {CPU}"),
        (["laptop"], jn.ConfigError, "two or more"),
    ):
        with pytest.raises(error, match=words):
            merge([tmp_path / folder for folder in folders], tmp_path / "none")
        assert not (tmp_path / "none").exists()


def test_a_page_grows_and_keeps_results_until_new_ones_are_complete(tmp_path):
    before = bench(study(), out=tmp_path, say=SILENT)
    with pytest.raises(KeyboardInterrupt):
        bench(study(interrupted), quick=True, out=tmp_path, say=SILENT)
    assert read_results(tmp_path) == before
    assert bench(study(), quick=True, out=tmp_path, say=SILENT) == read_results(tmp_path) != before
    (mine,) = before["sums"].rows
    write_page(results_of(study(), Settings(), {GPU: Rows()}), tmp_path, {}, ())
    bench(study(), out=tmp_path, say=SILENT)
    assert list(read_results(tmp_path)["sums"].parts) == [GPU, mine]


def test_the_bench_command(tmp_path, capsys):
    own, empty, page = tmp_path / "own.py", tmp_path / "empty.py", tmp_path / "page"
    (tmp_path / "beside.py").write_text("from tests.studies import study\n")
    own.write_text("from beside import study\nSTUDY = study(name='own')\n")
    empty.write_text("")
    script.main([])
    assert "matmul" in capsys.readouterr().out
    script.main([str(own), "--quick", "--out", str(page)])
    out = capsys.readouterr().out
    assert "sum of 10" in out and str(page / "results.md") in out
    assert {file.name for file in page.iterdir()} == {"results.json", "results.md", "own.png"}
    own.write_text("from tests.studies import interrupted, study\nSTUDY = study(interrupted)\n")
    with pytest.raises(SystemExit, match="130"):
        script.main([str(own), "--out", str(tmp_path / "part")])
    assert str(tmp_path / "part") in capsys.readouterr().err
    # Before anything is measured, in one line.
    for words, error in (
        ([str(own), "--devices", "gpus"], "did you mean 'gpu'"),
        ([str(own), "--devices", ","], "empty"),
        ([str(own), "--devices", "cpu,gpu"], "'gpu'"),
        ([str(own), "--out", str(own / "page")], "own.py/page cannot be written"),
        (["merge", str(page), str(page)], "--out DIR"),
        (["matmull"], "did you mean 'matmul'"),
        (["no.py"], "path of a file"),
        ([str(empty)], "no STUDY"),
    ):
        with pytest.raises(SystemExit, match="2"):
            script.main(words)
        err = capsys.readouterr().err
        assert error in err and err.count("\n") == 1


SCRIPT, H200 = "experiments/benchmarks/gpu_day.py", shell.ROOT / "experiments/results/gpu_h200"


def test_parts_of_gpu_day_take_eight_minutes_and_peers_what_they_took_on_an_h200(tmp_path):
    assert sum(part.seconds for part in gpu_day.PARTS.values()) <= 480
    contest, peers = json.loads((H200 / "contest.json").read_text())["networks"], gpu_day.PARTS["peers"]
    starts, rounds = [], 0.0
    for name, measured in contest.items():
        rows = measured["rows"].values()
        starts += [row["start"]["compile_seconds"] for row in rows if row["steps_per_second"]]
        times = [gpu_day.PEERS[name][0] / min(row["steps_per_second"]) for row in rows if row["steps_per_second"]]
        rounds += 5 * (sum(times) + 2 * max(times))  # compiled forms that were not measured are as slow as the slowest
    assert max(starts) < peers.answer_seconds and max(starts) + rounds < peers.seconds

    old = gpu_day.gpu_record.read(H200)
    assert not gpu_day.gpu_record.report(gpu_day.Day(tmp_path, False, "gpu"), old)
    assert "| mlp | 1024 | " in (tmp_path / "gpu_day.md").read_text()


@pytest.mark.slow
def test_gpu_day_keeps_finished_cases_when_its_time_is_up_and_names_late_ones(tmp_path):
    def case(name, code, expected=None):
        never = Mock(side_effect=AssertionError)
        command = [sys.executable, "-c", f"import json, time\nfor line in open(0):\n {code}"]
        return gpu_day.Process([gpu_day.Case({"case": name}, never, 2, "step", expected)], {}, command)

    def run(groups, seconds, answer_seconds, alone):
        kept, limits = [], gpu_day.Limits(3, answer_seconds, time.monotonic() + seconds)
        start = lambda process, heard: gpu_day.Worker(process, (), tmp_path / "log", heard)  # noqa: E731
        try:
            list(gpu_day.run_groups(groups, start, kept.extend, limits, alone=alone))
        except gpu_day.Stopped:
            return kept, True
        return kept, False

    answer = 'print(json.dumps({"compile_seconds": 1} if "start" in line else {"seconds": %s}), flush=True)'
    slow, fast, hung = case("slow", answer % 0.5), case("fast", answer % 0.25, (3, 4)), case("hung", "time.sleep(60)")
    kept, stopped = run([gpu_day.Group([slow], 1), gpu_day.Group([hung])], 2.0, 60, alone=False)
    assert stopped and [(row.what, row.seconds) for row in kept] == [({"case": "slow"}, (0.5,))]
    kept, stopped = run([gpu_day.Group([slow, fast, hung], 2, "act")], 60, 1.0, alone=True)
    assert not stopped and [row.seconds for row in kept] == [(0.5, 0.5), (0.25, 0.25), ()]
    assert kept[2].missing == "not ready in 1 s" and str(kept[0].rate) == "4 step/s"
    expected = {"speed over first": 2.0, "expected": "3 to 4", "answer": "less than expected", "then": "act"}
    assert expected.items() <= kept[1].observed.items()
    kept, _ = run([gpu_day.Group([case("broken", "raise SystemExit(3)")])], 60, 60, alone=True)
    assert kept[-1].observed == {"ok": False, "failure": "the process ended with status 3: no message"}


def test_gpu_day_writes_the_measurements_by_which_layers_choose(tmp_path):
    facts = {"operation": "attention", "dtype": "bfloat16", "of": "value and gradients"}
    times = {("xla", 64): 1e-3, ("cudnn", 64): 2e-3, ("xla", 4096): 1.0}  # of the longest, one alone was measured
    rows = [Row({"side": name}, (t,), 20, observed=facts | {"size": n})._asdict() for (name, n), t in times.items()]
    machine = {"label": "GPU, NVIDIA H100", "capability": "9.0", "date": "2026-12-01", "commit": "abc"}
    path, known = tmp_path / "measured.json", Path(kernels.__file__).with_name("measured.json")
    path.write_text(known.read_text())
    assert gpu_day.gpu_record.write_measured({"questions": {"rows": rows, "machine": machine}}, path) == 1
    old, new = json.loads(known.read_text()), json.loads(path.read_text())
    (added,) = [row for row in new if row not in old]
    assert len(new) == len(old) + 1 and added.keys() == old[0].keys()
    assert (added["size"], added["microseconds"], added["device"]) == (64, {"xla": 50, "cudnn": 100}, "NVIDIA H100")


@pytest.mark.slow
def test_gpu_day_runs_all_parts_continues_and_fails_where_there_is_no_gpu(tmp_path):
    options = ("--small", "--device", "cpu", "--out", tmp_path)
    done = shell.python(SCRIPT, *options, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu_day.json").read_text())
    assert list(record) == list(gpu_day.PARTS) and all(part["complete"] and part["rows"] for part in record.values())
    assert not [row for part in record.values() for row in part["rows"] if row["observed"].get("ok") is False]
    assert all(row["seconds"] for name in ("peers", "widths", "plans") for row in record[name]["rows"])
    assert "| mlp | 4 |" in (tmp_path / "gpu_day.md").read_text()

    # What lacks a row is measured, and nothing else; results of another commit are kept.
    lost = record["widths"]["rows"].pop(0)["what"]
    (tmp_path / "gpu_day.json").write_text(json.dumps(record))
    assert shell.python(SCRIPT, *options, "--parts", "widths,plans").stdout.count("widths: mlp") == 1
    record = json.loads((tmp_path / "gpu_day.json").read_text())
    assert record["widths"]["rows"][-1]["what"] == lost
    record["plans"]["machine"]["commit"] = "another"
    (tmp_path / "gpu_day.json").write_text(json.dumps(record))
    assert shell.python(SCRIPT, *options, "--parts", "plans").returncode == 0
    again = json.loads((tmp_path / "gpu_day.json").read_text())["plans"]
    assert [part["rows"] for part in again["earlier"]] == [record["plans"]["rows"]] and again["complete"]

    for wrong, status, message in (
        (("--device", "cpu", "--out", tmp_path), 2, "another device or size"),
        (("--out", tmp_path / "without"), 1, "device is 'gpu', which JAX cannot open"),
        (("--out", tmp_path, "--write-measured", tmp_path / "new.json"), 1, "no sizes at which two"),
        ((*options, "--parts", "plan"), 2, "no part plan: choose from matrix"),
    ):
        done = shell.python(SCRIPT, *wrong)
        assert done.returncode == status and message in done.stderr and "Traceback" not in done.stderr


FAST: dict[str, Any] = {"rounds": 2, "seconds": 0.0}
SCALING = PictureSettings(8, 2, (8,), 2, 2, 2, 0.0, blocks=((2,),), dense=(), size=4)
PIPELINE = pipeline.Settings(8, (2,), batch_size=4, num_workers=0, steps=3, **FAST)
SIZED = {"grow_until": 5e-5}  # some sizes grow on the device in place of a GPU
# What makes quick settings tiny; other studies run without their data sets, so all of their cases have a reason.
TINY: dict[str, dict[str, Any]] = {
    "activations": SIZED | {"sizes": (100, 1_000), "longest_loop": 100},
    "bandwidth": SIZED | {"sizes": (64, 256), "largest_on_cpu": 256},
    "boosting_devices": {"batch_size": 64, "batch_per_device": 16, "steps": 2, "columns": 3, "max_depth": 2},
    "convolution": SIZED | {"sizes": (5, 12), "largest_loop": 5, "largest_on_cpu": 12, "compared_size": 12},
    "cost": {"scripts": ("mnist_mlp",), "steps": 1},
    "inference": SIZED | {"size": 32, "largest_on_cpu": 1},
    "latency": SIZED | {"batches": (1, 4), "largest_cnn_on_cpu": 1},
    "matmul": SIZED | {"sizes": (8, 128), "largest_on_cpu": 128, "error_size": 128},
    "pipeline": vars(PIPELINE),
    "scaling": vars(SCALING),
    "transfer": SIZED | {"transfer": (64, 256), "relu": (8, 16), "matmul": (2, 4), "convolution": (1, 2)},
}
# Scaling is measured on all devices of a kind, four in the tests.
SCALED = {"boosting_devices", "scaling"}
ON_ONE_DEVICE = SCALED | {"matmul", "pipeline"}
RESNET = ResNet(3, num_blocks=(1,), features=4, block=Bottleneck, stem="imagenet")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data directory with ten pictures of noise in each split, and no other data sets."""
    folder = tmp_path_factory.mktemp("data")
    draws.write_images(folder / "cats_vs_dogs", {"train": 10, "val": 10}, (12, 10, 3))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAXNN_DATA", str(folder))
        yield folder


def test_a_study_is_complete_and_handles_no_rows():
    for own in STUDIES.values():
        assert own.title[-1] == "?" and own.method
        assert own.claims and all(re.fullmatch(r"A\d+", claim) for claim in own.claims)
        assert json.dumps(own.definition(own.full)) != json.dumps(own.definition(own.quick))
        assert all(found.quantity is None for found in own.findings(Rows())), own.name
        assert list(own.conclude({"CPU": Rows()})) == []
        own.draw({"CPU": Rows()}, Figure())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [(name, 4) for name in STUDIES] + [(name, 1) for name in sorted(SCALED)])
def test_a_study_runs(name, count, photographs, tmp_path, monkeypatch):
    study, devices = STUDIES[name], jax.local_devices()[:count]
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    mobile = MobileNetV2(3, stages=((1, 4, 1, 1),), features=4, last_features=4)
    monkeypatch.setattr(inference, "NETWORKS", {"ResNet-50": lambda: RESNET, "MobileNetV2": lambda: mobile})
    if study.name == "scaling":
        study = make_study(picture_cnn, quick=SCALING, claims=("A13",))
    settings = dataclasses.replace(study.quick, **FAST | TINY[study.name]) if study.name in TINY else study.quick
    if study.name == "cats_vs_dogs":
        monkeypatch.setenv("JAXNN_DATA", str(tmp_path))
    context = on_cpu(settings) if study.name in ON_ONE_DEVICE else two_devices(settings)
    rows = measured_rows(study, context)
    columns = dict(zip((CPU, GPU), rows.values(), strict=False))
    write_page(results_of(study, settings, columns), tmp_path, {study.name: study}, [study.name])

    page = (tmp_path / "results.md").read_text()
    assert (tmp_path / f"{study.name}.png").read_bytes().startswith(b"\x89PNG")
    assert all(bool(row.missing) != bool(row.seconds) for row in rows["cpu"])
    assert any(row.seconds for row in rows["cpu"]) == (study.name in TINY), rows["cpu"][0].missing
    for column in columns.values():
        assert all(f"| {finding.claim} | {finding.what} |" in page for finding in study.findings(column))
        assert all(row.missing.rstrip(".") in page for row in column)
    assert all(sentence.endswith(".") and sentence in page for sentence in study.conclude(columns))
    if count == 1:
        assert "JAX has one CPU device; set JAX_NUM_CPU_DEVICES=4" in page
    elif study.name == "scaling":
        shared = rows["cpu"].where(batch="shared", alone=False)
        assert [one.what["devices"] for one in shared] == [1, 2, 4] and {one.work for one in shared} == {16}
        losses = [float(one.observed["loss"] or 0) for one in shared]
        assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5) and "predicted speed-up" in page
        # The gradient of 9·3·2 + 2 and 8·10 + 10 parameters; with it loss, accuracy and number of examples.
        sizes = [float(one.observed["all-reduce num_bytes"] or 0) for one in shared[1:]]
        assert all(4 * 146 <= size <= 4 * 149 for size in sizes)
        assert not [name for one in rows["cpu"].where(alone=True) for name in one.observed if "all-" in name]
    elif study.name == "boosting_devices":
        assert "all trees on up to 4 devices are those of one device" in page
        reduced = boosting_devices.reductions(rows["cpu"])
        # Of each of two levels: the histograms of 3 columns and one parent, 256 bins of two int64.
        assert reduced is not None and 0 <= reduced.num_bytes - 2 * 3 * 256 * 16 <= 64


@pytest.mark.parametrize("name", ["articles_cpu", "scaling_cpu", "gpu_h200/articles"])
def test_published_pages_are_those_of_the_recorded_results(name, tmp_path):
    published = shell.ROOT / "experiments" / "results" / name
    own = load_study(str(shell.ROOT / "experiments" / "scaling.py"), {})
    write_page(read_results(published), tmp_path, STUDIES | {own.name: own}, ())
    for file in ("results.md", "results.json"):
        assert (tmp_path / file).read_text() == (published / file).read_text()


# Of each network: parameters, as published or counted in the original code; shape of an input, vocabulary or 0, labels.
NETWORKS: dict[str, tuple[int, tuple[int, ...], int, int]] = {
    "mnist_mlp": (669_706, (28, 28, 1), 0, 10),
    "mnist_cnn": (1_199_882, (28, 28, 1), 0, 10),
    "cifar10_cnn": (1_250_858, (32, 32, 3), 0, 10),
    "imdb_lstm": (2_658_945, (100,), 20_000, 2),
    "imdb_fasttext": (60_151_751, (400,), 20_000, 2),
    "lstm_text_generation": (91_047, (40,), 39, 39),
    "text_generator": (444_546, (40,), 39, 39),
    "fcn5": (14_205_962, (28, 28, 1), 0, 10),
    "alexnet_r": (85_098, (32, 32, 3), 0, 10),
    "resnet56": (855_770, (32, 32, 3), 0, 10),
    "ptb_lstm": (6_180_624, (32,), 10_000, 10_000),
    "cats_and_dogs": (1_994_305, (150, 150, 3), 0, 2),
    "news_bag": (1_280_260, (64,), 20_000, 4),
    "news_lstm": (2_659_332, (64,), 20_000, 4),
}


def random_data(name: str, num_examples: int) -> Splits:
    """Random data in the shape of a network's own."""
    _, shape, tokens, classes = NETWORKS[name]
    random = np.random.default_rng(0)
    inputs = random.integers(0, tokens or 256, (num_examples, *shape), np.int32 if tokens else np.uint8)
    labels = random.integers(0, classes, inputs.shape if name == "ptb_lstm" else num_examples, np.int32)
    return data.arrays(train=(inputs, labels), name=name)


def test_article_scripts_state_their_claim_and_have_the_published_number_of_parameters():
    scripts = {path.stem: path for path in (shell.ROOT / "experiments" / "articles").glob("*.py")}
    assert set(scripts) == {*NETWORKS, "bench"}
    for name in NETWORKS:
        lines = scripts[name].read_text().splitlines()
        most = 50 if name == "text_generator" else 40  # this one has its network too
        assert len(lines) <= most and [line.split()[0] for line in lines[2:5]] == ["Claim", "Command", "Result"]
        task, source = network(name).task(network(name).config), random_data(name, 2).train
        batch = source.as_batch(source.read(np.arange(2)))
        params, _ = jax.eval_shape(lambda key, task=task, batch=batch: task.init(key, batch), jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(linen.unbox(params))) == NETWORKS[name][0], name


@pytest.mark.slow
def test_all_forms_of_a_computation_agree():
    first = jax.devices()[0]
    vector = np.linspace(-3, 3, 100, dtype=np.float32)
    for operation in activations.OPERATIONS:
        values = [activations.make_call(operation, form, vector, first)() for form in activations.FORMS]
        for found in values[1:]:
            np.testing.assert_allclose(np.asarray(found), values[0], rtol=1e-5, atol=1e-6)
    picture = convolution.make_picture(12)
    for form in convolution.FORMS:
        found = np.asarray(convolution.make_call(form, picture, first)())
        np.testing.assert_allclose(found, convolution.exact(picture), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_training_of_studies_is_that_of_runs(photographs, monkeypatch):
    losses = []
    for form in pipeline.FORMS:
        training = pipeline.FedTraining(form, PIPELINE, "cpu")
        training()
        training()
        losses.append(training.losses)
        assert 0 <= float(training.end()["waited"] or 0) < 1
    assert len(losses[0]) == len(set(losses[0])) == 2
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)

    calls = [training_call(tiny.experiment(), tiny.splits(), "cpu", num_steps)[0] for num_steps in (5, 15)]
    parts = [float(calls[0]().sums["loss"]) for _ in range(3)]
    assert sum(parts) == pytest.approx(float(calls[1]().sums["loss"]), rel=1e-6), "a call continues the last one"

    train = random_data("mnist_mlp", 256).train
    splits = Splits(train, train)
    _, (full,) = training_cases(on_cpu(dataclasses.replace(text.STUDY.full, networks=("mnist_mlp",))))
    short = mnist_mlp.experiment.replace(num_steps=30)
    assert full.observe is not None
    monkeypatch.setattr(mnist_mlp, "experiment", dataclasses.replace(short, data=lambda _: splits))
    assert {"test_accuracy", "run_seconds"} <= set(full.observe())
    # The signal ends the run at its next window.
    stopped = dataclasses.replace(short, data=lambda _: (signal.raise_signal(signal.SIGTERM), splits)[1])
    monkeypatch.setattr(mnist_mlp, "experiment", stopped)
    with pytest.raises(KeyboardInterrupt):
        full.observe()


@pytest.mark.slow
def test_models_of_tables_are_trained_on_the_same_rows(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=80), "kind": random.choice(["a", "b"], 80)}
    columns["y"] = 100 + 10 * columns["x"]
    monkeypatch.setitem(tables.TABLES, "t", lambda _: data.table(columns, target="y", test=0.25, validation=0.25))
    monkeypatch.setenv("JAXNN_DATA", str(tmp_path))
    (tmp_path / "t").mkdir()
    settings = tables.Settings(("t",), 1, trees=20, max_depth=2, epochs=40, features=(8,), batch_size=8)
    rows = measured_rows(tables.STUDY, on_cpu(settings))["cpu"]
    # Less than half the deviation of the targets.
    assert len(rows) == 3 and all(0 < float(row.observed["error"] or 0) < 5 for row in rows), rows
    assert float(rows[0].observed["rows"] or 0) == 20 * 40 and rows[0].observed["depth"] == 40
    assert "has the lowest test error" in "".join(tables.STUDY.conclude({"CPU": rows}))
    assert [one.quantity is not None for one in tables.STUDY.findings(rows)] == [True] * 6
