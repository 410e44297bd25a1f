"""A checkpoint is complete or absent, and what is not as it was saved is found and named before it is read."""

import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxnn as jn
from jaxnn.checkpoints import folder, open_checkpoints, writer
from jaxnn.checkpoints.sums import SUMS_FILE, find_damage
from jaxnn.types import RecordError, TrainState
from tests.tiny import assert_bitwise_equal


def make_state(step: int) -> TrainState:
    params = {"kernel": jnp.full((2, 3), 0.1 + step), "bias": jnp.zeros(3, jnp.bfloat16)}
    return TrainState(jnp.int32(step), params, {}, {"mean": jnp.ones(3)}, jnp.uint32(7))


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = open_checkpoints(path, keep_last=3)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), {"loss": 1.0 / step})
    checkpoints.close()
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def test_anybody_can_check_a_checkpoint_with_sha256sum(saved: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum on this machine")
    command = ["sha256sum", "--check", "--strict", SUMS_FILE]
    done = subprocess.run(command, cwd=saved / "3", capture_output=True, text=True, check=True)
    told = [line.removesuffix(": OK") for line in done.stdout.splitlines()]
    assert told == [name for name in files_of(saved / "3") if name != SUMS_FILE]
    assert {"_CHECKPOINT_METADATA", "default/_METADATA", "metrics/metrics"} <= set(told)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip, "has other bytes than were saved"),
    "cut short": (truncate, "has other bytes than were saved"),
    "emptied": (empty, "has other bytes than were saved"),
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


def test_a_file_too_many_is_named(copy: Path) -> None:
    (copy / "3" / "default" / "d" / "more").write_text("")
    assert find_damage(copy / "3") == "its file default/d/more was not there when it was saved"


def test_the_sums_cannot_have_files_elsewhere_read(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    lines = (copy / "3" / SUMS_FILE).read_text().partition("\n")[2] + f"{'0' * 64}  ../../elsewhere\n"
    head = f"# sha256 of the lines below: {hashlib.sha256(lines.encode()).hexdigest()}\n"
    (copy / "3" / SUMS_FILE).write_text(head + lines)
    assert find_damage(copy / "3") == "its file ../../elsewhere is missing"


def test_the_newest_that_is_whole_is_restored_and_the_others_are_told_and_moved(copy: Path) -> None:
    flip(copy / "3" / "default" / "_METADATA")
    (copy / "2" / "metrics" / "metrics").unlink()
    checkpoints = open_checkpoints(copy)
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and restored.step == 1
    assert_bitwise_equal(restored.state, make_state(1))
    assert [damage.step for damage in restored.damaged] == [3, 2]
    told = [checkpoints.set_aside(damage) for damage in restored.damaged]
    assert told == [
        "the checkpoint of step 3 is damaged, its file default/_METADATA has other bytes than were saved, and was "
        f"moved to {copy / 'damaged' / '3'}",
        f"the checkpoint of step 2 is damaged, its file metrics/metrics is missing, and was moved to "
        f"{copy / 'damaged' / '2'}",
    ]
    assert checkpoints.steps() == [1]
    assert "default/_METADATA" in files_of(copy / "damaged" / "3"), "what is left of it must be kept"
    # Those steps are saved anew, and may be damaged anew.
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    flip(copy / "3" / "default" / "_METADATA")
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and [damage.step for damage in restored.damaged] == [3]
    assert checkpoints.set_aside(restored.damaged[0]).endswith(f"{copy / 'damaged' / '3-2'}")
    checkpoints.close()


def test_without_a_whole_checkpoint_nothing_is_moved_and_the_damage_is_named(copy: Path) -> None:
    for step in "123":
        flip(copy / step / "default" / "_METADATA")
    before = files_of(copy)
    with pytest.raises(RecordError) as caught:
        open_checkpoints(copy).restore_newest(make_state(0))
    assert "every checkpoint in" in str(caught.value) and "from a copy, or start a new run" in str(caught.value)
    assert "step 3 since its file default/_METADATA has other bytes than were saved" in str(caught.value)
    assert files_of(copy) == before


def test_a_damaged_one_that_is_asked_for_by_its_step_is_refused(copy: Path) -> None:
    flip(copy / "2" / "default" / "manifest.ocdbt")
    with pytest.raises(RecordError, match=r"step 2 in .* is damaged, its file default/manifest\.ocdbt has other bytes"):
        open_checkpoints(copy).restore(2, make_state(0))
    with pytest.raises(RecordError, match=r"no checkpoint of step 7 in .*: there are those of \[1, 2, 3\]"):
        open_checkpoints(copy).restore(7, make_state(0))


def test_a_damaged_state_is_not_loaded(tmp_path: Path) -> None:
    state = make_state(1)
    jn.save(tmp_path / "state", state)
    for name in files_of(tmp_path / "state"):
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        flip(tmp_path / "copy" / name)
        with pytest.raises(RecordError, match=f"copy is damaged, its file {name} has other bytes.*from a copy"):
            jn.load(tmp_path / "copy", state)
        shutil.rmtree(tmp_path / "copy")


def test_damaged_metrics_do_not_keep_the_others_from_being_found(copy: Path) -> None:
    (copy / "3" / "metrics" / "metrics").write_text('{"loss": ')
    checkpoints = open_checkpoints(copy)
    assert (checkpoints.latest(), checkpoints.best()) == (3, 2)


# --- complete or absent ---


class Refused(OSError):
    """What the system says in these tests."""


def refuse(*_: object, **__: object) -> None:
    raise Refused(5, "Input/output error")


@pytest.mark.parametrize("moment", ["the sums", "the name"])
def test_a_checkpoint_that_is_not_finished_is_absent_and_the_older_stay(
    copy: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    place, name = {"the sums": (writer, "write_sums"), "the name": (folder, "finish")}[moment]
    checkpoints = open_checkpoints(copy, keep_last=1, keep_best=0)
    monkeypatch.setattr(place, name, refuse)
    checkpoints.save(4, make_state(4), {})
    assert checkpoints.steps() == [1, 2, 3], "older ones were removed before the new one was whole"
    with pytest.raises(RecordError, match=r"step 4 could not be written to .* \(Input/output error\): .* are intact"):
        checkpoints.wait()
    monkeypatch.undo()
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2", "3"], "half a checkpoint was left"
    checkpoints.save(4, make_state(4), {})
    checkpoints.close()
    assert open_checkpoints(copy).steps() == [4]


def test_the_name_comes_after_the_sums_and_before_older_ones_go(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def finish(directory: Path, step: int) -> None:
        checkpoint = folder.unfinished_path(directory, step)
        seen.append((folder.steps_in(directory), find_damage(checkpoint)))
        original(directory, step)
        seen.append((folder.steps_in(directory), find_damage(folder.step_path(directory, step))))

    original = folder.finish
    monkeypatch.setattr(folder, "finish", finish)
    checkpoints = open_checkpoints(copy, keep_last=1, keep_best=0)
    checkpoints.save(4, make_state(4), {})
    checkpoints.close()
    assert seen == [([1, 2, 3], None), ([1, 2, 3, 4], None)]
    assert checkpoints.steps() == [4]


def test_one_that_is_taken_away_loses_its_name_first(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def half(path: Path, **_: object) -> None:
        (path / "default" / "_METADATA").unlink()
        seen.append((path.name, folder.steps_in(copy)))

    monkeypatch.setattr(folder.shutil, "rmtree", half)
    folder.remove(copy, 2)
    assert seen == [("2.removed", [1, 3])]


def test_what_a_killed_process_left_is_no_checkpoint_and_goes_at_the_next_save(copy: Path) -> None:
    import orbax.checkpoint as ocp

    remnants = ["4.unfinished", "5.unfinished.orbax-checkpoint-tmp", "2.removed"]
    for name in remnants:
        shutil.copytree(copy / "3", copy / name)
    (copy / "2.removed" / SUMS_FILE).unlink()
    shutil.copytree(copy / "3", copy / "damaged" / "9")
    checkpoints = open_checkpoints(copy, keep_last=3)
    assert checkpoints.steps() == [1, 2, 3]
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and restored.step == 3 and restored.damaged == ()
    with ocp.CheckpointManager(copy) as manager:
        assert manager.all_steps() == [1, 2, 3], "plain Orbax takes a remnant for a checkpoint"
    checkpoints.save(4, make_state(4), {})
    checkpoints.close()
    assert sorted(path.name for path in copy.iterdir()) == ["2", "3", "4", "damaged"]


def test_reading_disturbs_no_save_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    original = writer.write_sums

    def held(checkpoint: Path) -> None:
        assert go_on.wait(30)
        original(checkpoint)

    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    monkeypatch.setattr(writer, "write_sums", held)
    checkpoints.save(2, make_state(2), {})
    other = open_checkpoints(tmp_path)
    assert other.steps() == [1] and other.best() == 1
    assert_bitwise_equal(other.restore(1, make_state(0)), make_state(1))
    go_on.set()
    checkpoints.close()
    assert other.steps() == [1, 2] and find_damage(tmp_path / "2") is None


def test_a_step_that_has_a_checkpoint_keeps_it(copy: Path) -> None:
    before = (copy / "3" / SUMS_FILE).read_bytes()
    checkpoints = open_checkpoints(copy, keep_last=3)
    checkpoints.save(3, make_state(30), {})
    checkpoints.close()
    assert (copy / "3" / SUMS_FILE).read_bytes() == before


def test_orbaxs_own_facts_are_kept(saved: Path) -> None:
    facts = json.loads((saved / "3" / "_CHECKPOINT_METADATA").read_text())
    assert set(facts["item_handlers"]) == {"default", "metrics"}
    assert json.loads((saved / "3" / "metrics" / "metrics").read_text()) == {"loss": 1.0 / 3}
