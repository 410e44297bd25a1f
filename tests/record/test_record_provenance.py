"""Where a run came from: its config survives the record, its code and data have fingerprints."""

import dataclasses
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn import record
from jaxnn.types import ConfigError


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


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(batch_size=1, rate=1e-30, shape=((3, 4), (5, 6)), inner=Inner(7, ())),
        Config(rate=math.inf, clip=-math.inf),
        Config(batch_size=np.int64(4), rate=np.float64(0.25)),  # type: ignore[arg-type]
    ],
)
def test_a_config_survives_its_record(config: Config, tmp_path: Path) -> None:
    record.write_json(tmp_path / "config.json", record.config_json(config))
    read = json.loads((tmp_path / "config.json").read_text())
    assert record.config_from_json(read, Config()) == config


def test_a_nested_config_is_read_by_the_example_of_a_config_that_has_one() -> None:
    config = Config(optional=Inner(4))
    assert record.config_from_json(record.config_json(config), Config(optional=Inner())) == config
    with pytest.raises(ConfigError, match="'optional'"):
        record.config_from_json(record.config_json(config), Config())


@dataclasses.dataclass(frozen=True)
class Unrecordable:
    inner: Inner = Inner()
    activation: Any = np.tanh


def test_what_a_record_cannot_keep_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config field 'activation' holds <ufunc 'tanh'>"):
        record.config_json(Unrecordable())


def test_a_field_that_the_experiment_lost_is_named() -> None:
    with pytest.raises(ConfigError, match="'momentum', which this experiment lacks"):
        record.config_from_json({"batch_size": 8, "momentum": 0.9}, Config())


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_is_none_then_clean_then_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert record.git_state(tmp_path) is None, "a repository without a commit"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert record.git_state(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "file").write_text("2")
    assert record.git_state(tmp_path) == {"commit": head, "dirty": True}


def test_without_git_there_is_no_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.git_state(tmp_path) is None


def test_the_fingerprint_of_data_sees_one_pixel_one_label_and_one_split() -> None:
    images = np.zeros((6, 4, 4, 1), np.uint8)
    labels = np.arange(6) % 2
    digest = record.data_fingerprint(jn.data.arrays((images, labels), (images, labels)))
    assert record.data_fingerprint(jn.data.arrays((images.copy(), labels.copy()), (images, labels))) == digest
    changed, relabelled = images.copy(), labels.copy()
    changed[5, 3, 3, 0], relabelled[2] = 1, 1
    others = {
        digest,
        record.data_fingerprint(jn.data.arrays((changed, labels), (images, labels))),
        record.data_fingerprint(jn.data.arrays((images, labels), (changed, labels))),
        record.data_fingerprint(jn.data.arrays((images, relabelled), (images, labels))),
        record.data_fingerprint(jn.data.arrays((images, labels))),
        record.data_fingerprint(jn.data.arrays((images.reshape(6, 16), labels), (images.reshape(6, 16), labels))),
    }
    assert len(others) == 6
