"""``fit``, ``train`` and ``iterate`` equal a loop by hand, however they run; what probes and writers get of them."""

import contextlib
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from PIL import Image

import jaxnn as jn
from jaxnn._figures import draw_picture
from jaxnn.record import MLflow, RecordReader, TensorBoard, WandB, WriterFacts
from tests import processes, tiny


def by_hand(experiment: jn.Experiment[Any]) -> tuple[jn.TrainState, dict[str, np.ndarray]]:
    """The final state, and the metrics of every step, of a plain loop over the same batches."""
    config, train = experiment.config, experiment.data(experiment.config).train
    task, optimizer = experiment.task(config), experiment.optimizer(config)
    step = jax.jit(jn.steps.make_train_step(task, optimizer))
    first = train.gather(train.examples, np.arange(config.batch_size))
    state = jax.jit(lambda key: jn.steps.init_train_state(task, optimizer, key, first))(jax.random.key(config.seed))
    history = []
    for indices in train.order(config.seed, np.arange(config.num_steps), config.batch_size):
        state, metrics = step(state, train.gather(train.examples, indices))
        history.append({name: float(value) for name, value in metrics.items()})
    return state, {name: np.array([metrics[name] for metrics in history]) for name in history[0]}


class Dropped(linen.Module):
    """Softmax regression on inputs of which half are dropped in training."""

    @linen.compact
    def __call__(self, inputs: jax.Array, *, train: bool) -> jax.Array:
        return jn.nn.Dense(3, kernel_init=linen.initializers.ones)(jn.nn.Dropout(0.5)(inputs, train=train))


def test_fit_equals_a_loop_by_hand_with_its_dropout_and_evaluates_averaged_parameters():
    averaging = lambda config: jn.optim.with_ema(optax.sgd(0.5), 0.9)  # noqa: E731
    experiment = tiny.experiment(model=Dropped(), optimizer=averaging)
    run, (state, metrics) = tiny.fit(experiment), by_hand(experiment)
    np.testing.assert_array_equal(run.metrics["step"], [5, 10, 15, 20])
    for name in ("loss", "accuracy"):
        means = metrics[name].reshape(4, 5).mean(axis=1)
        np.testing.assert_allclose(run.metrics[f"train_{name}"], means, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run.state.params, state.params)
    assert int(run.state.step) == 20
    np.testing.assert_array_equal(np.isnan(run.metrics["test_loss"]), [True, False, True, False])
    assert set(run.final) == {"train_loss", "train_accuracy", "test_loss", "test_accuracy"}

    inputs, labels = tiny.points(23, 1)
    average = jax.device_get(jax.jit(jn.optim.evaluation_params)(run.state.params, run.state.opt_state))["Dense_0"]
    np.testing.assert_allclose(run.predict(inputs), inputs @ average["kernel"] + average["bias"], rtol=1e-4, atol=1e-5)
    assert np.abs(average["kernel"] - run.state.params["Dense_0"]["kernel"]).max() > 1e-3
    assert run.final["test_loss"] == pytest.approx(measured(run, inputs, labels)["loss"], rel=1e-6)


def measured(run: jn.Run, inputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Loss and accuracy by NumPy, from the run's predictions for every example of a split."""
    logits = run.predict(inputs).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    loss = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]
    return {"loss": float(loss.mean()), "accuracy": float((logits.argmax(axis=1) == labels).mean())}


def test_evaluation_is_exact_and_how_a_run_is_computed_changes_no_bit(whole):
    # 23 test examples: batches of 7 leave a tail of 2.
    batched = tiny.fit(tiny.experiment(), eval_batch_size=7, steps_per_call=1)
    for split, points in (("test", tiny.points(23, 1)), ("train", tiny.points(37))):
        assert batched.evaluate(split) == pytest.approx(measured(batched, *points), rel=1e-6)
    assert batched.final["test_loss"] == pytest.approx(batched.evaluate()["loss"], rel=1e-12)
    # Streamed in batches of 1: one block of 16, and one of 7 that is padded to 16 and masked.
    streamed = tiny.fit(tiny.experiment(), resident=False, eval_batch_size=1)
    assert streamed.evaluate() == pytest.approx(measured(streamed, *tiny.points(23, 1)), rel=1e-6)
    np.testing.assert_array_equal(streamed.metrics["train_loss"], whole.metrics["train_loss"])
    for other in (batched, streamed):
        chex.assert_trees_all_equal(other.state._replace(key=None), whole.state._replace(key=None))


def test_augmentation_differs_by_step_and_repeats_by_run():
    def noisy(key: jax.Array, batch: jn.Batch) -> jn.Batch:
        return batch._replace(inputs=batch.inputs + jax.random.uniform(key, batch.inputs.shape[1:])[None])

    data = jn.data.with_augmentation(tiny.splits(), noisy)
    # The learning rate is 0 and every batch is the full set, shifted by one draw: only the noise differs by step.
    experiment = tiny.experiment(data=data, learning_rate=0.0, batch_size=37, num_steps=4)
    first = tiny.fit(experiment, report_every=1, steps_per_call=2).metrics["train_loss"]
    assert np.diff(np.sort(first)).min() > 1e-3
    np.testing.assert_array_equal(tiny.fit(experiment, report_every=1, steps_per_call=1).metrics["train_loss"], first)


def test_leaks_and_a_rate_of_zero_are_said_before_training(capsys):
    inputs, labels = tiny.points(37)
    others = tiny.points(37, 1)
    for test in ((inputs, labels), (inputs[30:], labels[30:]), others):  # all, the last and none of train
        data, rate = jn.data.arrays((inputs, labels), test=test), 0.1 * (test is others)
        tiny.fit(tiny.experiment(data=data, num_steps=5, learning_rate=rate), progress="plain")
        said = capsys.readouterr().out
        assert ("the rows of test are among those of train" in said) == (test is not others)
        assert ("it is 0: the parameters stay as they are" in said) == (test is not others)


def test_accumulated_gradients_that_no_update_used_are_said():
    def accumulating(num_steps: int) -> jn.Run:
        optimizer = jn.optim.with_accumulation(optax.sgd(0.1), 4)
        return tiny.fit(tiny.experiment(optimizer=lambda config: optimizer, num_steps=num_steps), steps_per_call=1)

    with pytest.raises(jn.ConfigError, match="no parameter was updated: num_steps=3 is less than one accumulation"):
        accumulating(3)
    with pytest.warns(UserWarning, match="the gradients of the last 2 of 6 steps were accumulated and not applied"):
        accumulating(6)


def test_nothing_is_compiled_after_the_first_window_and_the_ledger_has_the_causes(tmp_path):
    events: list[Any] = []

    def on_duration(name: str, seconds: float, **_: Any) -> None:
        if "/compile/" in name:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    spy = SimpleNamespace(write=lambda lines: events.extend(line["step"] for line in lines))
    try:
        # Windows of 5 and of 3 in calls of 3, streamed and evaluated: every kind of program there is.
        options = {"steps_per_call": 3, "resident": False, "checkpoint_every": 0}
        run = tiny.fit(tiny.experiment(num_steps=23), tmp_path / "run", writers=(spy,), **options)
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
    shown = [index for index, event in enumerate(events) if isinstance(event, int)]
    assert any(isinstance(event, str) for event in events[: shown[0]]), "the listener received no compilation"
    assert events[shown[0] : shown[-1] + 1] == [5, 10, 15, 20, 23]

    ledger = tiny.read(run.dir, "compiles.json")
    names = ("train 3 steps", "train 2 steps", "initialise", "evaluate test")
    assert [(one["name"], one["cause"]) for one in ledger["compilations"]] == [(name, "start") for name in names]
    stages = ("trace_seconds", "lower_seconds", "compile_seconds")
    seconds = sum(one[stage] for one in ledger["compilations"] for stage in stages)
    assert ledger["totals"]["num_compilations"] == 4 and ledger["totals"]["seconds"] == pytest.approx(seconds)
    assert not (run.dir / "checkpoints").exists()
    with pytest.raises(jn.RecordError, match="kept no checkpoints"):
        run.best_state()


# For steps that are surely short, a single one need not be measured.
@pytest.mark.parametrize("resident", [True, False])
def test_steps_per_call_are_chosen_by_measuring(whole, resident, tmp_path):
    chosen = tiny.fit(tiny.experiment(), tmp_path / "run", steps_per_call=None, report_every=10, resident=resident)
    (facts,) = tiny.read(chosen.dir)["groups"]
    measured = {int(steps): seconds for steps, seconds in facts["seconds_per_step_measured"].items()}
    assert list(measured) == [10] if resident else (1 in measured and len(measured) >= 2)
    assert all(seconds > 0 for seconds in measured.values())
    assert facts["steps_per_call"] == min(measured, key=lambda steps: measured[steps])
    chex.assert_trees_all_equal(chosen.state.params, whole.state.params)  # measuring trained nothing


def test_train_classifies_texts_and_counts_confusions():
    (inputs, labels), names = tiny.points(37), ["left", "middle", "right"]
    how = {**tiny.HOW, "record": False, "batch_size": 8, "num_epochs": 2.5}
    run = jn.train(tiny.MODEL, optax.sgd(0.1, momentum=0.9), (inputs, np.array(names)[labels]), **how)
    assert int(run.state.step) == 10, "37 // 8 = 4 steps an epoch, 2.5 epochs"
    matrix, counts = run.confusion_matrix("train", batch_size=5), np.zeros((3, 3))
    np.add.at(counts, (labels, run.predict(inputs).argmax(axis=1)), 1)
    np.testing.assert_array_equal(matrix.counts, counts)
    assert matrix.accuracy == pytest.approx(run.evaluate("train")["accuracy"]) and matrix.accuracy > 0.5
    axes = matrix.plot().axes[0]
    assert sum(int(text.get_text()) for text in axes.texts) == 37
    assert [label.get_text() for label in axes.get_yticklabels()] == names


def test_train_regresses_floats():
    inputs, _ = tiny.points(40)
    targets = inputs @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 3.0
    model = (lambda key, inputs: {"w": jnp.zeros((3, 1)), "b": jnp.zeros((1, 1))}, lambda p, x: x @ p["w"] + p["b"])
    options = {**tiny.HOW, "record": False, "steps_per_call": 50, "report_every": 100, "eval_every": 0}
    run = jn.train(model, optax.sgd(0.1), (inputs, targets[:, 0]), num_steps=300, batch_size=40, **options)
    np.testing.assert_allclose(run.state.params["w"][:, 0], [1.0, -2.0, 0.5], atol=1e-3)
    np.testing.assert_allclose(run.state.params["b"], [[3.0]], atol=1e-3)
    found = run.evaluate("train")
    assert found["mean_absolute_error"] < 1e-3 and found["root_mean_squared_error"] == found["loss"] ** 0.5
    with pytest.raises(jn.ConfigError, match="needs integer labels"):
        run.confusion_matrix("train")


def test_a_summary_counts_a_shared_layer_once_and_all_its_operations():
    shared, norm = linen.Dense(3), linen.BatchNorm(use_running_average=True)
    model = linen.Sequential([shared, shared, norm, jn.models.MLP((2, 3))])
    rows = {path: rest for path, *rest in jn.model_summary(tiny.experiment(model=model)).layers}
    assert rows["layers_0"] == ["Dense", "[batch, 3]", 12, 0, 2 * 2 * 9] and rows["layers_2"][2:4] == [6, 6]
    frozen = lambda config: jn.tasks.freeze(jn.tasks.classification(model), "layers_3")  # noqa: E731
    brief = jn.model_summary(tiny.experiment(task=frozen), depth=1)
    assert brief.layers[-1] == ("layers_3", "MLP", "[batch, 3]", 0, 17, 24) and brief.flops == 36 + 24
    assert jn.model_summary(tiny.experiment()).layers == ((".", "bias [3], kernel [3, 3]", "", 12, 0, 0),)
    assert jn.model_summary(tiny.experiment(model=jn.models.MLP((10**6, 10**6, 3)))).parameters > 10**12


def test_reports_states_and_parameters_equal_those_of_fit(whole):
    iteration = jn.iterate(whole.experiment, record=False, **tiny.HOW)
    reports, states = [], []
    for report in iteration:
        reports.append(report)
        states.append(iteration.state)
        assert int(iteration.run.state.step) == report.step
        assert ("test_loss" in report.metrics) == (report.step % 10 == 0)
        assert iteration.run.predict(tiny.points(2)[0]).shape == (2, 3)
    assert [report.step for report in reports] == [5, 10, 15, 20]
    np.testing.assert_array_equal([report.metrics["train_loss"] for report in reports], whole.metrics["train_loss"])
    chex.assert_trees_all_equal(iteration.state.params, whole.state.params)
    assert iteration.run.summary.status == "finished"
    # Each state is a copy: training reuses the memory of the original.
    assert [int(state.step) for state in states] == [5, 10, 15, 20]
    half = tiny.fit(whole.experiment.replace(num_steps=10), eval_every=0)
    chex.assert_trees_all_equal(jax.device_get(states[1]).params, half.state.params)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_leaving_the_loop_saves_and_can_be_resumed(whole, tmp_path, error):
    path = tmp_path / "run"
    iteration = jn.iterate(whole.experiment, run_dir=path, **tiny.HOW, checkpoint_every=10)
    with pytest.raises(error) if error else contextlib.nullcontext():
        for report in iteration:
            if report.step == 15:
                if error is not None:
                    raise error
                break
    facts = tiny.read(path)
    assert facts["status"] == facts["summary"]["status"] == iteration.run.summary.status == "interrupted"
    assert int(iteration.run.state.step) == facts["summary"]["step"] == 15
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["10", "15"]
    assert int(iteration.run.best_state().step) == 10, "a state is ranked by the metrics of its step"
    assert not RecordReader(path).is_locked
    resumed = tiny.fit(whole.experiment, resume=path)
    chex.assert_trees_all_equal(resumed.state.params, whole.state.params)
    np.testing.assert_array_equal(resumed.metrics["train_loss"], whole.metrics["train_loss"])
    tiny.break_off(tiny.experiment(num_steps=5), tmp_path / "last", 5)
    assert tiny.read(tmp_path / "last")["status"] == "finished", "left after its last window"


SPOTS = np.array([[0.0, 0.5], [1.0, 2.0]])  # as pixels 0, 128, 255, 255


def samples(run: jn.Run) -> dict[str, Any]:
    correct = run.predict(tiny.points(tiny.NUM_TEST, 1)[0]).argmax(axis=1) == tiny.points(tiny.NUM_TEST, 1)[1]
    return {"accuracy": correct.mean(), "spots": SPOTS, "words": f"after {run.state.step}", "curves": run.plot()}


def spying() -> Mock:
    """A writer with all methods, and what was called."""
    return Mock(spec=("open", "write", "media", "close"))


def test_probes_are_recorded_and_reach_writers(tmp_path):
    spy = spying()
    how = {"probes": (samples,), "writers": (spy,), "monitor": "samples/accuracy", "patience": 1}
    run = tiny.fit(tiny.experiment(), tmp_path / "run", **how)
    # The probe's state and data are those of the evaluation.
    evaluated = [line for line in tiny.lines(run.dir) if "test_accuracy" in line]
    assert [line["step"] for line in evaluated] == [10, 20]
    for line in evaluated:
        assert line["probe_samples/accuracy"] == pytest.approx(line["test_accuracy"])
    assert run.monitor == "probe_samples/accuracy" and run.final["probe_samples/accuracy"] > 0.3
    folder = tmp_path / "run" / "probes" / "samples"
    assert (folder / "words" / "10.txt").read_text() == "after 10"
    with Image.open(folder / "spots" / "20.png") as picture:
        assert np.array_equal(np.asarray(picture.convert("L")), [[0, 128], [255, 255]])
    spy.open.assert_called_once_with(WriterFacts("tiny", run.dir, {**vars(tiny.Config())}))
    assert [[line["step"] for line in call.args[0]] for call in spy.write.call_args_list] == [[5], [10], [15], [20]]
    media = [call.args for call in spy.media.call_args_list]
    expected = [(f"samples/{name}", step) for step in (10, 20) for name in ("spots", "words", "curves")]
    assert [(name, step) for name, _, step in media] == [*expected, ("curves", 20)]
    for name, content, step in media:
        assert content == f"after {step}" if name == "samples/words" else (content.dtype, content.ndim) == (np.uint8, 3)
    spy.close.assert_called_once_with()
    assert [spy.method_calls[index][0] for index in (0, -1)] == ["open", "close"]


def test_pictures_in_a_grid_are_drawn_in_rows_and_columns():
    drawn = draw_picture(np.stack([SPOTS, SPOTS.T, SPOTS.T, 0 * SPOTS]).reshape(2, 2, 2, 2, 1))
    pictures = [[0, 128], [255, 255]], [[0, 255], [128, 255]], [[0, 0]] * 2
    first, second, black = (np.pad(pixels, 1) for pixels in pictures)
    assert np.array_equal(np.asarray(drawn.convert("L")), np.block([[first, second], [second, black]]))


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (lambda run: 1 / 0, "probe mine failed at step 10 .ZeroDivisionError.*resume"),
        (lambda run: {"part": object}, "mine/part is no number, picture"),
    ],
)
def test_probes_that_fail_are_named(tmp_path, probe, words):
    with pytest.raises(jn.TrainingError, match=words):
        tiny.fit(tiny.experiment(), tmp_path / "run", probes={"mine": probe})
    assert tiny.read(tmp_path / "run")["status"] == "failed"


def test_sweep_opens_writers_and_reports_norms(tmp_path):
    spy, rates = spying(), [0.125, 0.25]
    experiment = tiny.experiment(optimizer=lambda config: jn.optim.with_norms(optax.sgd(config.learning_rate)))
    how = {**tiny.MEMBERS, "run_dir": tmp_path / "sweep", "writers": (spy,)}
    sweep = jn.sweep(experiment, jn.grid(learning_rate=rates), **how)
    (facts,) = spy.open.call_args.args
    assert facts.members == {n: {"learning_rate": rate} for n, rate in enumerate(rates)} and facts.path == sweep.dir
    assert [name for name, *_ in spy.method_calls] == ["open", *["write"] * 4, "media", "close"]
    # The update of plain SGD is the gradient times the rate.
    for line in sweep.lines:
        assert line["train_update_norm"] == pytest.approx(rates[line["member"]] * line["train_gradient_norm"], rel=1e-5)
    kernel, bias = (jax.device_get(sweep.run(1).state.params)[name] for name in ("kernel", "bias"))
    norm = np.linalg.norm([*kernel.flat, *bias])
    assert sweep.lines[-1]["train_param_norm"] == pytest.approx(norm, rel=0.1)


def test_writer_that_raises_is_a_warning_and_gets_the_next_lines():
    spy = Mock(spec=("write",), **{"write.side_effect": [None, OSError("busy"), None, None]})
    with pytest.warns(UserWarning, match=r"Mock failed in write \(OSError: busy\)"):
        assert tiny.fit(tiny.experiment(), writers=(spy,)).summary.status == "finished"
    assert len(spy.write.call_args_list) == 4


def test_missing_writers_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(jn.ConfigError, match=r'writer wandb needs wandb.*: pip install "jaxnn\[wandb\]"\.$'):
        jn.RunOptions(writers=("wandb",))


def needs(module: str, extra: str = "") -> None:
    pytest.importorskip(module, reason=f'pip install "jaxnn[{extra or module}]"', exc_type=ImportError)


def train_twice(path: Path, writer: Any) -> str:
    """Trains for 20 steps, loses the last ten, resumes to 30; returns the id of the run at the writer's service."""
    how: dict[str, Any] = {**tiny.HOW, "writers": (writer,), "probes": (samples,)}
    tiny.fit(tiny.experiment(), path, checkpoint_every=10, **how)
    (known,) = tiny.read(path, "writers.json").values()
    shutil.rmtree(path / "checkpoints" / "20")
    if isinstance(writer, str):
        del how["writers"]  # the record has its name
    tiny.fit(tiny.experiment(num_steps=30), resume=path, **how)
    (again,) = tiny.read(path, "writers.json").values()
    assert again == {"": {"id": known[""]["id"], "sent": 30}}
    return str(known[""]["id"])


def sweep_seeds(path: Path, writer: Any) -> None:
    how = {**tiny.MEMBERS, "run_dir": path, "writers": (writer,)}
    jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), **how)


@pytest.mark.slow
def test_tensorboard_continues_its_events(tmp_path):
    needs("tensorboardX", "tensorboard")
    needs("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def events(folder: str) -> Any:
        return EventAccumulator(str(tmp_path / folder)).Reload()

    train_twice(tmp_path / "run", "tensorboard")
    found = events("run/tensorboard")
    logged = [(event.step, event.value) for event in found.Scalars("train_loss")]
    assert logged == [(line["step"], np.float32(line["train_loss"])) for line in tiny.lines(tmp_path / "run")]
    assert [event.step for event in found.Images("samples/spots")] == [10, 20, 30]
    assert {"samples/words/text_summary", "config/text_summary"} <= set(found.Tags()["tensors"])
    sweep_seeds(tmp_path / "sweep", TensorBoard())
    assert [event.step for event in events("sweep/tensorboard/0001").Scalars("test_loss")] == [10, 20]
    # What a kill after 15 steps leaves; then a resume whose service knows nothing.
    how = {**tiny.HOW, "checkpoint_every": 10, "writers": ("tensorboard",)}
    for report in jn.iterate(tiny.experiment(), run_dir=tmp_path / "late", **how):
        if report.step == 15:
            assert [event.step for event in events("late/tensorboard").Scalars("train_loss")] == [5, 10]
            break
    (tmp_path / "late" / "writers.json").write_text('{"tensorboard": {"": 7}}')
    with pytest.raises(jn.RecordError, match=r"writers\.json is damaged .its tensorboard\. is 7"):
        tiny.fit(tiny.experiment(), resume=tmp_path / "late")
    (tmp_path / "late" / "writers.json").unlink()
    shutil.rmtree(tmp_path / "late" / "tensorboard")
    tiny.fit(tiny.experiment(), resume=tmp_path / "late")
    assert [event.step for event in events("late/tensorboard").Scalars("train_loss")] == [5, 10, 15, 20]


@pytest.mark.slow
def test_wandb_continues_its_run_offline(tmp_path, monkeypatch):
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_id = train_twice(tmp_path / "run", WandB(project="tests", checkpoints=True))
    # A run directory for each process, with the id of one run, in which `wandb sync` finds both.
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))) == 2
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 2
    pictures = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/images/samples/spots_*.png")
    assert len(list(pictures)) == 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a tracking server."""
    needs("mlflow")
    port = processes.free_port()
    where = f"--host 127.0.0.1 --port {port} --workers 1 --backend-store-uri sqlite:///{tmp_path}/mlflow.db".split()
    command = [sys.executable, "-m", "mlflow", "server", *where, "--artifacts-destination", str(tmp_path / "kept")]
    with processes.started([command]):
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
def test_mlflow_continues_its_run_and_nests_members(tmp_path, server):
    from mlflow import MlflowClient

    client = MlflowClient(server)
    run_id = train_twice(tmp_path / "run", MLflow(server, checkpoints=True))
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params["learning_rate"]) == ("FINISHED", "0.1")
    logged = {(metric.step, metric.value) for metric in client.get_metric_history(run_id, "train_loss")}
    assert logged == {(line["step"], line["train_loss"]) for line in tiny.lines(tmp_path / "run")}
    assert {part.path for part in client.list_artifacts(run_id, "samples/words")} == {
        f"samples/words/{step}.txt" for step in (10, 20, 30)
    }
    assert {part.path for part in client.list_artifacts(run_id)} == {"checkpoints", "curves", "samples"}
    sweep_seeds(tmp_path / "sweep", MLflow(server))
    (known,) = tiny.read(tmp_path / "sweep", "writers.json").values()
    for member in ("0", "1"):
        run = client.get_run(known[member]["id"])
        assert run.data.tags["mlflow.parentRunId"] == known[""]["id"] and run.data.params["seed"] == member
        assert run.info.status == "FINISHED"
