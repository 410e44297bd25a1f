"""A checkpoint is complete or absent, and damage to it is found and named before it is read."""

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxnn as jn
from jaxnn.record import Checkpoints, find_damage
from jaxnn.types import RecordError, TrainState
from tests.tiny import assert_bitwise_equal

SUMS_FILE = "SHA256SUMS"


def make_state(step: int) -> TrainState:
    params = {"kernel": jnp.full((2, 3), 0.1 + step), "bias": jnp.zeros(3, jnp.bfloat16)}
    return TrainState(jnp.int32(step), params, {}, {"mean": jnp.ones(3)}, jnp.uint32(7))


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(path, keep_last=3)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), {"loss": 1.0 / step})
    checkpoints.close()
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def test_sha256sum_checks_a_checkpoint(saved: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum on this machine")
    command = ["sha256sum", "--check", "--strict", SUMS_FILE]
    done = subprocess.run(command, cwd=saved / "3", capture_output=True, text=True, check=True)
    names = [line.removesuffix(": OK") for line in done.stdout.splitlines()]
    assert names == [name for name in files_of(saved / "3") if name != SUMS_FILE]
    assert {"default/_METADATA", "checkpoint.json"} <= set(names)
    about = json.loads((saved / "3" / "checkpoint.json").read_text())
    assert about == {"step": 3, "metrics": {"loss": 1.0 / 3}, "log": None}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, "has other bytes than were saved"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has other bytes than were saved"),
    "emptied": (lambda file: file.write_bytes(b""), "has other bytes than were saved"),
    "deleted": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damage_to_any_file_is_named(saved: Path, tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    assert find_damage(saved / "3") is None
    for name in files_of(saved / "3"):
        checkpoint = Path(shutil.copytree(saved / "3", tmp_path / "3"))
        damage(checkpoint / name)
        assert find_damage(checkpoint) == f"its file {name} {words}"
        shutil.rmtree(checkpoint)


def test_additional_files_are_named(copy: Path) -> None:
    (copy / "3" / "default" / "d" / "more").write_text("")
    assert find_damage(copy / "3") == "its file default/d/more was not there when it was saved"


def test_sums_cannot_have_files_elsewhere_read(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    lines = (copy / "3" / SUMS_FILE).read_text().partition("\n")[2] + f"{'0' * 64}  ../../elsewhere\n"
    head = f"# sha256 of the lines below: {hashlib.sha256(lines.encode()).hexdigest()}\n"
    (copy / "3" / SUMS_FILE).write_text(head + lines)
    assert find_damage(copy / "3") == "its file ../../elsewhere is missing"


def test_newest_complete_one_is_restored_and_damaged_ones_are_moved(copy: Path) -> None:
    flip(copy / "3" / "default" / "_METADATA")
    (copy / "2" / "checkpoint.json").unlink()
    checkpoints = Checkpoints(copy)
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and restored.step == 1
    assert_bitwise_equal(restored.state, make_state(1))
    assert [step for step, _ in restored.damaged] == [3, 2]
    assert [checkpoints.set_aside(*damage) for damage in restored.damaged] == [
        "the checkpoint of step 3 is damaged, its file default/_METADATA has other bytes than were saved, and was "
        f"moved to {copy / 'damaged' / '3'}",
        f"the checkpoint of step 2 is damaged, its file checkpoint.json is missing, and was moved to "
        f"{copy / 'damaged' / '2'}",
    ]
    assert checkpoints.steps() == [1]
    assert "default/_METADATA" in files_of(copy / "damaged" / "3"), "what is left of it must be kept"
    # Those steps are saved again, and may be damaged again.
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    flip(copy / "3" / "default" / "_METADATA")
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and [step for step, _ in restored.damaged] == [3]
    assert checkpoints.set_aside(*restored.damaged[0]).endswith(f"{copy / 'damaged' / '3-2'}")
    checkpoints.close()


def test_if_all_are_damaged_nothing_is_moved(copy: Path) -> None:
    for step in "123":
        flip(copy / step / "default" / "_METADATA")
    before = files_of(copy)
    with pytest.raises(RecordError) as caught:
        Checkpoints(copy).restore_newest(make_state(0))
    assert "every checkpoint in" in str(caught.value) and "from a copy, or start a new run" in str(caught.value)
    assert "step 3 since its file default/_METADATA has other bytes than were saved" in str(caught.value)
    assert files_of(copy) == before


def test_damaged_and_absent_steps_are_refused(copy: Path) -> None:
    flip(copy / "2" / "default" / "manifest.ocdbt")
    with pytest.raises(RecordError, match=r"/2 is damaged, its file default/manifest\.ocdbt has other bytes"):
        jn.load_checkpoint(copy / "2", make_state(0))
    with pytest.raises(RecordError, match=r"there is no checkpoint at .*/7: check the path"):
        jn.load_checkpoint(copy / "7", make_state(0))


def test_damaged_state_is_not_loaded(tmp_path: Path) -> None:
    state = make_state(1)
    jn.save_checkpoint(tmp_path / "state", state)
    for name in files_of(tmp_path / "state"):
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        flip(tmp_path / "copy" / name)
        with pytest.raises(RecordError, match=f"copy is damaged, its file {name} has other bytes.*from a copy"):
            jn.load_checkpoint(tmp_path / "copy", state)
        shutil.rmtree(tmp_path / "copy")


def test_damaged_metrics_hide_no_other_checkpoint(copy: Path) -> None:
    (copy / "3" / "checkpoint.json").write_text('{"metrics": ')
    checkpoints = Checkpoints(copy)
    assert checkpoints.best() == 2


# --- complete or absent ---


@pytest.mark.parametrize("moment", ["sums", "name"])
def test_unfinished_checkpoint_is_absent_and_older_ones_stay(
    copy: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    rename, sync = Path.rename, os.fsync

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    def refused_name(path: Path, target: Path) -> Path:
        return refuse() if path.name == "4.unfinished" else rename(path, target)  # type: ignore[return-value]

    def refused_sync(descriptor: int) -> None:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        refuse() if place.endswith(SUMS_FILE) else sync(descriptor)

    checkpoints = Checkpoints(copy, keep_last=1, keep_best=0)
    with monkeypatch.context() as patched:
        patched.setattr(*((os, "fsync", refused_sync) if moment == "sums" else (Path, "rename", refused_name)))
        checkpoints.save(4, make_state(4), {})
        assert checkpoints.steps() == [1, 2, 3], "older ones were removed before the new one was complete"
        with pytest.raises(RecordError, match=r"step 4 could not be written to .* \(Input/output error\): .* intact"):
            checkpoints.wait()
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2", "3"], "half a checkpoint was left"
    checkpoints.save(4, make_state(4), {})
    checkpoints.close()
    assert Checkpoints(copy).steps() == [4]


def test_name_comes_after_sums_and_goes_before_files(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    rename, remove = Path.rename, shutil.rmtree

    def noted_rename(path: Path, target: Path) -> Path:
        if path.name == "4.unfinished":
            seen.append(("named", steps_in(copy), find_damage(path)))
        return rename(path, target)

    def noted_remove(path: Path, **options: bool) -> None:
        if path.name.endswith(".removed"):
            seen.append((path.name, steps_in(copy), find_damage(path)))
        remove(path, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(shutil, "rmtree", noted_remove)
    checkpoints = Checkpoints(copy, keep_last=3, keep_best=0)
    checkpoints.save(4, make_state(4), {})
    checkpoints.close()
    assert seen == [("named", [1, 2, 3], None), ("1.removed", [2, 3, 4], None)]


def test_remnants_of_a_killed_process_are_ignored_and_cleared(copy: Path) -> None:
    import orbax.checkpoint as ocp

    for name in ("4.unfinished", "5.unfinished.orbax-checkpoint-tmp", "2.removed"):
        shutil.copytree(copy / "3", copy / name)
    (copy / "2.removed" / SUMS_FILE).unlink()
    shutil.copytree(copy / "3", copy / "damaged" / "9")
    checkpoints = Checkpoints(copy, keep_last=3)
    assert checkpoints.steps() == [1, 2, 3]
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and restored.step == 3 and restored.damaged == []
    with ocp.CheckpointManager(copy) as manager:
        assert manager.all_steps() == [1, 2, 3], "plain Orbax takes a remnant for a checkpoint"
    checkpoints.save(4, make_state(4), {})
    checkpoints.close()
    assert sorted(path.name for path in copy.iterdir()) == ["2", "3", "4", "damaged"]


def test_reading_disturbs_no_save_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert_bitwise_equal(jn.load_checkpoint(tmp_path / "1", make_state(0)), make_state(1))
    resume.set()
    checkpoints.close()
    assert other.steps() == [1, 2] and find_damage(tmp_path / "2") is None


def test_step_with_a_checkpoint_keeps_it(copy: Path) -> None:
    before = (copy / "3" / SUMS_FILE).read_bytes()
    checkpoints = Checkpoints(copy, keep_last=3)
    checkpoints.save(3, make_state(30), {})
    checkpoints.close()
    assert (copy / "3" / SUMS_FILE).read_bytes() == before
