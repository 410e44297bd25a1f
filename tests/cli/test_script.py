"""An experiment as a script and the ``jaxnn`` command: flags, help, exit statuses, errors of one line."""

import ast
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
from jaxnn.cli import ClusterOptions, command, enable_compile_cache, parse_run, parse_sweep
from tests import shell, swept, tiny

QUICK = ["--progress", "none", "--steps-per-call", "5", "--report-every", "5", "--eval-every", "10"]


DEFINITION = "from tests import tiny\nexperiment = tiny.experiment()\nother = 3\n"


def script(*arguments: object, experiment: jn.Experiment[Any] | None = None) -> jn.Run:
    """A script's run in this process."""
    words = list(map(str, arguments))
    how = [] if words and words[0][:1] != "-" else QUICK
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
    assert parse_sweep(tiny.experiment(), [], watched)[-1] == jn.SweepOptions(**vars(options))
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
    assert [len(text.splitlines()) <= most for text, most in ((short, 40), (of_sweep, 50))] == [True, True]
    assert len(long.splitlines()) > 60
    assert all("Widths of the hidden layers." in text and "config options" in text for text in (short, long))
    assert "Directory of the record" in long and "Directory of the record" not in short and "--shard" in of_sweep


ERRORS = {
    "--learning-rat 0.5": "Unrecognized options .*--learning-rat, 0.5 .*Perhaps you meant: --learning-rate FLOAT",
    "--learning-rate fast": "Value error .*Error parsing --learning-rate: .*'fast'",
    "--lr 0.1": "there is no flag --lr: did you mean --learning-rate",
    "--epochs=3": r"there is no flag --epochs: did you mean --num-steps \(updates, not epochs\)",
    "sweep --lr 0.1 0.2": ".*--learning-rate",
    "verify --num-steps x": "(?s).*see .* verify --help",
    f"--num-steps {'9' * 20}": "num_steps is 9+, and must be below",
    f"--resume {'x' * 300}": ".?x+.*File name too long",
    "--run-dir a\udcffb": r"a\\udcffb is not UTF-8",
    "--resume a\x1b[2J\nb": r"a\\x1b\[2J\\nb holds no record",
    "--monitor-mode up": "Invalid choice .*'up'.*--monitor-mode.*auto.*min.*max",
    "--mesh model=2": ".*model=2, and nothing is",
    "evalaute runs": "there is no command 'evalaute': did you mean 'evaluate'",
    "sweep --learning-rate 0.1,0.2": r"Value error .*'0.1,0.2'.* \[FLOAT \[FLOAT ...\]\] Values to sweep",
    "evaluate nowhere": ".*nowhere holds no record",
}


@pytest.mark.several_devices
def test_errors_are_named_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line, words in ERRORS.items():
        assert re.match(words, fails(capsys, *line.split(" ")).removeprefix("error: ")), line
    patient: Any = dataclasses.make_dataclass("Patient", [("patience", int, 3)], bases=(tiny.Config,), frozen=True)()
    experiment = dataclasses.replace(tiny.experiment(), config=patient)
    assert "has a field 'patience'" in fails(capsys, experiment=experiment)
    assert not list(tmp_path.iterdir())


def test_diverged_run_exits_with_status_1(tmp_path, capsys):
    error = fails(capsys, "--learning-rate", "1e38", "--run-dir", tmp_path / "run", status=1)
    assert re.match("error: the loss is no longer finite at step [0-9]+ of 20", error)
    assert tiny.read(tmp_path / "run")["status"] == "diverged"


def test_resuming_takes_the_config_from_the_record(finished, capsys):
    assert script("summary", "--resume", finished.dir, "--steps-per-call", 5).parameters == 12
    assert "12 parameters, 48 B" in capsys.readouterr().out
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
    assert "holds no record" in shell.fails(capsys, main, "repeat", tmp_path)


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
    how = "--num-steps", 20, "--steps-per-call", 10, "--run-dir", tmp_path / "run"
    done = shell.python(shell.ROOT / "experiments" / "digits_mlp.py", *how, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {"placement", "cpu:0", "finished", "accuracy", "record"} <= {*done.stdout.split()}
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


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    command(list(map(str, arguments)))
    return capsys.readouterr().out


def test_devices_and_commands_are_printed(capsys):
    text = output(capsys, "devices")
    assert re.search(rf"^backend +{jax.default_backend()}", text, re.MULTILINE) and f"jax {jax.__version__}" in text
    assert text.count("\ndevice ") == jax.device_count() and f"jaxnn {jn.__version__}" in text
    assert text.count("\nfault ") == len(jn.observe.known_faults(jax.default_backend()))
    with pytest.raises(SystemExit) as caught:
        command([])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert all(f"jaxnn {name}" in text for name in ("devices", "runs", "show", "plot", "compare", "export"))


def test_runs_are_listed_with_damaged_ones_and_shown(finished, tmp_path, capsys):
    folder, facts = tmp_path / "runs", tiny.read(finished.dir)
    killed = {name: value for name, value in facts.items() if name != "summary"} | {"status": "running"}
    for name, text in (("damaged", '{"status": '), ("complete", json.dumps(facts)), ("killed", json.dumps(killed))):
        (folder / name).mkdir(parents=True)
        (folder / name / "record.json").write_text(text)
    (folder / "complete" / "metrics.jsonl").write_bytes((finished.dir / "metrics.jsonl").read_bytes())
    rows = {Path(line.split()[0]).name: line for line in output(capsys, "runs", folder).splitlines()[1:]}
    assert "finished" in rows["complete"] and "20/20" in rows["complete"] and "test_loss" in rows["complete"]
    assert "interrupted" in rows["killed"] and "0/20" in rows["killed"]
    assert [*rows][0] == "damaged" and re.search("unreadable .*record.json cannot be read", rows["damaged"])
    text = output(capsys, "show", finished.dir)
    for words in ("finished", "learning_rate 0.25", facts["groups"][0]["fingerprint"]["program"], "test_loss", "jax "):
        assert words in text
    seconds = sum(facts["summary"]["seconds"].values())
    assert re.search(rf"^time +{seconds:.2f} s \(", text, re.MULTILINE)


@pytest.fixture
def sweeps(tmp_path: Path, finished: jn.Run) -> Path:
    """A folder with a run and two sweeps."""
    folder = tmp_path / "runs"
    swept.sweep(folder / "older", {(0.1, 0): 1.0, (0.1, 1): 3.0, (0.2, 0): None}, "learning_rate", "seed")
    (folder / "alone").mkdir(parents=True)
    (folder / "alone" / "record.json").write_bytes((finished.dir / "record.json").read_bytes())
    losses = {(0.1, 0): 0.9, (0.1, 1): 2.8}
    swept.sweep(folder / "newer", losses, "learning_rate", "seed", started="2999-01-01T00:00:00+0000")
    return folder


def test_sweep_is_one_row_among_the_runs(sweeps, capsys):
    rows = output(capsys, "runs", sweeps).splitlines()[1:]
    assert [Path(row.split()[0]).name for row in rows] == ["older", "alone", "newer"]
    assert "finished, sweep of 3: 2 finished, 1 diverged" in rows[0] and "1,234" in rows[0]
    assert "best train_loss 0.5, test_loss 1.0, test_accuracy 0.9" in rows[0]
    assert len(output(capsys, "runs", sweeps / "older").splitlines()) == 2
    axes = [{"name": "seed", "values": [0, 1], "scale": "nominal"}]
    for seed in (0, 1):  # shards alone are one row
        shard = {"axes": axes, "points": [{"seed": 0}, {"seed": 1}], "options": {"shard": "1/2"}}
        swept.write(sweeps / "x" / "s" / "shards" / str(seed), [swept.member(seed, {"seed": seed}, 1.0)], **shard)
    (row,) = output(capsys, "runs", sweeps / "x").splitlines()[1:]
    assert row.split()[0] == str(sweeps / "x" / "s") and "sweep of 2: 2 finished" in row


def test_sweeps_are_shown_and_compared(sweeps, capsys):
    failed = swept.member(1, {"seed": 1}, status="failed", error="out of memory")
    path = swept.write(sweeps / "s", [swept.member(0, {"seed": 0}, 1.0), failed])
    assert re.search(r"^failed +1 with: out of memory$", output(capsys, "show", path), re.MULTILINE)
    text = output(capsys, "show", sweeps / "older")
    assert "sweep of 3: 2 finished" in text and "member 0 (learning_rate 0.1, seed 0), by the lowest" in text
    # Losses 1 and 3: mean 2, deviation √2, error 1, t(0.975; 1) = 12.7062.
    assert "2.0 ± 1.4 (-10.7 to 14.7)" in text
    alone = swept.sweep(sweeps / "x", {(0.1,): 1.0}, "learning_rate").dir
    assert "member  learning_rate" in output(capsys, "show", alone)
    assert "side A has 2 members" in shell.fails(capsys, command, "compare", sweeps / "older", sweeps / "newer")
    text = output(capsys, "compare", sweeps / "newer", sweeps / "newer", "test_accuracy")
    assert f"A  {sweeps / 'newer'}" in text and "test_accuracy: B 0.815 against A 0.815, paired over 2 seeds." in text


def test_plot_draws_runs_and_sweeps(finished, sweeps, tmp_path, capsys):
    assert output(capsys, "plot", finished.dir).strip() == str(finished.dir / "curves.png")
    output(capsys, "plot", sweeps / "older", "--out", tmp_path / "own.png")
    for drawn in (finished.dir / "curves.png", tmp_path / "own.png"):
        assert drawn.read_bytes().startswith(b"\x89PNG")
    elsewhere = tmp_path / "no" / "a.png"
    assert "cannot be written (No such" in shell.fails(capsys, command, "plot", finished.dir, "--out", elsewhere)
    (tmp_path / "plotted.py").write_text(DEFINITION)
    confusion = "plot", finished.dir, "--confusion", "test"
    assert output(capsys, *confusion, "--script", tmp_path / "plotted.py").strip().endswith("confusion.png")
    assert "give the script that trained it" in shell.fails(capsys, command, *confusion)


WRONG_COMMANDS = {
    "show nowhere": "nowhere holds no record",
    "show": "Required options .*Missing from jaxnn show: PATH",
    f"show {'x' * 300}": ".?x+.*File name too long",
    "show a\x1b[2J": r"a\\x1b\[2J holds no record",
    "runs nowhere": "no runs below nowhere",
    "plan nowhere.py": ".*nowhere.py is not a file",
    "device": "Unrecognized options .*device .*devices, runs, show",
    "plot x --outt y": "Unrecognized options .*--outt.*Perhaps you meant: --out ",
}


def test_errors_of_the_command_are_named(capsys):
    for line, words in WRONG_COMMANDS.items():
        assert re.match(words, shell.fails(capsys, command, *line.split(" ")).removeprefix("error: ")), line


@pytest.mark.slow
def test_command_is_a_module_and_exits_with_a_status(tmp_path):
    done = shell.python("-m", "jaxnn", "show", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path} holds no record") and done.stderr.count("\n") == 1


# With a task, a training step or an environment of their own, or two experiments.
LONGER = {
    "cartpole_ppo.py": 170,
    "digits_gan.py": 110,
    "digits_dp_sgd.py": 80,
    "digits_sam.py": 60,
    "tricks.py": 145,
    "digits_search.py": 80,
    "backtests.py": 120,
}
LONGER |= {"half_precision.py": 60, "digits_diffusion.py": 100, "fashion_vae.py": 95, "cats_vs_dogs_finetune.py": 105}


def test_experiments_state_their_claim_and_command_in_forty_lines():
    for path in sorted({*(shell.ROOT / "experiments").glob("*.py")} - {shell.ROOT / "experiments/convert_cifar.py"}):
        text = path.read_text()
        claim = ast.get_docstring(ast.parse(text)) or ""
        assert re.search(r"^Claim +\S", claim, re.MULTILINE), f"the docstring of {path} lacks a line 'Claim …'"
        assert re.search(rf"^Command .*(python|bench.py) experiments/{path.name}", claim, re.MULTILINE), path
        assert len(text.splitlines()) <= LONGER.get(path.name, 40), path


@pytest.mark.several_devices
def test_plan_takes_the_experiment_of_a_script(tmp_path, capsys):
    script = tmp_path / "planned.py"
    script.write_text(DEFINITION)
    command(["plan", str(script), "--batch-size", "16", "--devices", "2", "--strategy", "pmap"])
    assert "pmap, data=2\nbatch size        16" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command(["plan", str(script), "--help"])
    assert "--largest" in capsys.readouterr().out
    (tmp_path / "empty.py").write_text("")
    assert "did you mean 'h100'" in shell.fails(capsys, command, "plan", script, "--for", "h10")
    assert "has no attribute 'experiment'" in shell.fails(capsys, command, "plan", tmp_path / "empty.py")


def test_export_takes_the_experiment_from_a_script(finished, tmp_path, capsys):
    pytest.importorskip("flatbuffers", reason="StableHLO files need jaxnn[export]")
    script = tmp_path / "exported_script.py"
    script.write_text(DEFINITION)
    path = Path(output(capsys, "export", finished.dir, tmp_path / "m.stablehlo", "--script", script, "--best").strip())
    inputs, run = tiny.points(4)[0], jn.open_run(finished.dir, tiny.experiment())
    found = jax.export.deserialize(bytearray(path.read_bytes())).call(inputs)
    np.testing.assert_allclose(found, run.predict(inputs, state=run.best_state()), rtol=1e-6)
    assert "is not a file: give the script" in shell.fails(capsys, command, "export", finished.dir, "--script", "no.py")
