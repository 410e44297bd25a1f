"""The ``jaxnn`` command, and the header of every script in ``experiments``."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

import jaxnn as jn
from jaxnn.cli import command
from tests import shell, swept, tiny

EXPERIMENTS = [path for path in sorted((shell.ROOT / "experiments").glob("*.py")) if path.stem != "convert_cifar"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command") / "finished"
    tiny.fit(tiny.experiment(learning_rate=0.25), folder)
    return folder


def says(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    command(list(map(str, arguments)))
    return capsys.readouterr().out


def test_devices_are_printed_with_versions(capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, "devices")
    assert re.search(rf"^backend +{jax.default_backend()}", text, re.MULTILINE) and f"jax {jax.__version__}" in text
    assert text.count("\ndevice ") == jax.device_count() and f"jaxnn {jn.__version__}" in text


def test_runs_are_listed_with_the_damaged_ones(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    (folder / "damaged").mkdir(parents=True)
    (folder / "damaged" / "run.json").write_text('{"status": ')
    (folder / "whole").mkdir()
    for file in ("run.json", "metrics.jsonl"):
        (folder / "whole" / file).write_bytes((finished / file).read_bytes())
    (folder / "killed").mkdir()
    killed = tiny.read(finished) | {"status": "running"}
    (folder / "killed" / "run.json").write_text(json.dumps({k: v for k, v in killed.items() if k != "summary"}))
    rows = {Path(line.split()[0]).name: line for line in says(capsys, "runs", folder).splitlines()[1:]}
    assert "finished" in rows["whole"] and "20/20" in rows["whole"] and "test_loss" in rows["whole"]
    assert "interrupted" in rows["killed"] and "0/20" in rows["killed"]
    assert "unreadable" in rows["damaged"]


def test_a_run_is_shown(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, "show", finished)
    facts = tiny.read(finished)
    for words in ("finished", "learning_rate 0.25", facts["fingerprint"]["program"], "test_loss", "jax "):
        assert words in text


@pytest.fixture
def sweeps(tmp_path: Path, finished: Path) -> Path:
    """A folder with a run, and two sweeps of which the older one has a run directory of a member."""
    folder = tmp_path / "runs"
    (folder / "alone").mkdir(parents=True)
    (folder / "alone" / "run.json").write_bytes((finished / "run.json").read_bytes())
    older = swept.sweep(folder / "older", {(0.1, 0): 1.0, (0.1, 1): 3.0, (0.2, 0): None}, "learning_rate", "seed")
    assert older.dir is not None
    (older.dir / "members" / "0000").mkdir(parents=True)
    (older.dir / "members" / "0000" / "run.json").write_bytes((finished / "run.json").read_bytes())
    losses = {(0.1, 0): 0.9, (0.1, 1): 2.8}
    swept.sweep(folder / "newer", losses, "learning_rate", "seed", started="2999-01-01T00:00:00+0000")
    return folder


def test_a_sweep_is_one_row_among_the_runs(sweeps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweeps / "damaged").mkdir()
    (sweeps / "damaged" / "sweep.json").write_text("{")
    rows = says(capsys, "runs", sweeps).splitlines()[1:]
    assert [Path(row.split()[0]).name for row in rows] == ["damaged", "older", "alone", "newer"]
    assert "unreadable" in rows[0] and "sweep.json cannot be read" in rows[0]
    assert "finished, sweep of 3: 2 finished, 1 diverged" in rows[1] and "1,234" in rows[1]
    assert "best at the end train_loss 0.5, test_loss 1.0, test_accuracy 0.9" in rows[1]
    (member,) = says(capsys, "runs", sweeps / "older" / "members").splitlines()[1:]
    assert "0000" in member
    (row,) = says(capsys, "runs", sweeps / "older").splitlines()[1:]
    assert "sweep of 3" in row
    for seed in (0, 1):  # shards alone are one row
        swept.write(sweeps / "x" / "s" / "shards" / str(seed), [swept.member(seed, {"seed": seed}, 1.0)])
    (row,) = says(capsys, "runs", sweeps / "x").splitlines()[1:]
    assert row.split()[0] == str(sweeps / "x" / "s") and "sweep of 2: 2 finished" in row


def test_a_sweep_is_shown_with_its_failures(sweeps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = swept.member(1, {"seed": 1}, status="failed", error="out of memory")
    path = swept.write(sweeps / "s", [swept.member(0, {"seed": 0}, 1.0), failed])
    assert re.search(r"^failed +1 with: out of memory$", says(capsys, "show", path), re.MULTILINE)
    text = says(capsys, "show", sweeps / "older")
    assert "sweep of 3: 2 finished, 1 diverged" in text and "member 0 (learning_rate 0.1, seed 0)" in text
    # Losses 1 and 3: mean 2, deviation √2.
    assert "2.0 ± 1.4 (1.0 to 3.0)" in text
    assert "member  learning_rate" in says(
        capsys, "show", swept.sweep(sweeps / "x", {(0.1,): 1.0}, "learning_rate").dir
    )


def test_two_sweeps_are_compared(sweeps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "side A has 2 members with seed 0, which differ in learning_rate"
    assert words in shell.fails(capsys, command, "compare", sweeps / "older", sweeps / "newer")
    text = says(capsys, "compare", sweeps / "newer", sweeps / "newer", "--metric", "test_accuracy")
    assert f"A  {sweeps / 'newer'}" in text and "test_accuracy: B 0.815 against A 0.815, paired over 2 seeds." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nowhere"], "^error: nowhere holds no run"),
        (["show"], "(?i)required|missing"),
        (["show", "x" * 300], "^error: .?x+.*File name too long"),
        (["compare", "x" * 300, "y"], "^error: .?x+.*File name too long"),
        (["show", "a\x1b[2J"], r"^error: a\\x1b\[2J holds no run"),
        (["runs", "nowhere"], "^error: no runs below nowhere"),
        (["device"], "devices"),
        (["compare", "nowhere", "nowhere"], "^error: nowhere holds no run"),
        ([], "devices.*runs.*show.*compare"),
        (["plot", "x", "--outt", "y"], "--out"),
    ],
)
def test_a_mistake_with_the_command_is_named(
    arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(words, shell.fails(capsys, command, *arguments))


def test_the_command_is_a_module_and_exits_with_a_status(tmp_path: Path) -> None:
    done = shell.python("-m", "jaxnn", "show", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {tmp_path} holds no run (no run.json in it): give that of one run; `jaxnn runs` lists them.\n"
    )


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_states_its_claim_and_command_and_is_short(path: Path) -> None:
    text = path.read_text()
    claim = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"^Claim +\S", claim, re.MULTILINE), "its docstring lacks a line 'Claim …'"
    assert re.search(rf"^Command .*(python|jaxnn bench) experiments/{path.name}", claim, re.MULTILINE)
    assert len(text.splitlines()) <= 40


def test_plot_draws_runs_and_sweeps(
    finished: Path, sweeps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for record, arguments, drawn in (
        (finished, [], finished / "curves.png"),
        (sweeps / "older", ["--out", tmp_path / "own.png"], tmp_path / "own.png"),
    ):
        assert says(capsys, "plot", record, *arguments).strip() == str(drawn)
        assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "choose another --out" in shell.fails(capsys, command, "plot", finished, "--out", tmp_path / "no" / "a.png")
