"""The origin of a run: its config survives the record, its code and data have fingerprints."""

from __future__ import annotations

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


@dataclasses.dataclass(frozen=True)
class Unrecordable:
    inner: Inner = Inner()
    activation: Any = np.tanh


def test_config_survives_its_record(tmp_path: Path) -> None:
    for config in (
        Config(),
        Config(batch_size=1, rate=1e-30, shape=((3, 4), (5, 6)), inner=Inner(7, ())),
        Config(rate=math.inf, clip=-math.inf),
        Config(batch_size=np.int64(4), rate=np.float64(0.25)),  # type: ignore[arg-type]
    ):
        record.write_json(tmp_path / "config.json", record.config_json(config))
        read = json.loads((tmp_path / "config.json").read_text())
        assert record.config_from_json(read, Config()) == config
    # A dataclass that is None by default has the shape of the experiment's.
    config = Config(optional=Inner(4))
    assert record.config_from_json(record.config_json(config), Config(optional=Inner())) == config


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: record.config_json(Unrecordable()),
            "config field 'activation' holds <ufunc 'tanh'>.*build the object",
        ),
        (lambda: record.config_from_json({"momentum": 0.9}, Config()), "'momentum', which this experiment lacks"),
        (lambda: record.config_from_json({"optional": {"width": 4}}, Config()), "a dataclass in 'optional'.* None"),
    ],
)
def test_fields_that_do_not_fit_are_named(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


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
    (tmp_path / "installed").mkdir()
    assert record.git_state(tmp_path / "installed", tracked=True) is None, "a folder that is not part of the tree"
    (tmp_path / "file").write_text("2")
    assert record.git_state(tmp_path, tracked=True) == {"commit": head, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.git_state(tmp_path) is None, "without git"


def test_fingerprint_of_data_changes_with_one_pixel_label_or_split() -> None:
    images, labels = np.zeros((6, 4, 4, 1), np.uint8), np.arange(6) % 2
    changed, relabelled = images.copy(), labels.copy()
    changed[5, 3, 3, 0], relabelled[2] = 1, 1
    flat = images.reshape(6, 16)

    def digest(*splits: tuple[np.ndarray, np.ndarray]) -> str:
        return record.data_fingerprint(jn.data.arrays(*splits))

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
