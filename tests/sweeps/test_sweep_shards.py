"""A sweep in shards, one by one, by Slurm or by workers of Ray: disjoint parts that cover it and read as one."""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn._disk import write_json
from jaxnn.record import Record, RecordReader
from jaxnn.sweeps import SweepOptions, plan_sweep
from tests import shell, swept, tiny
from tests.swept import EXPERIMENT, POINTS, indices

LANES: dict[str, Any] = {**tiny.HOW, "vmap_size": 2}
# Of the last the experiment cannot be built.
FIVE = jn.grid(learning_rate=[0.1, 0.05], batch_size=[8, 4]) + jn.grid(batch_size=[0], learning_rate=[0.1])

FOUR = jn.grid(learning_rate=[0.1, 0.05, 0.01, 0.02])


def by_ray(experiment: jn.Experiment[Any], points: jn.search.Points = FIVE, **options: Any) -> jn.Sweep:
    return jn.sweep(experiment, points, executor="ray", **{**LANES, **options})


def assert_equal(found: jn.Sweep, expected: jn.Sweep, tolerance: float = 1e-4) -> None:
    """The same members with the same metrics, to rounding."""
    assert found.status == expected.status
    for one, other in zip(found.members, expected.members, strict=True):
        assert (one.point, one.config, one.status, one.step) == (other.point, other.config, other.status, other.step)
        assert one.final.keys() == other.final.keys()
        np.testing.assert_allclose(list(one.final.values()), list(other.final.values()), rtol=tolerance)


def test_options_that_workers_cannot_use_and_missing_ray_are_reported(monkeypatch, tmp_path):
    for options in ({"record": False}, {"devices": 2}, {"shard": "1/2"}, {"plan_only": True}):
        with pytest.raises(jn.ConfigError, match="leave record, plan_only, shard and devices at their defaults"):
            by_ray(tiny.experiment(), **options)
    with pytest.raises(jn.ConfigError, match="a searcher compares all members"):
        jn.sweep(tiny.experiment(), jn.search.halving(FIVE), shard="1/2", run_dir=tmp_path / "swept")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(jn.ConfigError, match=r"needs ray, which is not installed: pip install \"jaxnn\[ray\]\"\.$"):
        by_ray(tiny.experiment(), run_dir=tmp_path / "swept")
    assert not (tmp_path / "swept").exists()


def test_existing_cluster_is_joined_and_left(monkeypatch, tmp_path):
    calls: list[str] = []

    def join(**options: Any) -> None:
        if "num_cpus" in options:
            raise ValueError("a cluster has the resources it has")
        calls.append("joined")

    def refuse(_: Any) -> None:
        raise TypeError("cannot pickle")

    def silent(**options: Any) -> None:
        raise ConnectionError("no answer")

    # A cluster that was started elsewhere, to which nothing can be sent.
    leave = {"is_initialized": lambda: False, "shutdown": lambda: calls.append("left")}
    ray = types.SimpleNamespace(init=join, put=refuse, cluster_resources=lambda: {"CPU": 8.0}, **leave)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(jn.ConfigError, match=r"cannot be sent to Ray's workers \(TypeError: cannot pickle\)"):
        by_ray(tiny.experiment(), run_dir=tmp_path / "swept")
    with pytest.raises(jn.ConfigError, match="device is 'gpu', and Ray's cluster has 0 GPUs and 8 cores"):
        by_ray(tiny.experiment(), run_dir=tmp_path / "swept", device="gpu")
    assert calls == ["joined", "left"] * 2 and not list(tmp_path.iterdir())
    ray.init = silent
    with pytest.raises(jn.ConfigError, match="cluster cannot be used .*no answer.*: start it, or unset"):
        by_ray(tiny.experiment())


@pytest.mark.slow
def test_workers_train_what_one_process_does(cluster, tmp_path, capsys):
    found = by_ray(tiny.experiment(), run_dir=tmp_path / "ray", progress="plain")
    printed = capsys.readouterr().out
    assert_equal(found, jn.sweep(tiny.experiment(), FIVE, record=False, **LANES))
    assert "2 workers with a core each" in printed and "shard 1/2 ended" in printed
    assert "sweep of 5: 4 finished, 1 failed" in printed and cluster.is_initialized()
    shards = [tmp_path / "ray" / "shards" / f"{part}-of-2" for part in (1, 2)]
    for facts in (tiny.read(path) for path in shards):
        # A worker has one core, and one device, whatever this process was given.
        assert facts["command"] == sys.argv and len(facts["devices"]["devices"]) == 1
    np.testing.assert_allclose(found.run(3).evaluate()["loss"], found.members[3].final["test_loss"], rtol=1e-5)


@pytest.mark.slow
def test_killed_worker_is_replaced_and_its_shard_continues(cluster, tmp_path):
    plain, how = tiny.experiment(num_steps=2_000), {"eval_every": 100, "checkpoint_every": 100}
    found = by_ray(swept.killed_once(plain, tmp_path), FOUR, run_dir=tmp_path / "swept", **how)
    assert (tmp_path / "swept" / "mortal").exists()
    assert_equal(found, jn.sweep(plain, FOUR, record=False, **{**LANES, **how}))
    shards = (tmp_path / "swept" / "shards").iterdir()
    least, most = sorted(tiny.read(path)["summary"]["member_steps"] for path in shards)
    # The worker that took over did not start from the beginning.
    assert most == 4_000 and 0 < least < 4_000 and len(found.lines) == 4 * 400


SCRIPT = '''
"""A config class and lambdas that no worker can import."""
import dataclasses, os, optax, jaxnn as jn
from tests import tiny

@dataclasses.dataclass(frozen=True)
class Config(tiny.Config):
    momentum: float = 0.9

model = lambda config: jn.tasks.classification(tiny.MODEL)
sgd = lambda config: optax.sgd(config.learning_rate, momentum=config.momentum)
jn.main(jn.Experiment(Config(), lambda config: tiny.splits(), model, sgd))
import ray
assert not ray.is_initialized(), "the cluster that was started here was not shut down"
'''


@pytest.mark.slow
def test_script_starts_ray_and_ends_it_and_survives_its_loss(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    (tmp_path / "lonely.py").write_text(SCRIPT)
    words = "sweep --momentum 0.5 0.9 --executor ray --num-workers 1 --vmap-size 2 --steps-per-call 5 --run-dir"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "RAY_ADDRESS": "local"}
    done = shell.python(tmp_path / "lonely.py", *words.split(), tmp_path / "swept", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [member.status for member in jn.open_sweep(tmp_path / "swept").members] == ["finished"] * 2
    assert tiny.read(tmp_path / "swept" / "shards" / "1-of-1")["name"] == "lonely"
    (tmp_path / "lost.py").write_text(SCRIPT.replace("tiny.splits()", LOST))
    done = shell.python(tmp_path / "lost.py", *words.split(), tmp_path / "lost", **environment)
    assert done.returncode == 75 and "\nerror: no worker of Ray's cluster" in f"\n{done.stderr}", done.stderr


LOST = """(open(f"/proc/{os.getppid()}/comm").read() == "raylet\\n" and os.kill(os.getppid(), 9), tiny.splits())[1]"""


HOW: dict[str, Any] = tiny.MEMBERS


def sweep(points: jn.search.Points = POINTS, **options: Any) -> jn.Sweep:
    return jn.sweep(EXPERIMENT, points, **{**HOW, **options})


def planned(shard: str, **axes: Any) -> tuple[list[int], list[list[int]]]:
    """The numbers of the members of a shard, and of those of each of its groups."""
    plan = plan_sweep(tiny.experiment(), jn.grid(**axes), SweepOptions(shard=shard))
    groups = [[member.number for member in group.members] for group in plan.groups]
    return [member.number for member in plan.members], groups


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a sweep in two shards, of which the shell started the second during the other."""
    path = tmp_path_factory.mktemp("sweeps") / "shared"
    first = sweep(resume=path, shard="2/2")
    assert first.status == "finished" and first.dir == path / "shards" / "2-of-2"
    words = "sweep --shard 1/2 --steps-per-call 5 --report-every 5 --eval-every 10 --vmap-size 2 --devices 1"
    # Shards hold locks of their own; no values are needed to start another from the shell.
    with Record.open(first.dir):
        jn.main(EXPERIMENT, [*words.split(), "--progress", "none", "--resume", str(path)])
        with pytest.raises(jn.RecordError, match="another process is writing"):
            sweep(resume=path, shard="2/2")
    return path


@pytest.fixture
def half(shared: Path, tmp_path: Path) -> Path:
    """A copy of it without its first shard."""
    return shutil.copytree(shared, tmp_path / "half", ignore=shutil.ignore_patterns("1-of-2"))


def test_shards_are_disjoint_and_cover_the_sweep():
    # Members of two groups, of which a part has as few as possible: only a cut within a group makes a piece more.
    expected = {
        **{"1/2": [[0, 1, 4, 5, 8, 9]], "2/2": [[2, 3, 6, 7, 10, 11]], "12/12": [[11]]},
        **{"1/5": [[0, 1]], "2/5": [[4, 5]], "3/5": [[8, 9], [2]], "4/5": [[3, 6]], "5/5": [[7, 10, 11]]},
    }
    axes = {"learning_rate": [0.1, 0.05, 0.01], "batch_size": [8, 4], "seed": range(2)}
    for shard, groups in expected.items():
        assert planned(shard, **axes) == (sorted(sum(groups, [])), groups)
    # The first has the members that cannot be run.
    assert [planned(f"{part}/2", batch_size=[0, 8, 4])[0] for part in (1, 2)] == [[0, 1], [2]]


def test_shards_read_as_the_sweep_in_one_process(shared, finished):
    shards = jn.open_sweep(shared, EXPERIMENT)
    assert RecordReader(shared).is_sweep and shards.status == "finished" and indices(shards) == list(range(8))
    assert_equal(shards, finished, 1e-5)
    assert shards.axes == finished.axes and len(shards.lines) == len(finished.lines)
    assert shards.summary["member_steps"] == finished.summary["member_steps"] == 240
    assert "paired over 1 seed, averaged over 8 settings" in str(jn.compare(finished.dir, shared))
    for name in ("test_loss", "train_loss"):
        np.testing.assert_allclose(shards.curves(name)[1], finished.curves(name)[1], rtol=1e-5)
    parts = [tiny.read(path)["summary"] for path in (shared / "shards").iterdir()]
    training = sum(part["seconds"]["train"] for part in parts)
    assert shards.summary["seconds"]["train"] == pytest.approx(training)
    assert shards.summary["member_steps_per_second"] == pytest.approx(240 / training)


def test_finished_shard_is_resumed_by_the_call_that_started_it(half):
    shard = half / "shards" / "2-of-2"
    before = (shard / "metrics.jsonl").read_bytes()
    # By its own directory, which it prints at the end, a shard knows which one it is.
    for options in ({"resume": half, "shard": "2/2"}, {"resume": shard}):
        assert (found := sweep(**options)).status == "finished" and indices(found) == [1, 3, 5, 7]
    assert (shard / "metrics.jsonl").read_bytes() == before
    found = jn.open_sweep(half)
    assert found.status == "interrupted" and indices(found) == list(range(8))
    assert [member.status for member in found.members] == ["waiting", "finished"] * 4
    with Record.open(shard):
        write_json(shard / "record.json", tiny.read(shard) | {"status": "running"})
        assert jn.open_sweep(half).status == "running"
    assert jn.open_sweep(half).status == "interrupted"


@pytest.mark.slow
def test_a_shard_started_by_resume_has_the_options_of_its_sweep(half):
    facts = tiny.read(shard := half / "shards" / "2-of-2")
    rules = {"patience": 7, "eval_every": 15, "eval_batches": 1, "monitor": "accuracy"}
    write_json(shard / "record.json", facts | {"options": facts["options"] | rules, "monitored": "test_accuracy"})
    jn.sweep(EXPERIMENT, resume=half, shard="1/2", progress="none")
    joined = tiny.read(half / "shards" / "1-of-2")
    assert joined["options"].items() >= rules.items() and jn.open_sweep(half).status == "finished"
    stops = joined["options"] | {"stop": "rule"}
    write_json(shard / "record.json", facts | {"options": stops, "monitored": "test_accuracy"})
    with pytest.raises(jn.RecordError, match=r"not trained by the same rules \(stop: .*open each alone"):
        jn.open_sweep(half)
    # The first shard of all has those of its script.
    words = f"sweep --learning-rate 0.1 0.2 --shard 1/2 --progress none --resume {half / 'first'}".split()
    jn.main(EXPERIMENT, words, options=jn.RunOptions(patience=9, eval_every=15))
    assert tiny.read(half / "first" / "shards" / "1-of-2")["options"]["patience"] == 9


def test_shard_of_another_sweep_or_place_is_refused(shared, half, finished):
    new = half.parent / "new"
    refused: dict[str, dict[str, Any]] = {
        "the sweep has 8 members .* at most as many shards": {"shard": "1/9", "run_dir": new},
        "the shards of a sweep share a directory": {"shard": "1/2"},
        "holds the shard [12]/2, so the sweep is not divided into 4": {"shard": "1/4", "resume": shared},
        "has shard='1/2'": {"shard": "2/2", "resume": shared / "shards" / "1-of-2"},
        "was not divided into shards": {"shard": "1/2", "run_dir": finished.dir},
        "resume each of them with --resume .* --shard I/N": {"resume": shared},
        "not empty": {"shard": "1/2", "run_dir": shared},
        "has eval_every=10, which decides its results": {"shard": "1/2", "run_dir": half, "eval_every": 15},
    }
    for words, options in refused.items():
        with pytest.raises(jn.JaxnnError, match=words):
            sweep(**options)
    with pytest.raises(jn.ConfigError, match="the points of the sweep"):
        sweep(jn.grid(learning_rate=[0.1, 0.2], batch_size=[8, 16]), resume=half, shard="1/2")
    with pytest.raises(jn.ConfigError, match="has num_steps = 30, this experiment 20"):
        jn.sweep(tiny.experiment(), POINTS, resume=half, shard="1/2", **HOW)
    assert not (half / "shards" / "1-of-2").exists() and not new.exists()

    def branching(config: Any) -> Any:
        return optax.sgd(config.learning_rate if config.learning_rate > 0.06 else 0.01, momentum=0.9)

    changed = tiny.experiment(num_steps=30, optimizer=branching)
    with pytest.raises(jn.ConfigError, match="form other groups"), pytest.warns(UserWarning):
        jn.sweep(changed, POINTS, resume=finished.dir, **HOW)


def slurm(tmp_path: Path, task: int, srun: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the job script of the documentation as one job of an array of two, with these for SLURM's commands."""
    for name, text in (("srun", srun), ("scontrol", 'echo "scontrol $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"ARRAY_TASK_ID": f"{task}", "ARRAY_TASK_COUNT": "2", "JOB_ID": f"10{task}", "CPUS_PER_TASK": "4"}
    slurms = {f"SLURM_{name}": value for name, value in job.items()}
    words = "--num-steps 20 --vmap-size 4 --steps-per-call 2".split()
    env = {**os.environ, "PATH": path, "RUN_DIR": str(tmp_path / "runs"), **slurms, **environment}
    command = ["bash", "docs/slurm_sweep.sh", *words]
    return subprocess.run(command, env=env, cwd=shell.ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_slurm_script_runs_a_sweep_in_two_jobs(tmp_path):
    # A step has as many cores as srun is given, not as sbatch was.
    srun = 'test "$1" = --cpus-per-task=4 && shift && exec "$@"'
    for task in (1, 2):
        done = slurm(tmp_path, task, srun, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "scontrol" not in done.stdout
    found = jn.open_sweep(tmp_path / "runs")
    assert found.status == "finished" and indices(found) == list(range(16))
    assert {member.step for member in found.members} == {20}


def test_slurm_script_is_requeued_if_it_was_interrupted(tmp_path):
    for status in (75, 2):
        done = slurm(tmp_path, 2, f"exit {status}")
        assert done.returncode == status and ("scontrol requeue 102" in done.stdout) == (status == 75)
