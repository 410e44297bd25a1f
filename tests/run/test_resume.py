"""A run that was killed, interrupted or broken off, and resumed, is bit for bit the run that never was."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.types import Experiment, Splits, Task
from tests import shell

pytestmark = pytest.mark.usefixtures("compiled_once")

TIMINGS = ("seconds", "steps_per_second", "examples_per_second")
PATIENCE_SECONDS = 120.0

# Leaves every array of its last state in final.npz.
SCRIPT = """
import dataclasses

import jax
import numpy as np
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 32
    num_steps: int = 3_000
    seed: int = 0


def data(config):
    return jn.data.digits()


def task(config):
    return jn.tasks.classification(jn.models.MLP((64, 64, 10), dropout=0.2))


def optimizer(config):
    return optax.adamw(jn.schedules.cosine(1e-2, config.num_steps))


if __name__ == "__main__":
    run = jn.main(jn.Experiment(Config(), data, task, optimizer))
    state = run.state._replace(key=jax.random.key_data(run.state.key))
    np.savez(run.dir / "final.npz", *jax.tree.leaves(state))
"""
CADENCES = ("--checkpoint-every", "200", "--report-every", "100", "--steps-per-call", "50")
NUM_REPORTS = 30

Start = Callable[[pathlib.Path], "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts the script in a run directory: resumed if there is a record, from the beginning if there is none yet."""
    folder = tmp_path_factory.mktemp("script")
    script = folder / "digits_dropout.py"
    script.write_text(SCRIPT)
    # One cache for all: what a killed run compiled is read back, as on any machine.
    surroundings = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "PYTHONPATH": str(shell.ROOT),
    }

    launched = []

    def launch(path: pathlib.Path) -> subprocess.Popen[str]:
        where = ("--resume", str(path)) if (path / "run.json").exists() else ("--run-dir", str(path), *CADENCES)
        command = [sys.executable, str(script), *where]
        launched.append(subprocess.Popen(command, env=surroundings, cwd=folder, stdout=subprocess.PIPE, text=True))
        return launched[-1]

    yield launch
    for process in launched:
        with process:
            process.kill()


@pytest.fixture(scope="module")
def whole(start: Start, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The record of a run that nothing disturbed."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert finish(start(path)) == 0
    return path


def finish(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Returns as soon as it is, or the process has ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and not reached():
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.001)


def wait_for_reports(process: subprocess.Popen[str], path: pathlib.Path, count: int) -> None:
    wait_until(process, lambda: num_reports(path) >= count)


def num_reports(path: pathlib.Path) -> int:
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill(process: subprocess.Popen[str]) -> bool:
    """Whether it was still running."""
    process.kill()
    return finish(process) == -signal.SIGKILL


def untimed(path: pathlib.Path) -> list[dict[str, Any]]:
    """The reports of a record without what the clock said."""
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def assert_same_run(path: pathlib.Path, whole: pathlib.Path) -> None:
    assert json.loads((path / "run.json").read_text())["status"] == "finished"
    assert len(untimed(whole)) == NUM_REPORTS
    assert untimed(path) == untimed(whole)
    with np.load(path / "final.npz") as got, np.load(whole / "final.npz") as expected:
        assert list(got) == list(expected)
        for name in expected:
            assert got[name].tobytes() == expected[name].tobytes(), name


@pytest.mark.slow
def test_killed_again_and_again(start: Start, whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path, draw = tmp_path / "run", random.Random(0)
    process = start(path)
    wait_until(process, lambda: (path / ".lock").exists())  # its directory is there, and nothing is said in it yet
    assert kill(process)
    num_killed = 0
    for target in sorted(draw.sample(range(2, 22), 4)):
        process = start(path)
        wait_for_reports(process, path, target)
        time.sleep(draw.uniform(0.0, 0.03))
        num_killed += kill(process)
    assert num_killed >= 3
    assert finish(start(path)) == 0
    assert_same_run(path, whole)
    resumed = json.loads((path / "run.json").read_text())["resumed"]
    assert resumed[-1]["step"] > 0
    assert all(resumption["changed"] == [] for resumption in resumed)


@pytest.mark.slow
def test_interrupted(start: Start, whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run"
    process = start(path)
    wait_for_reports(process, path, 7)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75
    assert f"--resume {path}" in said
    assert json.loads((path / "run.json").read_text())["status"] == "interrupted"
    assert num_reports(path) < NUM_REPORTS
    assert finish(start(path)) == 0
    assert_same_run(path, whole)


# In one process, with everything that a state can hold.


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 16
    num_steps: int = 40
    seed: int = 3


def data(config: Config) -> Splits:
    return jn.data.with_augmentation(jn.data.digits(), jn.data.random_shift(1))


def task(config: Config) -> Task:
    model = jn.models.CNN(10, blocks=((4,),), dense=(8,), dropout=0.25, batch_norm=True)
    return jn.tasks.classification(model, label_smoothing=0.1)


def optimizer(config: Config) -> optax.GradientTransformation:
    return jn.optim.with_ema(optax.adam(jn.schedules.cosine(1e-2, config.num_steps)), 0.9)


EXPERIMENT: Experiment[Config] = Experiment(Config(), data, task, optimizer)
QUIETLY = {"progress": "none"}
EVERY = {"report_every": 5, "eval_every": 10, "checkpoint_every": 20, "steps_per_call": 5}


def test_broken_off(tmp_path: pathlib.Path) -> None:
    expected = jn.fit(EXPERIMENT, run_dir=tmp_path / "whole", **EVERY, **QUIETLY)
    assert "batch_stats" in expected.state.model_state
    path = tmp_path / "run"
    for step, options in ((15, {"run_dir": path, **EVERY}), (30, {"resume": path})):
        for report in jn.iterate(EXPERIMENT, **options):
            if report.step == step:
                break
    got = jn.fit(EXPERIMENT, resume=path, **QUIETLY)
    assert got.summary.status == "finished"
    assert untimed(path) == untimed(tmp_path / "whole")
    assert got.final == expected.final
    for (place, left), right in zip(
        jax.tree.leaves_with_path(arrays(got.state)), jax.tree.leaves(arrays(expected.state)), strict=True
    ):
        assert left.tobytes() == right.tobytes(), jax.tree_util.keystr(place)


def arrays(state: jn.TrainState) -> Any:
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))
