"""The ``jaxnn`` command, and the header of every script in ``experiments``."""

import ast
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.cli import command
from tests import shell, swept, tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command") / "finished"
    tiny.fit(tiny.experiment(), folder)
    return folder


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
    assert all(f"jaxnn {name}" in text for name in ("devices", "runs", "show", "plot", "compare", "bench"))


def test_runs_are_listed_with_damaged_ones_and_shown(finished, tmp_path, capsys):
    folder, facts = tmp_path / "runs", tiny.read(finished)
    killed = {name: value for name, value in facts.items() if name != "summary"} | {"status": "running"}
    for name, text in (("damaged", '{"status": '), ("complete", json.dumps(facts)), ("killed", json.dumps(killed))):
        (folder / name).mkdir(parents=True)
        (folder / name / "run.json").write_text(text)
    (folder / "complete" / "metrics.jsonl").write_bytes((finished / "metrics.jsonl").read_bytes())
    rows = {Path(line.split()[0]).name: line for line in output(capsys, "runs", folder).splitlines()[1:]}
    assert "finished" in rows["complete"] and "20/20" in rows["complete"] and "test_loss" in rows["complete"]
    assert "interrupted" in rows["killed"] and "0/20" in rows["killed"]
    assert "unreadable" in rows["damaged"]
    text = output(capsys, "show", finished)
    for words in ("finished", "learning_rate 0.1", facts["fingerprint"]["program"], "test_loss", "jax "):
        assert words in text
    seconds = sum(facts["summary"]["seconds"].values())
    assert re.search(rf"^time +{seconds:.2f} s \(", text, re.MULTILINE)


@pytest.fixture
def sweeps(tmp_path: Path, finished: Path) -> Path:
    """A folder with a run, and two sweeps of which the older one has a run directory of a member."""
    folder = tmp_path / "runs"
    older = swept.sweep(folder / "older", {(0.1, 0): 1.0, (0.1, 1): 3.0, (0.2, 0): None}, "learning_rate", "seed")
    assert older.dir is not None
    for run in (folder / "alone", older.dir / "members" / "0000"):
        run.mkdir(parents=True)
        (run / "run.json").write_bytes((finished / "run.json").read_bytes())
    losses = {(0.1, 0): 0.9, (0.1, 1): 2.8}
    swept.sweep(folder / "newer", losses, "learning_rate", "seed", started="2999-01-01T00:00:00+0000")
    return folder


def test_sweep_is_one_row_among_the_runs(sweeps, capsys):
    (sweeps / "damaged").mkdir()
    (sweeps / "damaged" / "sweep.json").write_text("{")
    rows = output(capsys, "runs", sweeps).splitlines()[1:]
    assert [Path(row.split()[0]).name for row in rows] == ["damaged", "older", "alone", "newer"]
    assert "unreadable" in rows[0] and "sweep.json cannot be read" in rows[0]
    assert "finished, sweep of 3: 2 finished, 1 diverged" in rows[1] and "1,234" in rows[1]
    assert "best train_loss 0.5, test_loss 1.0, test_accuracy 0.9" in rows[1]
    for place, words in (("older", "sweep of 3"), ("older/members", "0000")):
        (row,) = output(capsys, "runs", sweeps / place).splitlines()[1:]
        assert words in row
    for seed in (0, 1):  # shards alone are one row
        swept.write(sweeps / "x" / "s" / "shards" / str(seed), [swept.member(seed, {"seed": seed}, 1.0)])
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
    assert output(capsys, "plot", finished).strip() == str(finished / "curves.png")
    output(capsys, "plot", sweeps / "older", "--out", tmp_path / "own.png")
    for drawn in (finished / "curves.png", tmp_path / "own.png"):
        assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "choose another --out" in shell.fails(capsys, command, "plot", finished, "--out", tmp_path / "no" / "a.png")


ERRORS = {
    "show nowhere": "nowhere holds no run",
    "compare nowhere nowhere": "nowhere holds no run",
    "show": "Missing from jaxnn show: PATH",
    f"show {'x' * 300}": ".?x+.*File name too long",
    "show a\x1b[2J": r"a\\x1b\[2J holds no run",
    "runs nowhere": "no runs below nowhere",
    "plan nowhere.py": ".*nowhere.py is not a file",
    "device": ".*device; .*devices, runs, show",
    "plot x --outt y": r".*--outt.*; did you mean --out\?",
}


def test_errors_are_one_line(capsys):
    for line, words in ERRORS.items():
        assert re.match(f"error: {words}", shell.fails(capsys, command, *line.split(" ")))


@pytest.mark.slow
def test_command_is_a_module_and_exits_with_a_status(tmp_path):
    done = shell.python("-m", "jaxnn", "show", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path} holds no run") and done.stderr.count("\n") == 1


# With a task, a training step or an environment of their own, or two experiments.
LONGER = {"cartpole_ppo.py": 170, "digits_gan.py": 110, "digits_dp_sgd.py": 80, "digits_sam.py": 60}
LONGER |= {"digits_diffusion.py": 100, "fashion_vae.py": 95, "cats_vs_dogs_finetune.py": 105}


def test_experiments_state_their_claim_and_command_in_forty_lines():
    for path in sorted({*(shell.ROOT / "experiments").glob("*.py")} - {shell.ROOT / "experiments/convert_cifar.py"}):
        text = path.read_text()
        claim = ast.get_docstring(ast.parse(text)) or ""
        assert re.search(r"^Claim +\S", claim, re.MULTILINE), f"the docstring of {path} lacks a line 'Claim …'"
        assert re.search(rf"^Command .*(python|jaxnn bench) experiments/{path.name}", claim, re.MULTILINE), path
        assert len(text.splitlines()) <= LONGER.get(path.name, 40), path


def test_plan_takes_the_experiment_of_a_script(tmp_path, capsys):
    script = tmp_path / "planned.py"
    script.write_text("from tests import tiny\nexperiment = tiny.experiment()\nother = 3\n")
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
    script.write_text("from tests import tiny\nexperiment = tiny.experiment()\n")
    path = Path(output(capsys, "export", finished, tmp_path / "m.stablehlo", "--script", script, "--best").strip())
    inputs, run = tiny.points(4)[0], jn.open_run(finished, tiny.experiment())
    found = jax.export.deserialize(bytearray(path.read_bytes())).call(inputs)
    np.testing.assert_allclose(found, run.predict(inputs, state=run.best_state()), rtol=1e-6)
    assert "is not a file: give the script" in shell.fails(capsys, command, "export", finished, "--script", "no.py")
