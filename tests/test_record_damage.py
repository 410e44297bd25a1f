"""Metrics, checkpoints and facts of a record that are not as they were written: named, never used in silence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxnn as jn
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

EVERY: dict[str, Any] = {"checkpoint_every": 10}


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was broken off in the middle: metrics of steps 5, 10, 15 and 20, checkpoints of 10 and 20."""
    path = tmp_path_factory.mktemp("undamaged") / "run"
    for report in jn.iterate(tiny.experiment(num_steps=40), run_dir=path, **EVERY, **tiny.HOW):
        if report.step == 20:
            break
    return path


@pytest.fixture
def halved(undamaged: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(undamaged, tmp_path / "run"))


def resume(path: Path) -> jn.Run:
    return tiny.fit(tiny.experiment(num_steps=40), resume=path)


Lines = list[bytes]
# What befalls metrics.jsonl, and which of the steps 5, 10, 15 and 20 can still be read of it.
DAMAGES: dict[str, tuple[Callable[[Lines], Lines], list[int]]] = {
    "a line is lost": (lambda lines: lines[:1] + lines[2:], [5, 15, 20]),
    "all is lost": (lambda lines: [], []),
    "a line is there twice": (lambda lines: [*lines[:2], *lines[1:]], [5, 10, 15, 20]),
    "lines are out of order": (lambda lines: [lines[1], lines[0], *lines[2:]], [5, 10, 15, 20]),
    "a digit is another": (lambda lines: [lines[0].replace(b'loss": ', b'loss": 1'), *lines[1:]], [5, 10, 15, 20]),
    "a line is no JSON": (lambda lines: [lines[0][:-9] + b"\xff\n", *lines[1:]], [10, 15, 20]),
    "a line is no report": (lambda lines: [b"[1]\n", b'{"step": "5"}\n', *lines[2:]], [15, 20]),
}


@pytest.mark.parametrize(("damage", "left"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_metrics_are_named_and_training_resumes(
    halved: Path, damage: Callable[[Lines], Lines], left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    file = halved / "metrics.jsonl"
    file.write_bytes(found := b"".join(damage(file.read_bytes().splitlines(keepends=True))))
    run = tiny.fit(tiny.experiment(num_steps=40), resume=halved, progress="plain")
    assert [line["step"] for line in tiny.lines(halved)] == [*left, 25, 30, 35, 40]
    assert run.metrics["step"].tolist() == [*left, 25, 30, 35, 40]
    (told,) = tiny.read(halved)["resumed"][0]["damaged"]
    assert "metrics.jsonl" in told and "step 20" in told
    assert told in " ".join(capsys.readouterr().out.split())
    (aside,) = halved.glob("metrics.damaged*")
    assert aside.read_bytes() == found, "what could still be repaired by hand was lost"


def test_metrics_with_every_line_still_there_are_repaired(halved: Path) -> None:
    file = halved / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"".join(reversed([*whole.splitlines(keepends=True)] * 2)))
    resume(halved)
    resume(halved)  # from a checkpoint that fits
    assert len(list(halved.glob("metrics.damaged*"))) == 1
    assert file.read_bytes().startswith(whole) and "repaired" in tiny.read(halved)["resumed"][0]["damaged"][0]


def test_metrics_after_the_checkpoint_are_cut_without_a_word(undamaged: Path, halved: Path) -> None:
    with (halved / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "train_loss": 7.0}\n{"st')
    resume(halved)
    assert [line["step"] for line in tiny.lines(halved)] == [*range(5, 41, 5)]
    assert tiny.lines(halved)[:4] == tiny.lines(undamaged) and tiny.lines(halved)[4]["train_loss"] < 7
    assert tiny.read(halved)["resumed"][0]["damaged"] == [] and not list(halved.glob("metrics.damaged*"))


def test_metrics_are_on_the_disk_before_their_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(f"named {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    tiny.fit(tiny.experiment(), tmp_path / "run", **EVERY)
    kept = [event for event in events if event == "metrics.jsonl" or event.startswith("named")]
    assert kept == ["metrics.jsonl", "named 10", "metrics.jsonl", "named 20"]


# --- checkpoints ---


@pytest.mark.parametrize("put", [shutil.copytree, lambda old, new: new.symlink_to(old)], ids=["copied", "linked"])
def test_a_checkpoint_under_the_name_of_another_step_is_named_and_not_used(
    halved: Path, put: Callable[[Path, Path], Any]
) -> None:
    folder = halved / "checkpoints"
    put(folder / "20", folder / "30")
    with pytest.raises(jn.RecordError, match="state of step 20"):
        jn.load(folder / "30")
    resume(halved)
    (resumed,) = tiny.read(halved)["resumed"]
    assert resumed["step"] == 20 and "state of step 20" in resumed["damaged"][0]


def test_a_run_without_the_checkpoints_that_it_saved_is_refused(halved: Path) -> None:
    shutil.rmtree(halved / "checkpoints")
    before = {file: file.read_bytes() for file in halved.iterdir()}
    with pytest.raises(jn.RecordError, match="metrics up to step 20 but no checkpoint"):
        resume(halved)
    assert {file: file.read_bytes() for file in halved.iterdir()} == before


def test_a_run_killed_before_its_first_checkpoint_starts_again_and_keeps_what_it_reported(
    halved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(halved / "checkpoints")
    facts = tiny.read(halved)
    killed = {name: facts[name] for name in facts if name not in ("summary", "checkpoints")} | {"status": "running"}
    (halved / "run.json").write_text(json.dumps(killed))
    reported = (halved / "metrics.jsonl").read_bytes()
    tiny.fit(tiny.experiment(num_steps=40), resume=halved, progress="plain")
    assert "no checkpoint" in capsys.readouterr().out
    (aside,) = halved.glob("metrics.damaged*")
    assert aside.read_bytes() == reported
    assert [line["step"] for line in tiny.lines(halved)] == [*range(5, 41, 5)]
