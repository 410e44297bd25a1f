"""Damage to a record is named and never used silently; a disk that refuses writes ends a run and spoils nothing."""

import contextlib
import errno
import functools
import hashlib
import json
import operator
import os
import re
import resource
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn._disk import write_json
from jaxnn.cli import command as main
from jaxnn.record import Checkpoints, Record, RecordReader
from jaxnn.types import RecordError, TrainState
from tests import swept, tiny
from tests.record.files import contents


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped halfway: metrics of steps 5, 10, 15 and 20, checkpoints of 10 and 20."""
    path = tmp_path_factory.mktemp("undamaged") / "run"
    tiny.break_off(tiny.experiment(num_steps=40), path, 20, checkpoint_every=10)
    return path


@pytest.fixture
def halved(undamaged: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(undamaged, tmp_path / "run"))


def resume(path: Path, **options: Any) -> jn.Run:
    return tiny.fit(tiny.experiment(num_steps=40), resume=path, **options)


def change(path: Path, name: str = "record.json", **changes: Any) -> None:
    (path / name).write_text(json.dumps(tiny.read(path, name) | changes))


Lines = list[bytes]
# Damages of metrics.jsonl, and which of the steps 5, 10, 15 and 20 precede them.
DAMAGES: dict[str, tuple[Callable[[Lines], Lines], list[int], str]] = {
    "lost": (lambda lines: lines[:1] + lines[2:], [5, 15, 20], "1 of 4 lines are lost"),
    "twice": (lambda lines: [*lines[:2], *lines[1:]], [5, 10], "2 of 4 lines are lost"),
    "digit": (lambda lines: [lines[0].replace(b'loss": ', b'loss": 1'), *lines[1:]], [5, 10, 15, 20], "lines differ"),
    "no JSON": (lambda lines: [*lines[:2], lines[2][:-9] + b"\xff\n", lines[3]], [5, 10], "2 of 4 lines are lost"),
    "no report": (lambda lines: [lines[0], b"[1]\n", *lines[2:]], [5], "3 of 4 lines are lost"),
}


@pytest.mark.parametrize(("damage", "left", "words"), DAMAGES.values(), ids=DAMAGES)
def test_metrics_are_cut_where_their_damage_begins(undamaged, tmp_path, damage, left, words):
    whole, file = (undamaged / "metrics.jsonl").read_bytes(), tmp_path / "metrics.jsonl"
    file.write_bytes(found := b"".join(damage(whole.splitlines(keepends=True))))
    noted = {"lines": 4, "sha256": hashlib.sha256(whole).hexdigest()}
    kept, digest, message = Record(tmp_path, None).rewind(lambda line: 20, noted, "step 20", (0,))
    assert [line["step"] for line in kept] == [line["step"] for line in tiny.lines(tmp_path)] == left
    assert (digest.lines, digest.sha256) == (len(left), hashlib.sha256(file.read_bytes()).hexdigest())
    assert message is not None and f"{file} is damaged up to step 20" in message and words in message
    (aside,) = tmp_path.glob("metrics.damaged*")
    assert message.endswith(str(aside)) and aside.read_bytes() == found, "what could be repaired by hand was lost"


def test_training_resumes_with_damaged_metrics(halved, capsys):
    lines = (halved / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    after = b'{"step": 25, "member": 0, "train_loss": 7.0}\n{"st'  # the checkpoint: no damage
    (halved / "metrics.jsonl").write_bytes(b"".join([lines[0], *lines[2:], after]))
    run = resume(halved, progress="plain")
    assert run.metrics["step"].tolist() == [line["step"] for line in tiny.lines(halved)] == [5, 15, 20, 25, 30, 35, 40]
    assert run.metrics["train_loss"][3] < 7
    (message,) = tiny.read(halved)["resumed"][0]["damaged"]
    assert "metrics.jsonl" in message and "step 20" in message
    assert message in " ".join(capsys.readouterr().out.split())


def test_lines_without_their_member_are_damage(tmp_path):
    (path := tmp_path / "{sweep}").mkdir()
    lines = '{"step": 5, "member": 0}', '{"step": 5, "mdmber": 1}', '{"step": 5, "member": 7}'
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    noted = {"lines": 2, "sha256": ""}
    kept, digest, message = Record(path, None).rewind(lambda x: [5, 5][x["member"]], noted, "group 1", (0, 1))
    assert kept == [{"step": 5, "member": 0}] and digest.lines == 1
    assert message is not None and "1 of 2 lines are lost" in message
    assert message.endswith(f"the original file is {path}/metrics.damaged-1.jsonl")
    assert [line["member"] for line in tiny.lines(path)] == [7, 0], "lines of other groups stay"


def test_checkpoint_under_the_name_of_another_step_is_named_and_not_used(halved):
    folder = halved / "checkpoints"
    shutil.copytree(folder / "20", folder / "30")
    (folder / "40").symlink_to(folder / "20")
    for name in ("30", "40"):
        with pytest.raises(RecordError, match="state of step 20"):
            jn.load_checkpoint(folder / name)
    resume(halved)
    (resumed,) = tiny.read(halved)["resumed"]
    assert resumed["step"] == 20 and ["state of step 20" in message for message in resumed["damaged"]] == [True] * 2


def test_run_without_checkpoints_is_refused_if_it_saved_some_and_starts_again_if_it_was_killed_before(halved, capsys):
    shutil.rmtree(halved / "checkpoints")
    before = contents(halved)
    with pytest.raises(RecordError, match="metrics up to step 20 but no checkpoint"):
        resume(halved)
    assert contents(halved) == before
    (group,) = tiny.read(halved)["groups"]
    change(halved, status="running", summary=None, groups=[group | {"checkpoints": []}])
    reported = (halved / "metrics.jsonl").read_bytes()
    resume(halved, progress="plain")
    assert "no checkpoint" in capsys.readouterr().out
    (aside,) = halved.glob("metrics.damaged*")
    assert aside.read_bytes() == reported
    assert [line["step"] for line in tiny.lines(halved)] == [*range(5, 41, 5)]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """The record of a sweep, to be damaged."""
    swept.sweep(tmp_path / "sweep", {(0,): 0.5, (1,): 0.6}, "seed")
    return tmp_path / "sweep"


WRONG = ({"x": [1]}, -1, "x", 10**400, True)


def fields(value: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    """The place of each field and item of a record's file."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield *place, key
        yield from fields(part, *place, key)


def test_fields_that_are_missing_or_of_another_kind_are_one_line_and_end_no_list(halved, sweep, tmp_path, capsys):
    for file in (halved / "record.json", sweep / "record.json", sweep / "members.jsonl", halved / "metrics.jsonl"):
        text = file.read_text()
        first, *others = text.splitlines() if file.suffix == ".jsonl" else [text]
        for number, (*way, last) in enumerate(fields(json.loads(first))):
            holder = functools.reduce(operator.getitem, way, changed := json.loads(first))
            del holder[last]
            if number % 6 and isinstance(holder, dict):
                holder[last] = WRONG[number % 6 - 1]
            file.write_text("\n".join([json.dumps(changed), *others]) + "\n")
            with contextlib.suppress(SystemExit):
                main(["show", str(file.parent)])
            main(["runs", str(tmp_path)])
            said = capsys.readouterr()
            assert {"run", "sweep"} <= {Path(row.split()[0]).name for row in said.out.splitlines()[-2:]}, last
            assert said.err == "" or re.fullmatch(rf"error: .*({last}|\[\d+\]|damaged).*\n", said.err), last
        file.write_text(text)


def test_damaged_options_are_named_by_resume(halved):
    facts = tiny.read(halved)

    def grouped(**changes: Any) -> dict[str, Any]:
        return {"groups": [facts["groups"][0] | changes]}

    options = {name: value for name, value in facts["options"].items() if name != "keep_last"}
    damages = [("steps_per_call", grouped(steps_per_call=value)) for value in (2.5, True, "8", -1, 2**40)]
    damages += [(name, {"options": facts["options"] | {name: -1}}) for name in ("stop", "patience", "devices", "mesh")]
    for words, changes in (*damages, ("layout.strategy", grouped(layout={})), ("keep_last", {"options": options})):
        (halved / "record.json").write_text(json.dumps(facts | changes))
        with pytest.raises(RecordError, match=words):
            resume(halved)


def test_links_out_of_a_record_and_pipes_in_it_are_refused(halved, tmp_path):
    (outside := tmp_path / "mine").touch()
    for name in (".lock", "metrics.jsonl"):
        for put in (lambda file: file.symlink_to(outside), os.mkfifo):
            (file := Path(shutil.copytree(halved, tmp_path / "copy")) / name).unlink()
            put(file)
            with pytest.raises(RecordError, match=f"{name} cannot be"):
                resume(file.parent)
            shutil.rmtree(file.parent)
    (halved / "curves.png").symlink_to(outside)
    main(["plot", str(halved)])
    assert outside.read_text() == "" and (halved / "curves.png").read_bytes()


def test_control_characters_of_a_record_are_escaped(halved, sweep, tmp_path, capsys):
    facts = tiny.read(halved)
    evil = "\x1b]0;mine\x07\x1b[2J\u202e"
    for holder, key in ((facts, "name"), (facts["config"], evil), (facts["devices"]["devices"][0], "kind")):
        holder[key] = evil
    (halved / "record.json").write_text(json.dumps(facts | {"status": evil}))
    lines = tiny.lines(halved)
    (halved / "metrics.jsonl").write_text("".join(json.dumps(line | {f"test_{evil}": 1}) + "\n" for line in lines))
    change(sweep, "record.json", status=evil)
    for words in (["show", halved], ["show", sweep], ["runs", tmp_path], ["compare", halved, sweep], ["show", evil]):
        with contextlib.suppress(SystemExit):
            main(list(map(str, words)))
        printed = "".join(capsys.readouterr())
        assert printed and not set(printed) & {"\x1b", "\x07", "\u202e"}, words
    moved = halved.rename(halved.with_name(evil))
    main(["plot", str(moved)])
    printed = f"{capsys.readouterr().out}{RecordError(evil)}{jn.open_run(moved)}"
    assert "curves.png" in printed and not set(printed) & {"\x1b", "\x07", "\u202e"}


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """No file may be longer: the system writes what fits and refuses the rest, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing(number: int) -> Any:
    """A function that the system refuses."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_files_that_do_not_fit_leave_the_old_ones(tmp_path, monkeypatch):
    with Record.open(tmp_path) as record:
        record.report({"step": 1, "member": 0})
        record.write("record.json", {"status": "running"})
        with limited(20), pytest.raises(RecordError, match=r"metrics\.jsonl cannot be written \(File too large\)"):
            record.report({"step": 2}, {"step": 3})
        with limited(20), pytest.raises(RecordError, match=r"record\.json cannot be written .* is intact\.$"):
            record.write("record.json", {"status": "finished", "more": list(range(9))})
        for number, words in ((errno.ENOSPC, "No space left.*free disk space"), (errno.EIO, "check that the folder")):
            with monkeypatch.context() as patched, pytest.raises(RecordError, match=words):
                patched.setattr(os, "fsync", failing(number))
                record.write("record.json", {"status": "finished"})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "member": 0}\n'
        record.report({"step": 2, "member": 0})
        with (tmp_path / "record.json").open() as reader:
            record.write("record.json", {"status": "finished"})
            assert json.load(reader) == {"status": "running"}, "a reader sees the old file or the new one"
    assert [line["step"] for line in RecordReader(tmp_path).lines()] == [1, 2]
    assert json.loads((tmp_path / "record.json").read_text()) == {"status": "finished"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "metrics.jsonl", "record.json"]


def state_of(num_bytes: int) -> TrainState:
    return TrainState(np.int32(0), {"w": np.zeros(num_bytes // 4, np.float32)}, {}, {}, np.uint32(7))


def test_paths_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RecordError, match=r"could not be written to .*run/checkpoints \(Not a directory\)"):
        Checkpoints(tmp_path / "run" / "checkpoints").save(1, state_of(8), {})
    (tmp_path / ".lock").mkdir()
    with pytest.raises(RecordError, match=r"\.lock cannot be written \(Is a directory\)"), Record.open(tmp_path):
        pass
    with pytest.raises(TypeError):
        write_json(tmp_path / "run", {"bad": object()})
    assert (tmp_path / "run").read_text() == ""


def test_states_that_cannot_fit_are_refused_before_they_are_written(tmp_path, monkeypatch):
    def leave(num_bytes: int, blocks: int = 9) -> None:
        disk = types.SimpleNamespace(f_bavail=num_bytes, f_frsize=1, f_blocks=blocks)
        monkeypatch.setattr(os, "statvfs", lambda path: disk)

    checkpoints = Checkpoints(tmp_path / "run")
    leave(1 << 20)
    words = (
        r"step 1 could not be written to .*run \(No space left on device: it takes 1\.1 MiB, 1\.0 MiB are free\): free"
    )
    with pytest.raises(RecordError, match=f"{words} disk space or choose another --run-dir; older checkpoints are int"):
        checkpoints.save(1, state_of(1 << 20), {})
    assert list((tmp_path / "run").iterdir()) == []
    checkpoints.save(2, state_of(1 << 19), {})
    # Zeros take little room: the next checkpoint is expected to take what the last one took.
    leave(1 << 18)
    checkpoints.save(3, state_of(1 << 19), {})
    assert checkpoints.steps() == [2, 3]
    leave(1 << 12)
    with pytest.raises(RecordError, match=r"it takes [\d.]+ KiB, 4\.0 KiB are free"):
        checkpoints.save(4, state_of(1 << 19), {})
    leave(0, blocks=0)  # a file system that does not report its size
    checkpoints.save(4, state_of(1 << 19), {})
    checkpoints.close()


def refuse(*_: Any, **__: Any) -> None:
    raise RecordError("mine: the disk refused.")


def iterate(path: Path) -> Any:
    return iter(jn.iterate(tiny.experiment(), run_dir=path, **tiny.HOW))


def test_unwritable_last_checkpoint_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "close", refuse)
    reports = iterate(tmp_path / "left")
    next(reports)
    ends = {"run": lambda: tiny.fit(tiny.experiment(), tmp_path / "run"), "left": reports.close}
    for path, end in ((tmp_path / name, end) for name, end in ends.items()):
        with pytest.raises(RecordError, match="mine"):
            end()
        facts = tiny.read(path)
        assert facts["status"] == facts["summary"]["status"] == "failed" and not RecordReader(path).is_locked
        assert (path / "compiles.json").is_file()


def test_first_error_is_raised_and_not_a_later_one_of_the_disk(tmp_path, monkeypatch):
    def fail(record: Record, *lines: Any) -> None:
        monkeypatch.setattr(Record, "write", refuse)
        raise ZeroDivisionError("of the user's code")

    reports = iterate(tmp_path / "full")
    assert next(reports).step == 5
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing(errno.ENOSPC))
        (tmp_path / "full" / "metrics.jsonl").rename(tmp_path / "kept.jsonl")
        (tmp_path / "full" / "metrics.jsonl").mkdir()
        with pytest.raises(RecordError, match=r"metrics\.jsonl cannot be written \(Is a directory\)"):
            next(reports)
    path, how = tmp_path / "sweep", tiny.MEMBERS
    for train in (
        lambda: tiny.fit(tiny.experiment(), tmp_path / "run"),
        lambda: jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), run_dir=path, **how),
    ):
        monkeypatch.setattr(Record, "report", fail)
        with pytest.raises(ZeroDivisionError, match="of the user's code"):
            train()
        monkeypatch.undo()
    assert not RecordReader(tmp_path / "run").is_locked and not RecordReader(path).is_locked
    assert jn.sweep(tiny.experiment(), resume=path, progress="none", devices=1).status == "finished"
