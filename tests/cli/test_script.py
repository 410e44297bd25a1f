"""An experiment as a script: flags, help, exit statuses, and errors of one line without a traceback."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.cli import COMMANDS, ClusterOptions, enable_compile_cache, parse_run, parse_sweep
from tests import shell, tiny

QUICK = ["--progress", "none", "--steps-per-call", "5", "--report-every", "5", "--eval-every", "10"]


def script(*arguments: object, experiment: jn.Experiment[Any] | None = None) -> jn.Run:
    """A script's run in this process."""
    words = list(map(str, arguments))
    how = [] if words and words[0] in COMMANDS else QUICK
    return jn.main(experiment or tiny.experiment(), [*how, *words])


def fails(
    capsys: pytest.CaptureFixture[str], *arguments: object, experiment: jn.Experiment[Any] | None = None, **how: int
) -> str:
    """The standard error of a script that fails."""
    return shell.fails(capsys, lambda words: script(*words, experiment=experiment), *arguments, **how)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    """A run whose learning rate is not the default, from the command line."""
    folder = tmp_path_factory.mktemp("cli") / "finished"
    return script("--learning-rate", "0.25", "--run-dir", folder, "--keep-last", 1)


def test_flags_change_the_config_and_how_it_is_run(finished):
    assert parse_run(tiny.experiment(seed=4), []) == (tiny.Config(seed=4), jn.RunOptions(), ClusterOptions())
    assert finished.experiment.config == tiny.Config(learning_rate=0.25)
    facts = tiny.read(finished.dir)
    assert facts["config"]["learning_rate"] == 0.25 and facts["options"]["keep_last"] == 1
    expected = tiny.fit(tiny.experiment(learning_rate=0.25))
    chex.assert_trees_all_equal(finished.state.params, expected.state.params)


def test_options_of_a_script_are_defaults_of_its_flags(finished, tmp_path, capsys):
    def stop(lines: Any) -> bool:
        return len(lines) == 2

    options = jn.RunOptions(patience=41, keep_last=3, stop=stop, run_dir=tmp_path)
    _, parsed, _ = parse_run(tiny.experiment(), ["--keep-last", "4"], options)
    assert parsed == dataclasses.replace(options, keep_last=4)
    watched = dataclasses.replace(options, probes=(print,))  # which a sweep leaves out
    assert parse_sweep(tiny.experiment(), [], watched)[2] == jn.SweepOptions(**vars(options))
    # What the record has is not the script's; an object is in no record.
    _, parsed, _ = parse_run(tiny.experiment(), ["--resume", str(finished.dir)], options)
    assert parsed == jn.RunOptions(resume=finished.dir, stop=stop)
    with pytest.raises(SystemExit):
        jn.main(tiny.experiment(), ["--help-all"], options=options)
    assert re.search(r"--patience.*41", re.sub(r"\s+", " ", capsys.readouterr().out))


@dataclasses.dataclass(frozen=True)
class Shaped(tiny.Config):
    features: tuple[int, ...] = (4, 5)
    """Widths of the hidden layers."""


def test_help_describes_config_fields_and_names_the_other_flags(monkeypatch, capsys):
    experiment = dataclasses.replace(tiny.experiment(), config=Shaped())
    config, _, _ = parse_run(experiment, ["--features", "6", "7", "8"])
    assert config.features == (6, 7, 8), "a tuple is a flag with several values"
    monkeypatch.setattr(sys.modules["__main__"], "__doc__", "A title.\n\nClaim    one\nCommand  two\n")
    helped = {}
    for words in ("--help", "sweep -h", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            jn.main(experiment, words.split())
        assert caught.value.code == 0
        helped[words] = text = capsys.readouterr().out
        assert re.search(r"A title\.\n *Claim +one\n *Command +two\n", text) and "--steps-per-call" in text
    short, of_sweep, long = helped.values()
    assert all(len(text.splitlines()) <= 40 for text in (short, of_sweep)) and len(long.splitlines()) > 60
    assert all("Widths of the hidden layers." in text and "config options" in text for text in (short, long))
    assert "Directory of the record" in long and "Directory of the record" not in short and "--shard" in of_sweep


ERRORS = {
    "--learning-rat 0.5": r".*--learning-rat, 0.5; did you mean --learning-rate\?$",
    "--learning-rate fast": "Error parsing --learning-rate: .*'fast'; see --help.$",
    "--lr 0.1": "there is no flag --lr: did you mean --learning-rate",
    "--epochs=3": r"there is no flag --epochs: did you mean --num-steps \(updates, not epochs\)",
    "sweep --lr 0.1 0.2": ".*--learning-rate",
    "plan --bs 8": ".*--batch-size",
    f"--num-steps {'9' * 20}": "num_steps is 9+, and must be below",
    f"--resume {'x' * 300}": ".?x+.*File name too long",
    "--run-dir a\udcffb": r"a\\udcffb is not UTF-8",
    "--resume a\x1b[2J\nb": r"a\\x1b\[2J\\nb holds no run",
    "--monitor-mode up": ".*'up'.*--monitor-mode.*auto.*min.*max",
    "--patience 0": "patience must be an integer >= 1, not 0",
    "--mesh model=2": ".*model=2, and nothing is",
    "surplus": ".*surplus",
    "evaluate nowhere": ".*nowhere holds no run",
}


def test_errors_are_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line, words in ERRORS.items():
        assert re.match(f"error: {words}", fails(capsys, *line.split(" "))), line
    patient: Any = dataclasses.make_dataclass("Patient", [("patience", int, 3)], bases=(tiny.Config,), frozen=True)()
    experiment = dataclasses.replace(tiny.experiment(), config=patient)
    assert "has a field 'patience'" in fails(capsys, experiment=experiment)
    assert not list(tmp_path.iterdir())


def test_diverged_run_exits_with_status_1(tmp_path, capsys):
    error = fails(capsys, "--learning-rate", "1e38", "--run-dir", tmp_path / "run", status=1)
    assert re.match("error: the loss is no longer finite at step [0-9]+ of 20", error)
    assert tiny.read(tmp_path / "run")["status"] == "diverged"


def test_resuming_takes_the_config_from_the_record(finished, capsys):
    path = finished.dir
    run = script("--resume", path)
    assert run.experiment.config.learning_rate == 0.25 and run.summary.status == "finished"
    config, options, _ = parse_run(tiny.experiment(), [f"--resume={path}"])
    assert config.learning_rate == 0.25 and options.resume == path
    error = fails(capsys, "--resume", path, "--learning-rate", "0.5")
    assert re.match("error: the run in .* has learning_rate = 0.25, this experiment 0.5", error)


def test_commands_of_a_script_get_the_run_and_flags(finished, tmp_path, capsys):
    calls = []

    def repeat(run: jn.Run, word: str = "none", count: int = 1) -> None:
        """Repeats a word."""
        calls.append((run.config.num_steps, word * count))

    main = partial(jn.main, tiny.experiment(), commands={"repeat": repeat}, at_end="repeat")
    assert main(["repeat", str(finished.dir), "--word", "ab", "--count", "2"]) is None
    main([*QUICK, "--no-record", "--learning-rate", "0.25", "--num-steps", "10"])
    assert calls == [(20, "abab"), (10, "none")]
    capsys.readouterr()
    assert "holds no run" in shell.fails(capsys, main, "repeat", tmp_path)


GPT = jn.models.GPT(4, num_layers=1, features=8, num_heads=1, max_length=6)
WINDOWED = jn.models.TextGenRNN(4, features=8, hidden=(8,))
TASKS = {"all": jn.tasks.next_token(GPT), "last": jn.tasks.classification(WINDOWED, auxiliary_weight=0.2)}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "targets"), [(GPT, "all"), (WINDOWED, "last")])
def test_a_trained_language_model_writes_its_text(model, targets, tmp_path, capsys):
    (tmp_path / "tale.txt").write_text("abcd" * 20)
    experiment = tiny.experiment(
        data=jn.data.char_corpus(tmp_path / "tale.txt", length=6, stride=1, targets=targets),
        task=lambda config: TASKS[targets],
        optimizer=lambda config: optax.adam(0.1),
    )
    write = jn.text_command(lambda config: model)
    write(script("--no-record", experiment=experiment), prompt="bc", num_tokens=14, temperature=0)
    assert capsys.readouterr().out == "bcdabcdabcdabcda\n"


@pytest.mark.slow
def test_digits_script_trains_from_the_shell(tmp_path):
    done = shell.python(
        shell.ROOT / "experiments" / "digits_mlp.py",
        *("--num-steps", 20, "--steps-per-call", 10, "--run-dir", tmp_path / "run"),
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"),
    )
    assert done.returncode == 0, done.stderr
    for words in ("placement", "cpu:0", "finished", "test accuracy", "time to first step", "record"):
        assert words in done.stdout
    assert tiny.read(tmp_path / "run")["name"] == "digits_mlp"


def test_evaluate_prints_metrics_of_a_run_and_of_members(finished, tmp_path, capsys):
    script("evaluate", finished.dir, "--split", "train", "--json")
    expected = {f"train_{name}": value for name, value in finished.evaluate("train").items()}
    assert json.loads(capsys.readouterr().out) == pytest.approx({"step": 20} | expected)
    how = [*QUICK, "--vmap-size", 2, "--devices", 1, "--run-dir", tmp_path / "sweep"]
    sweep = script("sweep", "--seed", 0, 1, *how)
    script("evaluate", tmp_path / "sweep")
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["member", "seed", "test_loss", "test_accuracy"]
    values = [[float(cell) for cell in row] for row in rows]
    np.testing.assert_allclose([row[2] for row in values], sweep.values("test_loss"), rtol=1e-5)
    assert "no split 'tests'" in fails(capsys, "evaluate", finished.dir, "--split", "tests")


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the user's cache; JAX is configured to use none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    return tmp_path / "jaxnn" / "compiled"


def enable(directory: Path | None, limit: int) -> str | None:
    """The directory of JAX's cache after a script enabled one, where ``directory`` was configured before."""
    jax.config.update("jax_compilation_cache_dir", directory and str(directory))
    enable_compile_cache(limit)
    return jax.config.jax_compilation_cache_dir


def test_least_recently_used_programs_are_deleted_down_to_half_the_limit(ours, capsys):
    before = os.umask(0)
    try:
        assert enable(None, 0) == str(ours) and ours.stat().st_mode & 0o777 == 0o700, "for its user alone"
    finally:
        os.umask(before)
    for seconds, name in enumerate(("first", "b", "c", "d", "last")):
        (ours / name).write_bytes(bytes(100))
        os.utime(ours / name, (seconds, 0))
    for directory, limit, left in ((None, 500, 5), (ours.parent, 99, 5), (None, 499, 2)):  # a user's own is left alone
        assert enable(directory, limit) == str(directory or ours)
        assert len(list(ours.iterdir())) == left
    assert {file.name for file in ours.iterdir()} == {"d", "last"} and not capsys.readouterr().err


WRITABLE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "open to the group": lambda folder, patch: folder.chmod(0o770),
    "in a parent open to all": lambda folder, patch: folder.parent.chmod(0o777),
    "of another user": lambda folder, patch: patch.setattr(os, "getuid", lambda: -1),
    "no directory": lambda folder, patch: (folder.rmdir(), folder.write_text("a file")),
}


@pytest.mark.parametrize("why", WRITABLE)
def test_cache_that_others_may_have_written_is_not_used(why, ours, monkeypatch, capsys):
    ours.mkdir(parents=True, mode=0o700)
    WRITABLE[why](ours, monkeypatch)
    assert enable(None, 99) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "not kept" in line and str(ours) in line
