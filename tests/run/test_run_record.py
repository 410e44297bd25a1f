"""What a run leaves: in memory, in its directory, and to a caller who walks through it window by window."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import jaxnn as jn
from jaxnn.record import is_locked, read_metrics
from jaxnn.types import ConfigError, RecordError
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    # A learning rate so high that the loss goes up and down: the best state is not the last.
    experiment = tiny.experiment(learning_rate=3.0, num_steps=60)
    folder = tmp_path_factory.mktemp("run") / "run"
    return tiny.fit(experiment, folder, eval_every=5, checkpoint_every=5, keep_last=2, keep_best=1)


# --- the run in memory ---


@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_predict_gives_each_example_its_outputs_whatever_the_batch(run: jn.Run, batch_size: int) -> None:
    inputs, _ = tiny.points(7, seed=5)
    outputs = run.predict(inputs, batch_size=batch_size)
    assert isinstance(outputs, np.ndarray) and outputs.shape == (7, 3)
    np.testing.assert_allclose(outputs, tiny.apply(run.state.params, inputs), rtol=1e-5, atol=1e-5)
    assert run.predict(inputs.tolist()).shape == (7, 3)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (np.zeros((7, 4)), r"inputs \[examples, 3\].* not \[7, 4\]"),
        (np.zeros(3), r"not \[3\]"),
        (np.zeros((0, 3)), r"not \[0, 3\]"),
        (np.float32(3), r"not \[\]"),
        ([[1.0, 2.0, 3.0], [1.0]], "not one array of numbers"),
        ([["a", "b", "c"]], "not one array of numbers"),
    ],
)
def test_predict_names_inputs_that_do_not_fit(run: jn.Run, inputs: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run.predict(inputs)  # type: ignore[arg-type]


def test_predict_names_a_batch_of_nothing(run: jn.Run) -> None:
    with pytest.raises(ConfigError, match="batch_size is 0"):
        run.predict(tiny.points(7)[0], batch_size=0)


def test_predict_refuses_to_round_fractions_to_pixels() -> None:
    images = (np.arange(37 * 3, dtype=np.uint8) * 2).reshape(37, 3)
    run = tiny.fit(tiny.experiment(data=jn.data.arrays((images, tiny.points(37)[1])), num_steps=1))
    np.testing.assert_allclose(run.predict(images), tiny.apply(run.state.params, images / np.float32(255)), rtol=1e-5)
    np.testing.assert_array_equal(run.predict(images.astype(int)), run.predict(images))
    for wrong in (images / 255, images.astype(int) - 1):
        with pytest.raises(ConfigError, match="uint8"):
            run.predict(wrong)


def test_evaluate_names_a_split_that_is_not_there(run: jn.Run) -> None:
    with pytest.raises(ConfigError, match="no split 'validation' to evaluate: the data have train, test"):
        run.evaluate("validation")


def test_the_best_state_is_the_one_with_the_best_monitored_metric(run: jn.Run) -> None:
    losses = run.metrics["test_loss"]
    best = int(run.metrics["step"][np.nanargmin(losses)])
    assert best != 60, "the last state is the best: the test shows nothing"
    state = run.best_state()
    assert int(state.step) == best
    replaced = dataclasses.replace(run, state=state)
    assert replaced.evaluate()["loss"] == pytest.approx(np.nanmin(losses), rel=1e-6)
    assert run.evaluate()["loss"] == pytest.approx(losses[-1], rel=1e-6)
    kept = {int(path.name) for path in (run.dir / "checkpoints").iterdir()}
    assert kept == {best, 55, 60}


def test_the_best_state_outlives_a_resume(run: jn.Run, tmp_path: Path) -> None:
    experiment = tiny.experiment(learning_rate=3.0, num_steps=60)
    half = tiny.fit(experiment.replace(num_steps=30), tmp_path / "run", eval_every=5, checkpoint_every=5)
    whole = tiny.fit(experiment, resume=half.dir)
    assert int(whole.best_state().step) == int(run.best_state().step)
    tiny.assert_bitwise_equal(whole.state.params, run.state.params)
    assert [line["step"] for line in read_metrics(half.dir)] == list(range(5, 61, 5))


def test_a_run_without_checkpoints_has_no_best_state(tmp_path: Path) -> None:
    run = tiny.fit(tiny.experiment(), tmp_path / "run", checkpoint_every=0)
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(RecordError, match="kept no checkpoints"):
        run.best_state()


def test_a_run_shows_itself(run: jn.Run) -> None:
    assert isinstance(run.plot(), Figure)
    table = run._repr_html_()
    for words in ("<table>", "finished", "test loss", "steps/s", str(run.dir)):
        assert words in table
    assert "finished" in repr(run) and len(repr(run)) < 2000


# --- the run's directory ---


def test_the_record_is_complete(run: jn.Run) -> None:
    facts = tiny.read(run.dir)
    assert facts["status"] == "finished"
    assert facts["config"] == {"learning_rate": 3.0, "batch_size": 8, "num_steps": 60, "seed": 0}
    assert facts["options"]["eval_every"] == 5 and facts["steps_per_call"] == 5
    assert facts["data"] == "points" and facts["name"] == "tiny"
    assert facts["devices"]["backend"] == jax.default_backend()
    assert facts["jax_flags"]["jax_enable_x64"] is False
    assert {"jax", "numpy", "jaxnn"} <= set(facts["devices"]["versions"])
    summary = facts["summary"]
    assert summary["metrics"] == pytest.approx(dict(run.final)) and summary["step"] == 60
    assert {"train", "compile", "evaluation", "checkpoint"} <= set(summary["seconds"])
    assert summary["throughput"]["num_windows"] == 12 and summary["examples_per_second"] > 0


def test_the_metrics_on_disk_are_those_in_memory(run: jn.Run) -> None:
    lines = read_metrics(run.dir)
    for name, values in run.metrics.items():
        np.testing.assert_array_equal([line.get(name, math.nan) for line in lines], values)


def test_the_placement_says_what_sits_where_with_bytes(run: jn.Run) -> None:
    placement = tiny.read(run.dir, "placement.json")
    device = f"{jax.default_backend()}:0"
    # Float32: kernel 3 × 3 and bias 3, momentum of the same; 37 inputs of 3 and 37 int32 labels.
    expected = {"parameters": 4 * 12, "optimizer state": 4 * 12, "data": 4 * 37 * 4}
    assert {name: tree["device_bytes"] for name, tree in placement.items()} == {
        name: {device: num_bytes} for name, num_bytes in expected.items()
    }


def test_every_compilation_stands_in_the_ledger_with_its_cause(tmp_path: Path) -> None:
    # Windows of 5 and of 3 in calls of 3: calls of 3 and of 2 steps.
    run = tiny.fit(tiny.experiment(num_steps=13), tmp_path / "run", steps_per_call=3)
    ledger = tiny.read(run.dir, "compiles.json")
    assert [(one["name"], one["cause"]) for one in ledger["compilations"]] == [
        ("initialise", "start"),
        ("train 3 steps", "start"),
        ("train 2 steps", "start"),
        ("evaluate test", "start"),
    ]
    assert ledger["totals"]["num_compilations"] == 4
    seconds = sum(
        one[stage] for one in ledger["compilations"] for stage in ("trace_seconds", "lower_seconds", "compile_seconds")
    )
    assert ledger["totals"]["seconds"] == pytest.approx(seconds)


def test_fingerprints_tell_programs_and_data_apart(run: jn.Run, tmp_path: Path) -> None:
    def fingerprint(name: str, experiment: jn.Experiment, **options: object) -> dict[str, str]:
        return tiny.read(tiny.fit(experiment, tmp_path / name, checkpoint_every=0, **options).dir)["fingerprint"]

    mine = tiny.read(run.dir)["fingerprint"]
    same = tiny.experiment(learning_rate=3.0, num_steps=1)
    assert fingerprint("how", same, steps_per_call=1, resident=False) == mine, "how it is run is no part of it"
    assert fingerprint("where", same, devices=4, strategy="data") == mine
    other_rate = fingerprint("rate", same.replace(learning_rate=2.0))
    assert other_rate == mine | {"program": other_rate["program"]} != mine


def counted(params: Any, state: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": batch.mask.sum() * WEIGHTS[1], "accuracy": batch.mask.sum(), "count": batch.mask.sum()}


WEIGHTS = np.array([1.0, 2.0], np.float32)
TASK = jn.tasks.classification(tiny.MODEL)
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "augmentation": (
        {"data": jn.data.with_augmentation(tiny.splits(), lambda key, inputs: inputs + 1)},
        "augmentation",
    ),
    "evaluation": ({"task": lambda config: TASK._replace(evaluate=counted)}, "the evaluation"),
    "derived metrics": (
        {"task": lambda config: TASK._replace(derive_metrics=lambda means: {**means, "z": 1.0})},
        "evaluation",
    ),
    "optimizer": ({"optimizer": lambda config: optax.sgd(0.1, momentum=0.9)}, "the program of a step"),
}


@pytest.mark.parametrize("changes", CHANGES)
def test_a_resumed_run_names_what_is_computed_otherwise(
    run: jn.Run, changes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    how, words = CHANGES[changes]
    # A run that is over is loaded: its record stays as it is.
    tiny.fit(tiny.experiment(**how, learning_rate=3.0, num_steps=60), resume=run.dir, progress="plain")
    said = next(line for line in capsys.readouterr().out.splitlines() if "after step 60" in line)
    assert re.search(f"since these changed: [^;]*{words}[^;]*$" if words else "after step 60$", said)


# --- a run that its caller walks through ---


def test_iterating_gives_the_reports_and_the_parameters_of_fit(run: jn.Run, tmp_path: Path) -> None:
    iteration = jn.iterate(run.experiment, record=False, **{**tiny.HOW, "eval_every": 5})
    reports = list(iteration)
    assert [report.step for report in reports] == list(range(5, 61, 5))
    np.testing.assert_array_equal([report.metrics["train_loss"] for report in reports], run.metrics["train_loss"])
    np.testing.assert_array_equal([report.metrics["test_loss"] for report in reports], run.metrics["test_loss"])
    tiny.assert_bitwise_equal(iteration.state.params, run.state.params)
    assert iteration.run.summary.status == "finished"


def test_between_windows_the_state_is_whole() -> None:
    experiment = tiny.experiment(num_steps=10)
    iteration = jn.iterate(experiment, record=False, **tiny.HOW)
    states = []
    for report in iteration:
        states.append(iteration.state)
        state = jax.device_get(iteration.state._replace(key=None))
        alone = tiny.fit(experiment.replace(num_steps=report.step), eval_every=0)
        tiny.assert_bitwise_equal(state.params, alone.state.params)
        assert int(state.step) == int(iteration.run.state.step) == report.step
        assert ("test_loss" in report.metrics) == (report.step == 10)
        assert iteration.run.predict(tiny.points(2)[0]).shape == (2, 3)
    # Each is the caller's for good, whatever becomes of the memory it was trained in.
    assert [int(state.step) for state in states] == [5, 10]


def test_breaking_off_saves_completes_the_record_and_can_be_resumed(run: jn.Run, tmp_path: Path) -> None:
    iteration = jn.iterate(run.experiment, run_dir=tmp_path / "run", **{**tiny.HOW, "eval_every": 5})
    for report in iteration:
        if report.step == 25:
            break
    broken = iteration.run
    facts = tiny.read(tmp_path / "run")
    assert facts["status"] == facts["summary"]["status"] == broken.summary.status == "stopped early"
    assert int(broken.state.step) == facts["summary"]["step"] == 25
    assert (tmp_path / "run" / "checkpoints" / "25").is_dir()
    assert not is_locked(tmp_path / "run")
    resumed = tiny.fit(run.experiment, resume=tmp_path / "run")
    tiny.assert_bitwise_equal(resumed.state.params, run.state.params)
    np.testing.assert_array_equal(resumed.metrics["train_loss"], run.metrics["train_loss"])


def test_a_state_is_saved_with_its_own_metrics_alone(tmp_path: Path) -> None:
    options = {**tiny.HOW, "checkpoint_every": 10}
    iteration = jn.iterate(tiny.experiment(num_steps=40), run_dir=tmp_path / "run", **options)
    for report in iteration:
        if report.step == 15:  # evaluated at 10, and saved then
            break
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["10", "15"]
    assert int(iteration.run.best_state().step) == 10


def test_breaking_off_at_the_end_is_no_stop(tmp_path: Path) -> None:
    iteration = jn.iterate(tiny.experiment(), run_dir=tmp_path / "run", **tiny.HOW)
    for report in iteration:
        if report.step == 20:
            break
    assert iteration.run.summary.status == tiny.read(tmp_path / "run")["status"] == "finished"


def test_iteration_that_has_not_started_has_no_run() -> None:
    with pytest.raises(ConfigError, match="iterate first"):
        _ = jn.iterate(tiny.experiment()).run
