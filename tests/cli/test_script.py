"""An experiment as a script: flags, statuses, one line for each mistake, and never a traceback."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import jaxnn as jn
from jaxnn.cli import COMMANDS, ClusterOptions, parse_run
from tests import shell, tiny

QUICK = ["--progress", "none", "--steps-per-call", "5", "--report-every", "5", "--eval-every", "10"]


pytestmark = pytest.mark.usefixtures("compiled_once")


def script(*arguments: object, experiment: jn.Experiment[Any] | None = None) -> jn.Run:
    """A script's run in this process."""
    words = list(map(str, arguments))
    how = [] if words and words[0] in COMMANDS else QUICK
    return jn.main(experiment or tiny.experiment(), [*how, *words])


def fails(
    capsys: pytest.CaptureFixture[str], *arguments: object, experiment: jn.Experiment[Any] | None = None, **how: int
) -> str:
    """What a script says on standard error when it fails."""
    return shell.fails(capsys, lambda words: script(*words, experiment=experiment), *arguments, **how)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "finished"
    tiny.fit(tiny.experiment(learning_rate=0.25), folder)
    return folder


# --- flags ---


def test_flags_change_the_config_and_how_it_is_run(tmp_path: Path) -> None:
    assert parse_run(tiny.experiment(seed=4), []) == (tiny.Config(seed=4), jn.RunOptions(), ClusterOptions())
    run = script("--learning-rate", "0.5", "--seed", 3, "--run-dir", tmp_path / "run", "--keep-last", 1)
    assert run.experiment.config == tiny.Config(learning_rate=0.5, seed=3)
    facts = tiny.read(tmp_path / "run")
    assert facts["config"]["learning_rate"] == 0.5 and facts["options"]["keep_last"] == 1
    told = tiny.fit(tiny.experiment(learning_rate=0.5, seed=3))
    tiny.assert_bitwise_equal(run.state.params, told.state.params)


@dataclasses.dataclass(frozen=True)
class Shaped(tiny.Config):
    features: tuple[int, ...] = (4, 5)
    """Widths of the hidden layers."""


def test_a_tuple_is_a_flag_with_several_values_and_help_comes_from_the_docstring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = dataclasses.replace(tiny.experiment(), config=Shaped(num_steps=1))
    run = script("--features", 6, 7, 8, "--no-record", experiment=experiment)
    assert run.experiment.config.features == (6, 7, 8) and run.dir is None
    with pytest.raises(SystemExit) as caught:
        script("--help", experiment=experiment)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "Widths of the hidden layers." in text and "config options" in text and "run options" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learning-rat", "0.5"], "(?s)--learning-rat.*--learning-rate"),
        (["--step-per-call", "3"], "--steps-per-call"),
        (["--learning-rate", "fast"], "--learning-rate.*'fast'"),
        (["--lr", "0.1"], "^error: there is no flag --lr: did you mean --learning-rate"),
        (["--epochs=3"], "^error: there is no flag --epochs: did you mean --num-steps"),
        (["sweep", "--lr", "0.1", "0.2"], "^error: .*--learning-rate"),
        (["plan", "--bs", "8"], "^error: .*--batch-size"),
        (["advise", "--lr", "1"], "^error: .*--learning-rate"),
        (["--num-steps", "9" * 20], "^error: num_steps is 9+, and must be below"),
        (["--resume", "x" * 300], "^error: .?x+.*File name too long"),
        (["--run-dir", "a\udcffb"], r"^error: a\\udcffb is not UTF-8"),
        (["--resume", "a\x1b[2J\nb"], r"^error: a\\x1b\[2J\\nb holds no run"),
        (["--batch-size", "3.5"], r"--batch-size.*'3\.5'"),
        (["--monitor-mode", "up"], "'up'.*--monitor-mode.*auto.*min.*max"),
        (["--num-steps", "0"], "^error: num_steps is 0, and must be a whole number of at least 1.$"),
        (["--num-steps", "-3"], "^error: num_steps is -3"),
        (["--batch-size", "1000"], "^error: a batch of 1000 is larger than the set of 37"),
        (["--patience", "0"], "patience is 0"),
        (["--monitor", "acuracy"], "^error: monitor is 'acuracy'.*did you mean 'accuracy'"),
        (["--resume", "nowhere"], "^error: nowhere holds no run"),
        (["--resume"], "--resume"),
        (["surplus"], "surplus"),
    ],
)
def test_a_mistake_is_named(
    arguments: Sequence[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(words, fails(capsys, *arguments))
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass(frozen=True)
class Patient(tiny.Config):
    patience: int = 3


@dataclasses.dataclass(frozen=True)
class Nested(tiny.Config):
    inner: Shaped = Shaped()


@pytest.mark.parametrize(("config", "field"), [(Patient(), "patience"), (Nested(), "learning_rate")])
def test_two_fields_of_one_name_are_named(config: Any, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = dataclasses.replace(tiny.experiment(), config=config)
    assert f"has a field '{field}'" in fails(capsys, experiment=experiment)


def test_a_run_that_diverges_fails_with_another_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, "--learning-rate", "1e38", "--run-dir", tmp_path / "run", status=1)
    assert re.match("error: the loss is no longer finite at step [0-9]+ of 20", said)
    assert tiny.read(tmp_path / "run")["status"] == "diverged"


# --- resuming ---


def test_resuming_takes_the_config_from_the_record(finished: Path) -> None:
    run = script("--resume", finished)
    assert run.experiment.config.learning_rate == 0.25 and run.summary.status == "finished"
    config, options, _ = parse_run(tiny.experiment(), [f"--resume={finished}"])
    assert config.learning_rate == 0.25 and options.resume == finished


def test_a_directory_that_is_taken_or_given_twice_is_named(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{finished} is not empty" in fails(capsys, "--run-dir", finished)
    assert "both resume and run_dir are given" in fails(capsys, "--resume", finished, "--run-dir", "elsewhere")


def test_resuming_accepts_no_other_flag_than_more_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.fit(tiny.experiment(learning_rate=0.25), tmp_path / "run")
    said = fails(capsys, "--resume", tmp_path / "run", "--learning-rate", "0.5")
    assert re.match("error: the run in .* has learning_rate = 0.25, this experiment 0.5", said)
    run = script("--resume", tmp_path / "run", "--num-steps", 30)
    whole = tiny.fit(tiny.experiment(learning_rate=0.25, num_steps=30))
    tiny.assert_bitwise_equal(run.state.params, whole.state.params)


# --- scripts as processes ---

SCRIPT = """
from tests import tiny
import jaxnn as jn
if __name__ == "__main__":
    jn.main(tiny.experiment(num_steps=50_000_000))
"""


CALLS = ("--steps-per-call", "100", "--report-every", "100", "--eval-every", "0", "--progress", "plain")


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoint_every", "status"), [("None", 75), ("0", 130)])
def test_an_interrupted_script_prints_how_to_resume(tmp_path: Path, checkpoint_every: str, status: int) -> None:
    (tmp_path / "endless.py").write_text(SCRIPT)
    how = ["--checkpoint-every", checkpoint_every, *CALLS]
    command = [sys.executable, tmp_path / "endless.py", *how, "--run-dir", tmp_path / "run"]
    variables = {**os.environ, "PYTHONPATH": str(shell.ROOT), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, cwd=tmp_path, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("step "):
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == status, errors
    facts, saved = tiny.read(tmp_path / "run"), status == 75
    assert (f"--resume {tmp_path / 'run'}" in rest) == saved and "Traceback" not in errors
    assert facts["status"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / str(facts["summary"]["step"])).is_dir() == saved


def test_the_digits_are_trained_on_from_the_shell(tmp_path: Path) -> None:
    done = shell.python(
        shell.ROOT / "experiments" / "digits_mlp.py",
        *("--num-steps", 20, "--steps-per-call", 10, "--run-dir", tmp_path / "run"),
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"),
    )
    assert done.returncode == 0, done.stderr
    for words in ("placement", "cpu:0", "finished", "test accuracy", "time to first step", "record"):
        assert words in done.stdout
    assert tiny.read(tmp_path / "run")["name"] == "digits_mlp"


def test_without_data_and_network_the_error_has_the_folder_of_the_file(tmp_path: Path) -> None:
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "HTTP", "HTTPS")}
    done = shell.python(
        shell.ROOT / "experiments" / "mnist_mlp.py",
        *("--run-dir", tmp_path / "run"),
        JAXNN_DATA=str(tmp_path / "empty"),
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"),
        **nowhere,
    )
    assert done.returncode == 2
    *news, sentence = done.stderr.strip().splitlines()
    assert all(line.startswith("jaxnn: downloading") for line in news)
    assert re.match(r"error: train-images.*gz of mnist is not in .*empty.*JAXNN_DATA", sentence)
    assert not (tmp_path / "run").exists()
