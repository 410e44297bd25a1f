"""Metrics, checkpoints and facts of a record that are not as they were written: named, never used in silence."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxnn as jn
from jaxnn.cli import command as main
from jaxnn.record import rewind_metrics
from tests import shell, swept, tiny

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
# What befalls metrics.jsonl, and which of the steps 5, 10, 15 and 20 are before the damage.
DAMAGES: dict[str, tuple[Callable[[Lines], Lines], list[int]]] = {
    "a line is lost": (lambda lines: lines[:1] + lines[2:], [5, 15, 20]),
    "a line is there twice": (lambda lines: [*lines[:2], *lines[1:]], [5, 10]),
    "a digit is another": (lambda lines: [lines[0].replace(b'loss": ', b'loss": 1'), *lines[1:]], [5, 10, 15, 20]),
    "a line is no JSON": (lambda lines: [*lines[:2], lines[2][:-9] + b"\xff\n", lines[3]], [5, 10]),
    "a line is no report": (lambda lines: [lines[0], b"[1]\n", *lines[2:]], [5]),
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
        jn.load_checkpoint(folder / "30")
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


def test_lines_that_lost_their_member_are_damage(tmp_path: Path) -> None:
    (path := tmp_path / "{sweep}").mkdir()
    (path / "metrics.jsonl").write_text('{"step": 5, "member": 0}\n{"step": 5, "mdmber": 1}\n')
    kept, digest, message = rewind_metrics(
        path, lambda line: [5, 5][line["member"]], {"lines": 2, "sha256": ""}, "group 1", (0, 1)
    )
    assert kept == [{"step": 5, "member": 0}] and digest.lines == 1
    assert message is not None and "1 of 2 lines are lost" in message
    assert message.endswith(f"the file as it was found is {path}/metrics.damaged-1.jsonl")


# --- run.json and sweep.json ---


@pytest.fixture(scope="module")
def swept_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [swept.member(0, {"seed": 0}, 0.5), swept.member(1, {"seed": 1}, 0.6)]
    return swept.write(tmp_path_factory.mktemp("swept") / "sweep", lines)


RUN_KEYS = "name status started config options steps_per_call fingerprint layout devices jax_flags"
SWEEP_KEYS, MEMBER_KEYS = "status config axes monitor", "member point config status step final best"
TABLES = {"run.json": RUN_KEYS, "sweep.json": SWEEP_KEYS, "members.jsonl": MEMBER_KEYS}


def test_a_needed_fact_that_is_missing_or_of_another_type_is_named(
    halved: Path, swept_once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Path(shutil.copytree(swept_once, tmp_path / "sweep"))
    for file, key in ((file, key) for file, keys in TABLES.items() for key in keys.split()):
        path = (halved if file == "run.json" else sweep) / file
        text = path.read_text()
        first, *others = [text] if file != "members.jsonl" else text.splitlines()
        for change in ({}, {key: None}, {key: -1.5}):
            facts = {name: value for name, value in json.loads(first).items() if name != key} | change
            path.write_text("\n".join([json.dumps(facts), *others]) + "\n")
            for command in (["show", path.parent], ["compare", path.parent, path.parent]):
                assert key in shell.fails(capsys, main, *command)
            main(["runs", str(tmp_path)])
            capsys.readouterr()
        path.write_text(text)


@pytest.mark.parametrize(
    "change", [{"devices": {}}, {"devices": {"devices": [1]}}, {"summary": "x"}, {"summary": {"throughput": [1]}}]
)
def test_parts_of_facts_that_have_another_form_are_named(
    halved: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (halved / "run.json").write_text(json.dumps(tiny.read(halved) | change))
    if "devices" in change:
        assert "the record is damaged" in shell.fails(capsys, main, "show", halved)
    else:
        main(["runs", str(halved)])
        assert "the record is damaged" in capsys.readouterr().out


def test_curves_are_drawn_from_what_is_left_of_a_record(halved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (halved / "run.json").write_text(json.dumps({k: v for k, v in tiny.read(halved).items() if k != "data"}))
    for content in ((halved / "metrics.jsonl").read_bytes().replace(b"steps_per_second", b"steps-per-second", 1), b""):
        (halved / "metrics.jsonl").write_bytes(content)
        main(["plot", str(halved)])
        (halved / "curves.png").unlink()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000], ids=range(5))
def test_facts_that_are_no_mapping_are_named(halved: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (halved / "run.json").write_bytes(content)
    assert "run.json cannot be read" in shell.fails(capsys, main, "show", halved)


@pytest.mark.parametrize("steps", [2.5, True, "8"])
def test_steps_per_call_that_cannot_be_are_not_resumed_with(halved: Path, steps: Any) -> None:
    facts = tiny.read(halved) | {"steps_per_call": steps}
    (halved / "run.json").write_text(json.dumps(facts))
    with pytest.raises(jn.RecordError, match="steps_per_call"):
        resume(halved)


def test_a_recorded_option_that_is_missing_is_named(halved: Path) -> None:
    facts = tiny.read(halved)
    del facts["options"]["keep_last"]
    (halved / "run.json").write_text(json.dumps(facts))
    with pytest.raises(jn.RecordError, match="keep_last"):
        resume(halved)


def test_control_characters_of_a_record_are_escaped(
    halved: Path, swept_once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = tiny.read(halved)
    evil = "\x1b]0;mine\x07\x1b[2J\u202e"
    for holder, key in ((facts, "name"), (facts["config"], evil), (facts["devices"]["devices"][0], "kind")):
        holder[key] = evil
    (halved / "run.json").write_text(json.dumps(facts | {"status": evil}))
    lines = tiny.lines(halved)
    (halved / "metrics.jsonl").write_text("".join(json.dumps(line | {f"test_{evil}": 1}) + "\n" for line in lines))
    sweep = Path(shutil.copytree(swept_once, tmp_path / "sweep"))
    (sweep / "sweep.json").write_text(json.dumps(tiny.read(sweep, "sweep.json") | {"status": evil}))
    for words in (["show", halved], ["show", sweep], ["runs", tmp_path], ["compare", halved, sweep], ["show", evil]):
        with contextlib.suppress(SystemExit):
            main(list(map(str, words)))
        said = "".join(capsys.readouterr())
        assert said and not set(said) & {"\x1b", "\x07", "\u202e"}, words


# --- the directory itself ---


GONE: dict[str, Callable[[Path], Any]] = {
    "renamed": lambda run: run.rename(run.with_name("new")),
    "removed": shutil.rmtree,
}


@pytest.mark.parametrize("gone", GONE.values(), ids=GONE)
def test_a_run_directory_that_goes_under_its_run_ends_it(tmp_path: Path, gone: Callable[[Path], Any]) -> None:
    path = tmp_path / "run"
    with pytest.raises(jn.RecordError, match="removed or renamed"):
        for report in jn.iterate(tiny.experiment(), run_dir=path, checkpoint_every=0, **tiny.HOW):
            if report.step == 10:
                gone(path)
    assert not path.exists(), "half a record was left"


@pytest.mark.parametrize("name", ["x" * 256, "x/" * 3000, "\udcff", "\ud800", "nul\0"], ids=range(5))
@pytest.mark.parametrize("option", ["run_dir", "resume"])
def test_a_run_directory_that_cannot_be_is_named(tmp_path: Path, name: str, option: str) -> None:
    with pytest.raises(jn.RecordError, match="cannot be a run directory") as caught:
        jn.fit(tiny.experiment(), **{option: tmp_path / name})
    assert len(str(caught.value)) < 300 and str(caught.value).isprintable()


def test_a_run_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(jn.RecordError, match="is a file"):
        jn.fit(tiny.experiment(), run_dir=tmp_path / "file")
