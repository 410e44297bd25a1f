"""Probes, norms and metric writers of a run: what they get, and what is recorded of it."""

import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import optax
import pytest
from PIL import Image

import jaxnn as jn
from jaxnn.record import MLflow, TensorBoard, WandB, WriterFacts, draw_picture
from tests import processes, tiny

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
    first, second, black = (
        np.pad(pixels, 1) for pixels in ([[0, 128], [255, 255]], [[0, 255], [128, 255]], [[0, 0]] * 2)
    )
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
    ids = tiny.read(path, "writers.json")
    shutil.rmtree(path / "checkpoints" / "20")
    if isinstance(writer, str):
        del how["writers"]  # the record has its name
    tiny.fit(tiny.experiment(num_steps=30), resume=path, **how)
    assert tiny.read(path, "writers.json") == ids
    (known,) = ids.values()
    return str(known[""])


def sweep_seeds(path: Path, writer: Any) -> None:
    how = {**tiny.MEMBERS, "run_dir": path, "writers": (writer,)}
    jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), **how)


@pytest.mark.slow
def test_tensorboard_continues_its_events(tmp_path):
    needs("tensorboardX", "tensorboard")
    needs("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_twice(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("train_loss")]
    assert logged == [(line["step"], np.float32(line["train_loss"])) for line in tiny.lines(tmp_path / "run")]
    assert [event.step for event in events.Images("samples/spots")] == [10, 20, 30]
    assert {"samples/words/text_summary", "config/text_summary"} <= set(events.Tags()["tensors"])
    sweep_seeds(tmp_path / "sweep", TensorBoard())
    events = EventAccumulator(str(tmp_path / "sweep" / "tensorboard" / "0001"))
    events.Reload()
    assert [event.step for event in events.Scalars("test_loss")] == [10, 20]


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
    ids = tiny.read(tmp_path / "sweep", "writers.json")["mlflow"]
    for member in ("0", "1"):
        run = client.get_run(ids[member])
        assert run.data.tags["mlflow.parentRunId"] == ids[""] and run.data.params["seed"] == member
        assert run.info.status == "FINISHED"
