"""A disk that refuses writes ends a run with one clear message, about the first failure, and spoils nothing."""

import contextlib
import errno
import json
import os
import resource
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn.record import Checkpoints, Record, is_locked, open_record, read_metrics, read_run, write_json
from jaxnn.types import RecordError, TrainState
from tests import tiny


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


def test_files_that_do_not_fit_leave_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_record(tmp_path) as record:
        record.report({"step": 1})
        record.write("run.json", {"status": "running"})
        with limited(20), pytest.raises(RecordError, match=r"metrics\.jsonl cannot be written \(File too large\)"):
            record.report({"step": 2}, {"step": 3})
        with limited(20), pytest.raises(RecordError, match=r"run\.json cannot be written .* is intact\.$"):
            record.write("run.json", {"status": "finished", "more": list(range(9))})
        for number, words in ((errno.ENOSPC, "No space left.*free disk space"), (errno.EIO, "check that the folder")):
            with monkeypatch.context() as patched, pytest.raises(RecordError, match=words):
                patched.setattr(os, "fsync", failing(number))
                record.write("run.json", {"status": "finished"})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
        record.report({"step": 2})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "run.json").read_text()) == {"status": "running"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "metrics.jsonl", "run.json"]


def state_of(num_bytes: int) -> TrainState:
    return TrainState(np.int32(0), {"w": np.zeros(num_bytes // 4, np.float32)}, {}, {}, np.uint32(7))


def test_paths_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RecordError, match=r"could not be written to .*run/checkpoints \(Not a directory\)"):
        Checkpoints(tmp_path / "run" / "checkpoints").save(1, state_of(8), {})
    (tmp_path / ".lock").mkdir()
    with pytest.raises(RecordError, match=r"\.lock cannot be written \(Is a directory\)"), open_record(tmp_path):
        pass
    with pytest.raises(TypeError):
        write_json(tmp_path / "run", {"bad": object()})
    assert (tmp_path / "run").read_text() == ""


def test_states_that_cannot_fit_are_refused_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# --- the end of a run ---


def refuse(*_: Any, **__: Any) -> None:
    raise RecordError("mine: the disk refused.")


def iterate(path: Path) -> Any:
    return iter(jn.iterate(tiny.experiment(), run_dir=path, **tiny.HOW))


def test_unwritable_last_checkpoint_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "close", refuse)
    reports = iterate(tmp_path / "left")
    next(reports)
    for path, end in (
        (tmp_path / "run", lambda: tiny.fit(tiny.experiment(), tmp_path / "run")),
        (tmp_path / "left", reports.close),
    ):
        with pytest.raises(RecordError, match="mine"):
            end()
        facts = tiny.read(path)
        assert facts["status"] == facts["summary"]["status"] == "failed" and not is_locked(path)
        assert (path / "compiles.json").is_file()


def test_run_that_lost_its_summary_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Record.write

    def without_summary(record: Record, name: str, facts: Any) -> None:
        refuse() if "summary" in facts else write(record, name, facts)

    with monkeypatch.context() as patched, pytest.raises(RecordError, match="mine"):
        patched.setattr(Record, "write", without_summary)
        tiny.fit(tiny.experiment(), tmp_path / "run")
    assert read_run(tmp_path / "run")["status"] == "interrupted"
    assert tiny.fit(tiny.experiment(), resume=tmp_path / "run").summary.status == "finished"


def test_first_error_is_raised_and_not_a_later_one_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    path, how = tmp_path / "sweep", {"vmap_size": 2, "devices": 1, **tiny.HOW}
    for train in (
        lambda: tiny.fit(tiny.experiment(), tmp_path / "run"),
        lambda: jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), run_dir=path, **how),
    ):
        monkeypatch.setattr(Record, "report", fail)
        with pytest.raises(ZeroDivisionError, match="of the user's code"):
            train()
        monkeypatch.undo()
    assert not is_locked(tmp_path / "run") and not is_locked(path)
    assert jn.sweep(tiny.experiment(), resume=path, progress="none", devices=1).status == "finished"
