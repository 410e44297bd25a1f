"""A run or a sweep whose newest checkpoint is damaged resumes from the one before it, reports it, and loses nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import jaxnn as jn
from jaxnn.record import read_metrics
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

EVERY: dict[str, Any] = {"checkpoint_every": 5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    """The run that nothing befell."""
    return tiny.fit(tiny.experiment(), tmp_path_factory.mktemp("whole") / "run", **EVERY)


@pytest.fixture
def halved(tmp_path: Path) -> Path:
    """The directory of a run that was broken off in the middle: it holds the checkpoints of steps 5 and 10."""
    for report in jn.iterate(tiny.experiment(), run_dir=tmp_path / "run", **EVERY, **tiny.HOW):
        if report.step == 10:
            break
    return tmp_path / "run"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def untimed(path: Path) -> list[dict[str, Any]]:
    timings = ("seconds", "steps_per_second", "examples_per_second")
    return [{name: value for name, value in line.items() if name not in timings} for line in read_metrics(path)]


def test_run_resumes_from_the_checkpoint_before_and_reports_it(
    whole: jn.Run, halved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(halved / "checkpoints" / "10" / "default" / "manifest.ocdbt")
    resumed = tiny.fit(tiny.experiment(), resume=halved, progress="plain")
    sentence = (
        "the checkpoint of step 10 is damaged, its file default/manifest.ocdbt has other bytes than were saved, and "
        f"was moved to {halved / 'checkpoints' / 'damaged' / '10'}"
    )
    said = " ".join(capsys.readouterr().out.split())
    assert f"resumed after step 5; {sentence}" in said
    resumes = tiny.read(halved)["resumed"]
    assert [(entry["step"], entry["damaged"]) for entry in resumes] == [(5, [sentence])]
    assert (halved / "checkpoints" / "damaged" / "10" / "default" / "manifest.ocdbt").is_file()
    tiny.assert_bitwise_equal(resumed.state.params, whole.state.params)
    tiny.assert_bitwise_equal(resumed.state.opt_state, whole.state.opt_state)
    assert untimed(halved) == untimed(whole.dir) and tiny.read(halved)["status"] == "finished"  # type: ignore[arg-type]


def test_undamaged_run_reports_no_damage(halved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.fit(tiny.experiment(), resume=halved, progress="plain")
    assert tiny.read(halved)["resumed"][0]["damaged"] == []
    assert "is damaged" not in capsys.readouterr().out and not (halved / "checkpoints" / "damaged").exists()


def test_a_finished_run_whose_last_checkpoint_is_damaged_does_its_last_steps_again(
    whole: jn.Run, tmp_path: Path
) -> None:
    run = tiny.fit(tiny.experiment(), tmp_path / "run", **EVERY)
    assert run.dir is not None
    (run.dir / "checkpoints" / "20" / "default" / "_METADATA").unlink()
    again = tiny.fit(tiny.experiment(), resume=run.dir)
    assert tiny.read(run.dir)["resumed"][0]["step"] == 15 and again.summary.status == "finished"
    tiny.assert_bitwise_equal(again.state.params, whole.state.params)
    assert untimed(run.dir) == untimed(whole.dir)  # type: ignore[arg-type]
    tiny.assert_bitwise_equal(tiny.fit(tiny.experiment(), resume=run.dir).state.params, whole.state.params)


def test_without_a_whole_checkpoint_the_run_is_refused_and_stays_as_it_was(halved: Path) -> None:
    for step in ("5", "10"):
        flip(halved / "checkpoints" / step / "SHA256SUMS")
    before = {path: path.read_bytes() for path in halved.rglob("*") if path.is_file()}
    with pytest.raises(jn.RecordError) as caught:
        tiny.fit(tiny.experiment(), resume=halved)
    assert str(caught.value) == (
        f"every checkpoint in {halved / 'checkpoints'} is damaged, that of step 10 since its file SHA256SUMS has other "
        "bytes than were saved: bring one back from a copy, or start a new run."
    )
    assert {path: path.read_bytes() for path in halved.rglob("*") if path.is_file()} == before


def test_a_refusal_for_another_reason_leaves_the_damaged_one_where_it_is(halved: Path) -> None:
    flip(halved / "checkpoints" / "10" / "default" / "_METADATA")
    with pytest.raises(jn.RecordError, match="has done 5 steps already, more than num_steps = 4"):
        tiny.fit(tiny.experiment(num_steps=4), resume=halved)
    assert (halved / "checkpoints" / "10").is_dir()


def test_a_damaged_best_checkpoint_is_named(whole: jn.Run) -> None:
    assert whole.dir is not None
    best = max((whole.dir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    kept = (best / "default" / "_METADATA").read_bytes()
    flip(best / "default" / "_METADATA")
    with pytest.raises(jn.RecordError, match=r"checkpoints/\d+ is damaged, its file default/_METADATA has other bytes"):
        whole.best_state()
    (best / "default" / "_METADATA").write_bytes(kept)
    tiny.assert_bitwise_equal(whole.best_state().params, whole.state.params)


# --- sweeps ---


def test_sweep_resumes_from_the_checkpoint_before_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Killed(BaseException):
        pass

    class Killer:
        """A metric writer that ends the process, as it were, in the last window, before its state is saved."""

        def write(self, lines: Any) -> None:
            if lines[0]["step"] == 20:
                raise Killed

    points = jn.grid(learning_rate=[0.01, 0.1])
    how = {**tiny.HOW, "vmap_size": 2, "devices": 1, **EVERY}
    whole = jn.sweep(tiny.experiment(), points, record=False, **{**how, "checkpoint_every": None})
    with pytest.raises(Killed):
        jn.sweep(tiny.experiment(), points, run_dir=tmp_path / "sweep", writers=(Killer(),), **how)
    shutil.copytree(tmp_path / "sweep", tmp_path / "lost")
    group = tmp_path / "sweep" / "groups" / "0"
    newest = max((path for path in group.iterdir()), key=lambda path: int(path.name))
    flip(newest / "default" / "_METADATA")
    rest = jn.sweep(tiny.experiment(), resume=tmp_path / "sweep", progress="plain", devices=1)
    (damage,) = tiny.read(tmp_path / "sweep", "sweep.json")["damaged"]
    assert damage.startswith(
        f"the checkpoint of step {newest.name} is damaged, its file default/_METADATA has other bytes"
    )
    assert damage in " ".join(capsys.readouterr().out.split())
    assert rest.status == "finished"
    assert [member.final for member in rest.members] == [member.final for member in whole.members]

    # Metrics are lost of what its checkpoint holds.
    lines = tiny.lines(tmp_path / "lost")
    kept = [line for line in lines if (line["member"], line["step"]) != (1, 5)]
    (tmp_path / "lost" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    jn.sweep(tiny.experiment(), resume=tmp_path / "lost", progress="plain", devices=1)
    assert "metrics.jsonl is damaged" in " ".join(capsys.readouterr().out.split())
    saved = [line for line in kept if line["step"] < 20]
    assert [line for line in tiny.lines(tmp_path / "lost") if line in saved] == saved
