"""The run directory: complete files, one writer at a time, records that are read again, and the origin of a run."""

import dataclasses
import fcntl
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn._disk import write_json
from jaxnn._fingerprints import data_fingerprint
from jaxnn._json import config_from_json, config_json, jsonable
from jaxnn._provenance import git_state
from jaxnn.record import Record, RecordReader
from jaxnn.types import ConfigError, RecordError
from tests import tiny
from tests.record.files import contents


def test_json_has_nan_and_infinities_by_name(tmp_path):
    with Record.open(tmp_path) as opened:
        opened.report({"member": 0, "step": 1, "train_loss": math.nan, "test_loss": -math.inf, "rate": np.float32(0.5)})
    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    # parse_constant is called for NaN and infinities, which are not JSON.
    found = json.loads(text, parse_constant=pytest.fail)
    assert found == {"member": 0, "step": 1, "train_loss": "nan", "test_loss": "-inf", "rate": 0.5}
    (line,) = RecordReader(tmp_path).lines()
    assert math.isnan(line["train_loss"]) and line["test_loss"] == -math.inf
    plain = jsonable({"a": (1, np.int64(2), np.bool_(True), None, True, Path("x/y")), 3: [np.float32(0.5)]})
    assert json.dumps(plain) == '{"a": [1, 2, true, null, true, "x/y"], "3": [0.5]}'


def test_torn_last_line_is_dropped_and_damaged_ones_are_named(tmp_path):
    assert RecordReader(tmp_path).lines() == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "member": 0}\n{"step": 2, "member": 0}\n{"step": 3, "train_l')
    assert [line["step"] for line in RecordReader(tmp_path).lines()] == [1, 2]
    for text, words in (
        ('{"step": 1, "member": 0}\n{"st\n{"step": 3}\n', "line 2 .Unterminated string"),
        ("\xff\n", "line 1 .*can't decode"),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
        with pytest.raises(RecordError, match=rf"metrics\.jsonl is damaged in .*{words}.*: delete that line"):
            RecordReader(tmp_path).lines()


BUSY = r"another process is writing the run directory .*: wait for it, or choose another --run-dir\."


def test_second_writer_is_refused_and_changes_nothing(tmp_path):
    path, points, short = tmp_path / "run", jn.grid(seed=[0, 1]), tiny.experiment(num_steps=5)
    tiny.fit(short, path)
    jn.sweep(short, points, run_dir=tmp_path / "sweep", **tiny.MEMBERS)
    before = contents(tmp_path)
    with Record.open(path), Record.open(tmp_path / "sweep"):
        for call in (
            lambda: Record.open(path).__enter__(),
            lambda: tiny.fit(short, path),
            lambda: tiny.fit(short, resume=path),
            lambda: jn.sweep(short, points, run_dir=path, **tiny.HOW),
            lambda: jn.sweep(short, points, run_dir=tmp_path / "sweep", **tiny.HOW),
            lambda: jn.sweep(short, points, resume=tmp_path / "sweep", progress="none"),
        ):
            with pytest.raises(RecordError, match=BUSY):
                call()
    assert contents(tmp_path) == before
    with pytest.raises(ZeroDivisionError), Record.open(path):
        assert RecordReader(path).is_locked
        raise ZeroDivisionError
    assert not RecordReader(path).is_locked, "the lock was not released after an error"


def test_directory_taken_just_before_the_lock_is_not_overwritten(tmp_path, monkeypatch):
    lock, taken = fcntl.flock, {"name": "of another process"}

    def late(file: Any, kind: int) -> None:
        if kind & fcntl.LOCK_EX and not (tmp_path / "run" / "record.json").exists():
            write_json(tmp_path / "run" / "record.json", taken)
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(RecordError, match="is not empty"):
        tiny.fit(tiny.experiment(), tmp_path / "run")
    assert tiny.read(tmp_path / "run") == taken


def test_occupied_directory_is_refused_and_an_empty_one_taken(tmp_path):
    assert Record.create(tmp_path) == tmp_path
    assert Record.create(tmp_path / "a" / "b").is_dir()
    paths = {Record.unused_path("tiny", tmp_path) for _ in range(3)}
    assert len(paths) == 3 and all(path.parent == tmp_path / "tiny" for path in paths)
    # A process that was killed at its start leaves these.
    (path := tmp_path / "killed").mkdir()
    for name in (".lock", "metrics.jsonl", ".record.json.7"):
        (path / name).write_text("")
    assert Record.create(path) == path
    (path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    for taken, words in (
        (path, f"{path} is not empty"),
        (tmp_path, f"{tmp_path} is not empty.*--resume {tmp_path}"),
        (tmp_path / "notes.txt", r"notes\.txt is a file"),
        (tmp_path / "notes.txt" / "run", "cannot be written .*Not a directory"),
    ):
        with pytest.raises(RecordError, match=words):
            Record.create(taken)


def test_run_ends_if_its_directory_disappears(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(RecordError, match="removed or renamed"):
        for report in jn.iterate(tiny.experiment(), run_dir=path, checkpoint_every=0, **tiny.HOW):
            if report.step == 10:
                shutil.rmtree(path)
    assert not path.exists(), "half a record was left"
    with pytest.raises(RecordError, match=r"its \.lock deleted"), Record.open(tmp_path) as opened:
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").touch()
        opened.report({"step": 1})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_impossible_names_of_directories_are_named(tmp_path):
    for name in ("x" * 256, "x/" * 3000, "\udcff", "\ud800", "nul\0"):
        for option in ("run_dir", "resume"):
            with pytest.raises(RecordError, match="cannot be a run directory") as caught:
                jn.fit(tiny.experiment(), **{option: tmp_path / name})
            assert len(str(caught.value)) < 300 and str(caught.value).isprintable()


def test_damaged_and_missing_records_are_named_in_one_line(tmp_path):
    for text in (None, "", '{"status": "fini', "[]", "{}", '{"status": "finished"}', "\xff\xfe", "[" * 100_000):
        if text is not None:
            (tmp_path / "record.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(RecordError, match="holds no record" if text is None else r"d\.json cannot .*damaged\.$"):
            RecordReader(tmp_path).run_facts()


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 3
    names: tuple[str, ...] = ("a",)


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 8
    rate: float = 0.1
    clip: float | None = None
    shape: tuple[tuple[int, int], ...] = ((1, 2),)
    inner: Inner = Inner()
    optional: Inner | None = None
    word: str = "inf"


def test_config_survives_its_record(tmp_path):
    for config in (
        Config(),
        Config(batch_size=1, rate=1e-30, shape=((3, 4), (5, 6)), inner=Inner(7, ())),
        Config(rate=math.inf, clip=-math.inf),
        Config(batch_size=np.int64(4), rate=np.float64(0.25)),  # type: ignore[arg-type]
    ):
        write_json(tmp_path / "config.json", config_json(config))
        read = json.loads((tmp_path / "config.json").read_text())
        assert config_from_json(read, Config()) == config
    # A dataclass that is None by default has the shape of the experiment's.
    config = Config(optional=Inner(4))
    assert config_from_json(config_json(config), Config(optional=Inner())) == config


def test_fields_that_do_not_fit_are_named():
    for call, words in (
        (lambda: config_json(Config(word=np.tanh)), "'word' holds <ufunc 'tanh'>.*build the object"),
        (lambda: config_from_json({"momentum": 0.9}, Config()), "'momentum', which this experiment lacks"),
        (lambda: config_from_json({"optional": {"width": 4}}, Config()), "a dataclass in 'optional'.* None"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_is_none_then_clean_then_dirty(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None, "a repository without a commit"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": head, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None, "without git"


def test_fingerprint_of_data_changes_with_one_pixel_label_or_split():
    images, labels = np.zeros((6, 4, 4, 1), np.uint8), np.arange(6) % 2
    changed, relabelled = images.copy(), labels.copy()
    changed[5, 3, 3, 0], relabelled[2] = 1, 1
    flat = images.reshape(6, 16)

    def digest(*splits: tuple[np.ndarray, np.ndarray]) -> str:
        return data_fingerprint(jn.data.arrays(*splits))

    same = digest((images, labels), (images, labels))
    assert digest((images.copy(), labels.copy()), (images, labels)) == same
    others = {
        digest((changed, labels), (images, labels)),
        digest((images, labels), (changed, labels)),
        digest((images, relabelled), (images, labels)),
        digest((images, labels)),
        digest((flat, labels), (flat, labels)),
    }
    assert len(others | {same}) == 6
