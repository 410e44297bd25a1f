"""A checkpoint is complete or absent, and damage to it is found and named before it is read."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import threading
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

import jaxnn as jn
from jaxnn.record import Checkpoints, find_damage
from jaxnn.types import RecordError
from tests import tiny
from tests.record.files import assert_equal, flip, make_state

SUMS_FILE = "SHA256SUMS"
CHANGED = "has other bytes than were saved"


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3, and a state saved by hand in the folder ``state`` beside them."""
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(path, keep_last=3)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), {"loss": 1.0 / step, "test_loss": math.nan})
    checkpoints.close()
    jn.save_checkpoint(path.parent / "state", make_state(1))
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def test_sha256sum_checks_a_checkpoint(saved):
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum on this machine")
    command = ["sha256sum", "--check", "--strict", SUMS_FILE]
    done = subprocess.run(command, cwd=saved / "3", capture_output=True, text=True, check=True)
    names = [line.removesuffix(": OK") for line in done.stdout.splitlines()]
    assert names == [name for name in files_of(saved / "3") if name != SUMS_FILE]
    assert {"default/_METADATA", "checkpoint.json"} <= set(names)
    about = json.loads((saved / "3" / "checkpoint.json").read_text())
    assert about == {"step": 3, "metrics": {"loss": 1.0 / 3}, "log": None}


def test_damage_to_any_file_is_named_and_not_loaded(saved, tmp_path):
    for whole in (saved / "3", saved.parent / "state"):
        assert find_damage(whole) is None
        for damage, words in ((flip, CHANGED), (Path.unlink, "is missing")):
            for name in files_of(whole):
                damaged = Path(shutil.copytree(whole, tmp_path / "copy"))
                damage(damaged / name)
                assert find_damage(damaged) == f"its file {name} {words}"
                if name != SUMS_FILE or words != "is missing":
                    with pytest.raises(RecordError, match=f"copy is damaged, its file {name} {words}: .*from a copy"):
                        jn.load_checkpoint(damaged)
                shutil.rmtree(damaged)


def test_sums_list_exactly_the_files_below(copy, tmp_path):
    (copy / "2" / "default" / "d" / "more").write_text("")
    assert find_damage(copy / "2") == "its file default/d/more was not there when it was saved"
    # A list that names a file elsewhere does not have it read.
    (tmp_path / "elsewhere").write_text("mine")
    lines = (copy / "3" / SUMS_FILE).read_text().partition("\n")[2] + f"{'0' * 64}  ../../elsewhere\n"
    head = f"# sha256 of the lines below: {hashlib.sha256(lines.encode()).hexdigest()}\n"
    (copy / "3" / SUMS_FILE).write_text(head + lines)
    assert find_damage(copy / "3") == "its file ../../elsewhere is missing"


def test_newest_undamaged_checkpoint_is_restored_and_damaged_ones_are_moved(copy):
    flip(copy / "3" / "default" / "_METADATA")
    (copy / "2" / "checkpoint.json").unlink()
    checkpoints = Checkpoints(copy)
    assert checkpoints.best() == 3, "damaged metrics hide other checkpoints"
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and restored.step == 1
    assert_equal(restored.state, make_state(1))
    assert restored.damaged == [
        (3, f"its file default/_METADATA {CHANGED}"),
        (2, "its file checkpoint.json is missing"),
    ]
    for (step, what), name in zip(restored.damaged, ("3", "2"), strict=True):
        message = checkpoints.set_aside(step, what)
        assert message.startswith(f"the checkpoint of step {step} is damaged, {what}")
        assert message.endswith(f"moved to {copy / 'damaged' / name}")
    assert checkpoints.steps() == [1]
    assert "default/_METADATA" in files_of(copy / "damaged" / "3"), "the rest of it was not kept"
    # Those steps are saved again, and may be damaged again.
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    flip(copy / "3" / "default" / "_METADATA")
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and [step for step, _ in restored.damaged] == [3]
    assert checkpoints.set_aside(*restored.damaged[0]).endswith(f"{copy / 'damaged' / '3-2'}")
    checkpoints.close()


def test_unreadable_metrics_are_unmeasured(copy):
    (copy / "3" / "checkpoint.json").write_text('{"metrics": ')
    (copy / "007").mkdir()  # not the name of a step
    assert Checkpoints(copy).best() == 2 and Checkpoints(copy).steps() == [1, 2, 3]


# --- complete or absent ---


@pytest.mark.parametrize("moment", ["sums", "name"])
def test_unfinished_checkpoint_is_absent_and_older_ones_stay(copy, monkeypatch, moment):
    rename, sync = Path.rename, os.fsync

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    def refused_name(path: Path, target: Path) -> None:
        (refuse if path.name == "4.unfinished" else rename)(path, target)

    def refused_sync(descriptor: int) -> None:
        (refuse if os.readlink(f"/proc/self/fd/{descriptor}").endswith(SUMS_FILE) else sync)(descriptor)

    checkpoints = Checkpoints(copy, keep_last=1, keep_best=0)
    with monkeypatch.context() as patched:
        patched.setattr(*((os, "fsync", refused_sync) if moment == "sums" else (Path, "rename", refused_name)))
        checkpoints.save(4, make_state(4), {})
        assert checkpoints.steps() == [1, 2, 3], "older ones were removed before the new one was complete"
        with pytest.raises(RecordError, match=r"step 4 could not be written to .* \(Input/output error\): .* intact"):
            checkpoints.wait()
    assert sorted(os.listdir(copy)) == ["1", "2", "3"], "half a checkpoint was left"
    checkpoints.save(4, make_state(4), {})
    checkpoints.close()
    assert Checkpoints(copy).steps() == [4]


def test_metrics_and_sums_come_before_a_name_and_a_name_goes_before_its_files(tmp_path, monkeypatch):
    folder, named, removed = tmp_path / "run" / "checkpoints", [], []
    sync, rename, remove = os.fsync, Path.rename, shutil.rmtree

    def noted_sync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            named.append("metrics")
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        if path.name.endswith(".unfinished"):
            named.append((target.name, Checkpoints(folder).steps(), find_damage(path)))
        return rename(path, target)

    def noted_remove(path: Path, **options: bool) -> None:
        if path.name.endswith(".removed"):
            removed.append((path.name, Checkpoints(folder).steps(), find_damage(path)))
        remove(path, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(shutil, "rmtree", noted_remove)
    tiny.fit(tiny.experiment(), tmp_path / "run", checkpoint_every=10, keep_last=1, keep_best=0)
    assert named == ["metrics", ("10", [], None), "metrics", ("20", [10], None)]
    assert removed == [("10.removed", [20], None)]


def test_remnants_of_a_killed_process_are_ignored_and_cleared(copy):
    for name in ("4.unfinished", "5.unfinished.orbax-checkpoint-tmp", "2.removed", "damaged/9"):
        shutil.copytree(copy / "3", copy / name)
    (copy / "2.removed" / SUMS_FILE).unlink()
    checkpoints = Checkpoints(copy, keep_last=3)
    assert checkpoints.steps() == [1, 2, 3]
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and restored.step == 3 and restored.damaged == []
    with ocp.CheckpointManager(copy) as manager:
        assert manager.all_steps() == [1, 2, 3], "plain Orbax takes a remnant for a checkpoint"
    checkpoints.save(4, make_state(4), {})
    checkpoints.save(3, make_state(30), {})  # a step with a checkpoint keeps the one it has
    checkpoints.close()
    assert sorted(os.listdir(copy)) == ["2", "3", "4", "damaged"]
    assert_equal(jn.load_checkpoint(copy / "3", make_state(0)), make_state(3))


def test_reading_does_not_disturb_a_save_under_way(tmp_path, monkeypatch):
    resume = threading.Event()
    rename = Path.rename

    def held(path: Path, target: Path) -> Path:
        assert path.name != "2.unfinished" or resume.wait(30)
        return rename(path, target)

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    monkeypatch.setattr(Path, "rename", held)
    checkpoints.save(2, make_state(2), {})
    other = Checkpoints(tmp_path)
    assert other.steps() == [1] and other.best() == 1
    assert_equal(jn.load_checkpoint(tmp_path / "1", make_state(0)), make_state(1))
    resume.set()
    checkpoints.close()
    assert other.steps() == [1, 2] and find_damage(tmp_path / "2") is None
