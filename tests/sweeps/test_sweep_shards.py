"""A sweep over several processes: shards are disjoint and cover it, resume each for itself, and read as one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.cli import command
from jaxnn.record import open_record
from jaxnn.sweeps import SweepOptions, plan_sweep
from tests import shell, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

HOW: dict[str, Any] = {**tiny.HOW, "vmap_size": 2, "devices": 1}
# Two groups of three members, numbered in turns.
POINTS = jn.grid(learning_rate=[0.1, 0.05, 0.01], batch_size=[8, 4])


def experiment() -> jn.Experiment[Any]:
    return tiny.experiment(num_steps=10)


def sweep(points: jn.search.Points = POINTS, **options: Any) -> jn.Sweep:
    return jn.sweep(experiment(), points, **{**HOW, **options})


def indices(sweep: jn.Sweep) -> list[int]:
    return [member.index for member in sweep.members]


def planned(shard: str | None, points: jn.search.Points = POINTS, **fields: Any) -> list[tuple[int, ...]]:
    """The numbers of the members of each group of a shard."""
    plan = plan_sweep(tiny.experiment(**fields), points, SweepOptions(shard=shard))
    return [tuple(member.number for member in group.members) for group in plan.groups]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[jn.Sweep, jn.Sweep, Path]:
    """A sweep in one process, the same in three shards, and where these are."""
    folder = tmp_path_factory.mktemp("sweeps")
    alone = sweep(run_dir=folder / "alone")
    for part in (3, 1, 2):
        sweep(run_dir=folder / "shared", shard=f"{part}/3")
    return alone, jn.open_sweep(folder / "shared", experiment()), folder / "shared"


@pytest.mark.parametrize("whole", [1, 2, 3, 4, 5, 12])
def test_shards_are_disjoint_and_cover_the_sweep(whole: int) -> None:
    points = jn.grid(learning_rate=[0.1, 0.05, 0.01], batch_size=[8, 4], seed=range(2))
    parts = [planned(f"{part}/{whole}", points) for part in range(1, whole + 1)]
    sizes = [sum(map(len, part)) for part in parts]
    assert sorted(number for part in parts for group in part for number in group) == list(range(12))
    assert max(sizes) - min(sizes) <= 1
    # Each cut that falls within a group makes one piece more: no division of two groups has fewer.
    assert sum(map(len, parts)) <= 2 + whole - 1


def test_a_group_stays_together_where_it_can() -> None:
    assert [planned(f"{part}/2") for part in (1, 2)] == [[(0, 2, 4)], [(1, 3, 5)]]


def test_more_shards_than_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(jn.ConfigError, match="shard is '1/7', and the sweep has 6 members .* at most as many shards"):
        sweep(run_dir=tmp_path / "shared", shard="1/7")
    assert not (tmp_path / "shared").exists()


@pytest.mark.slow
def test_shards_read_as_the_sweep_in_one_process(merged: tuple[jn.Sweep, jn.Sweep, Path]) -> None:
    alone, shards, _ = merged
    assert shards.status == "finished" and indices(shards) == list(range(6))
    for one, other in zip(alone.members, shards.members, strict=True):
        assert (one.point, one.config, one.status, one.step) == (other.point, other.config, other.status, other.step)
        assert one.final.keys() == other.final.keys()
        np.testing.assert_allclose(list(one.final.values()), list(other.final.values()), rtol=1e-5)
    assert shards.axes == alone.axes and len(shards.lines) == len(alone.lines)
    assert shards.summary["member_steps"] == alone.summary["member_steps"] == 60


def test_a_merged_member_is_a_run(merged: tuple[jn.Sweep, jn.Sweep, Path]) -> None:
    alone, shards, _ = merged
    for index in (0, 5):
        loss = shards.run(index).evaluate()["loss"]
        np.testing.assert_allclose(loss, alone.members[index].final["test_loss"], rtol=1e-5)


def test_merged_shards_are_compared_and_shown(
    merged: tuple[jn.Sweep, jn.Sweep, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    alone, _, path = merged
    assert "paired over 1 seed, averaged over 6 settings" in str(jn.compare(alone.dir, path))
    command(["show", str(path)])
    assert "sweep of 6: 6 finished" in capsys.readouterr().out


def test_a_shard_is_started_or_resumed_by_the_same_call(tmp_path: Path) -> None:
    first = sweep(resume=tmp_path / "shared", shard="2/3")
    assert first.status == "finished" and first.dir == tmp_path / "shared" / "shards" / "2-of-3"
    before = (first.dir / "metrics.jsonl").read_bytes()
    again = sweep(resume=tmp_path / "shared", shard="2/3")
    assert indices(again) == indices(first) == [1, 4]
    assert (first.dir / "metrics.jsonl").read_bytes() == before
    half = jn.open_sweep(tmp_path / "shared")
    assert half.status == "interrupted" and indices(half) == list(range(6))
    assert sum(member.status == "waiting" for member in half.members) == 4
    assert half.members[0].config["learning_rate"] == 0.1
    # By its own directory, as its last words say, a shard knows which one it is.
    assert indices(sweep(resume=first.dir)) == indices(first)


@pytest.mark.slow
def test_an_interrupted_shard_resumes(tmp_path: Path) -> None:
    how = {**HOW, "shard": "1/2", "report_every": 2, "steps_per_call": 2}
    whole = jn.sweep(tiny.experiment(), POINTS, run_dir=tmp_path / "whole", **how)

    class Stopper:
        left = 1

        def write(self, lines: Any) -> None:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGTERM)

    stopped = jn.sweep(tiny.experiment(), POINTS, run_dir=tmp_path / "shared", writers=(Stopper(),), **how)
    assert stopped.status == "interrupted" and 0 < stopped.members[0].step < 20
    resumed = jn.sweep(tiny.experiment(), POINTS, resume=tmp_path / "shared", **how)
    assert resumed.status == "finished"
    assert [member.final for member in resumed.members] == [member.final for member in whole.members]


def test_shards_hold_their_own_directories(tmp_path: Path) -> None:
    sweep(run_dir=tmp_path, shard="1/2")
    with open_record(tmp_path / "shards" / "1-of-2"):
        assert sweep(run_dir=tmp_path, shard="2/2").status == "finished"
        with pytest.raises(jn.RecordError, match="another process is writing"):
            sweep(resume=tmp_path, shard="1/2")


def test_members_that_fail_are_told_of_once(tmp_path: Path) -> None:
    points = jn.grid(learning_rate=[0.1], batch_size=[0, 8, 4])
    parts = [sweep(points, run_dir=tmp_path, shard=f"{part}/2") for part in (1, 2)]
    assert [indices(part) for part in parts] == [[0, 1], [2]]
    found = jn.open_sweep(tmp_path)
    assert [member.status for member in found.members] == ["failed", "finished", "finished"]
    assert found.status == "finished" and "batch_size is 0" in str(found.members[0].error)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard": "1/2"}, "the shards of a sweep share a directory"),
        ({"shard": "1/4", "resume": "shared"}, "holds the shard [123]/3, so the sweep is not divided into 4"),
        ({"shard": "2/3", "resume": "shared/shards/1-of-3"}, "has shard='1/3'"),
        ({"shard": "1/3", "resume": "alone"}, "has shard=None"),
        ({"shard": "1/3", "run_dir": "alone"}, "was not divided into shards"),
        ({"resume": "shared"}, "resume each of them with --resume .* --shard I/N"),
        ({"shard": "1/3", "run_dir": "shared"}, "not empty"),
    ],
)
def test_a_shard_in_the_wrong_place_is_refused(
    merged: tuple[jn.Sweep, jn.Sweep, Path], options: dict[str, str], said: str
) -> None:
    folder = merged[2].parent
    where = {name: folder / value if name != "shard" else value for name, value in options.items()}
    with pytest.raises(jn.JaxnnError, match=said):
        sweep(**where)


def test_a_new_shard_of_another_sweep_is_refused(merged: tuple[jn.Sweep, jn.Sweep, Path]) -> None:
    shared = merged[2].parent / "partly"
    shutil.copytree(merged[2] / "shards" / "1-of-3", shared / "shards" / "1-of-3")
    with pytest.raises(jn.ConfigError, match="has num_steps = 10, this experiment 20"):
        jn.sweep(tiny.experiment(), POINTS, resume=shared, shard="2/3", **HOW)
    with pytest.raises(jn.ConfigError, match="the points of the sweep"):
        sweep(jn.grid(learning_rate=[0.1, 0.2, 0.3], batch_size=[8, 4]), resume=shared, shard="2/3")
    assert not (shared / "shards" / "2-of-3").exists()


def test_a_program_that_groups_otherwise_is_refused(merged: tuple[jn.Sweep, jn.Sweep, Path]) -> None:
    def branching(config: Any) -> Any:
        return optax.sgd(config.learning_rate if config.learning_rate > 0.06 else 0.01, momentum=0.9)

    changed = tiny.experiment(num_steps=10, optimizer=branching)
    with pytest.raises(jn.ConfigError, match="form other groups"), pytest.warns(UserWarning):
        jn.sweep(changed, POINTS, resume=merged[0].dir, **HOW)


def test_no_values_are_needed_to_resume_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = ["--steps-per-call", "5", "--report-every", "5", "--vmap-size", "2", "--progress", "none"]
    where = ["--resume", str(tmp_path / "shared"), *how]
    jn.main(experiment(), ["sweep", "--learning-rate", "0.1", "0.01", "--shard", "1/2", *where])
    jn.main(experiment(), ["sweep", "--shard", "2/2", *where])
    found = jn.open_sweep(tmp_path / "shared")
    assert found.status == "finished" and [member.point["learning_rate"] for member in found.members] == [0.1, 0.01]


def slurm(tmp_path: Path, task: int, srun: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the job script of the documentation as one job of an array of two, with these for SLURM's commands."""
    commands = tmp_path / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in (("srun", srun), ("scontrol", 'echo "scontrol $*"')):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_JOB_ID": f"10{task}"}
    variables["SLURM_CPUS_PER_TASK"] = "4"
    return subprocess.run(
        ["bash", "docs/slurm_sweep.sh", "--num-steps", "20", "--vmap-size", "4", "--steps-per-call", "2"],
        env={**os.environ, "PATH": path, "RUN_DIR": str(tmp_path / "runs"), **variables, **environment},
        cwd=shell.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_slurm_script_runs_a_sweep_in_two_jobs(tmp_path: Path) -> None:
    # A step has as many cores as srun is told, not as sbatch was.
    srun = 'test "$1" = --cpus-per-task=4 && shift && exec "$@"'
    for task in (1, 2):
        done = slurm(tmp_path, task, srun, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "scontrol" not in done.stdout
    found = jn.open_sweep(tmp_path / "runs")
    assert found.status == "finished" and indices(found) == list(range(16))
    assert {member.step for member in found.members} == {20}


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (2, False), (0, False)])
def test_the_slurm_script_goes_back_to_the_queue_if_it_was_interrupted(
    tmp_path: Path, status: int, requeued: bool
) -> None:
    done = slurm(tmp_path, 2, f"exit {status}")
    assert done.returncode == status
    assert ("scontrol requeue 102" in done.stdout) == requeued
