"""The ``jaxnn`` command, and what every script in ``experiments`` says of itself."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

import jaxnn as jn
from jaxnn.cli import app
from tests import shell, tiny

EXPERIMENTS = sorted((shell.ROOT / "experiments").glob("*.py"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command") / "finished"
    tiny.fit(tiny.experiment(learning_rate=0.25), folder)
    return folder


def says(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    app.main(list(map(str, arguments)))
    return capsys.readouterr().out


def test_devices_are_told_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, "devices")
    assert re.search(rf"^backend +{jax.default_backend()}", text, re.MULTILINE) and f"jax {jax.__version__}" in text
    described = json.loads(says(capsys, "devices", "--json"))
    assert described["backend"] == jax.default_backend()
    assert len(described["devices"]) == jax.device_count() and described["versions"]["jaxnn"] == jn.__version__


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
    for words in ("finished", "learning_rate 0.25", facts["fingerprint"]["program"], "test_loss", "curves.png", "jax "):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nowhere"], "^error: nowhere holds no run"),
        (["show"], "(?i)required|missing"),
        (["runs", "nowhere"], "^error: no runs below nowhere"),
        (["device"], "devices"),
        ([], "devices.*runs.*show"),
        (["devices", "--jason"], "--json"),
    ],
)
def test_a_mistake_with_the_command_is_named(
    arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(words, shell.fails(capsys, app.main, *arguments))


def test_the_command_is_a_module_and_exits_with_a_status(tmp_path: Path) -> None:
    done = shell.python("-m", "jaxnn", "show", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {tmp_path} holds no run (no run.json in it): give the directory of one run; `jaxnn runs` lists them.\n"
    )


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_states_its_claim_and_command_and_is_short(path: Path) -> None:
    text = path.read_text()
    claim = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"^Claim +\S", claim, re.MULTILINE), "its docstring lacks a line 'Claim …'"
    assert re.search(rf"^Command +python experiments/{path.name}", claim, re.MULTILINE)
    assert len(text.splitlines()) <= 40
