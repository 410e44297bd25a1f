"""A sweep on Ray: what its workers train is what one process does, and a worker that is lost costs nothing but time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jaxnn.checkpoints import Checkpoints
from jaxnn.loop.signals import Interruption
from jaxnn.record.directory import is_locked, locked, write_json
from jaxnn.sweeps.engine.local import sweep_here
from jaxnn.sweeps.engine.store import Store
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.ray import cluster as ray_cluster
from jaxnn.sweeps.ray import driver as ray_driver
from jaxnn.sweeps.ray import worker as ray_worker
from jaxnn.sweeps.ray.cluster import Cluster, Outcome, open_cluster
from jaxnn.sweeps.ray.driver import Driver, summarize
from jaxnn.sweeps.ray.pace import Pace
from jaxnn.sweeps.ray.tasks import RayTask, cut, plan_tasks
from jaxnn.sweeps.ray.worker import Sent, plan_there

import jaxnn as jn
from jaxnn.record import create_run_dir, open_record
from tests import shell, tiny

HOW: dict[str, Any] = {**tiny.HOW, "width": 2}
POINTS = jn.grid(learning_rate=[0.1, 0.05, 0.01], batch_size=[8, 4], seed=[0, 1])
# One more, of which the experiment cannot be built.
ALL_POINTS = POINTS + jn.grid(batch_size=[0], learning_rate=[0.1], seed=[0])


@pytest.fixture(scope="module")
def cluster(compiled_once: None) -> Iterator[Any]:
    """Ray on this machine with two workers, for the tests that do not start their own."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    # As a script's folder would be; a worker imports what a test module defines.
    del compiled_once
    path = os.pathsep.join([str(shell.ROOT), str(shell.ROOT / "tests")])
    environment = {"PYTHONPATH": path}
    before = signal.getsignal(signal.SIGTERM)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    with warnings.catch_warnings():
        # Ray forks to execute another program at once, which JAX's threads do not mind.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(address="local", num_cpus=2, runtime_env={"env_vars": environment}, **quiet)
    yield ray
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def alone(compiled_once: None) -> jn.Sweep:
    """All points in one process."""
    del compiled_once
    return jn.sweep(tiny.experiment(), ALL_POINTS, record=False, **HOW)


def sweep(experiment: jn.Experiment[Any], points: jn.Points = POINTS, **options: Any) -> jn.Sweep:
    return jn.sweep(experiment, points, engine="ray", **{**HOW, **options})


def assert_equal(found: jn.Sweep, expected: jn.Sweep) -> None:
    """The same members with the same metrics, to rounding."""
    assert found.status == expected.status
    for one, other in zip(found.members, expected.members, strict=True):
        assert (one.index, one.point, one.config, one.status, one.step) == (
            other.index,
            other.point,
            other.config,
            other.status,
            other.step,
        )
        assert one.final.keys() == other.final.keys()
        np.testing.assert_allclose(list(one.final.values()), list(other.final.values()), rtol=1e-4)


def tasks(path: Path) -> list[Path]:
    return sorted((path / "shards").iterdir())


def told_members(path: Path) -> list[dict[str, Any]]:
    """What ``members.jsonl`` says, whatever else lies there."""
    return [json.loads(line) for line in (path / "members.jsonl").read_text().splitlines()]


class Words(list[str]):
    """A display that keeps what was said."""

    say = list.append

    def report(self, report: Any) -> None:
        raise AssertionError("the driver says lines only")


@contextlib.contextmanager
def half_done(path: Path) -> Iterator[tuple[Driver, RayTask]]:
    """A driver of four members, and its first task: two of them, which are trained."""
    points, task = jn.grid(learning_rate=[0.1, 0.05], seed=[0, 1]), RayTask((0, 1), path / "shards" / "task-001")
    planned = plan_there(Sent(tiny.experiment(), points, SweepOptions(engine="ray", **HOW), {"name": "tiny"}, {}), None)
    with open_record(create_run_dir(path)) as record:
        driver = Driver(path, Store(record, planned.facts), planned.members, Cluster(None, False, 2), Words())
        driver.store.describe(status="running")
        driver.tell_members()
        driver.introduce([task])
        sweep_here(tiny.experiment(), points, SweepOptions(run_dir=task.folder, **HOW), numbers=task.numbers)
        yield driver, task


def test_groups_are_cut_into_work_for_every_worker() -> None:
    assert list(cut([range(8)], 2)) == [range(4), range(4, 8)]
    assert list(cut([range(3), range(3, 4)], 2)) == [range(1), range(1, 3), range(3, 4)]
    # By twos there would be three tasks for four workers.
    assert list(map(len, cut([range(5)], 4))) == [1, 1, 1, 1, 1]
    assert list(cut([range(2)], 8)) == [range(1), range(1, 2)]
    assert list(cut([[], range(5)], 1)) == [range(5)]
    assert list(cut([], 4)) == []


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 50])
def test_parts_are_of_one_group_and_leave_nobody_out(num_workers: int) -> None:
    groups = [list(range(10)), list(range(10, 14)), list(range(14, 37))]
    parts = list(cut(groups, num_workers))
    assert [number for part in parts for number in part] == list(range(37))
    assert all(any(set(part) <= set(group) for group in groups) for part in parts)
    assert min(num_workers, 37) <= len(parts) <= num_workers + len(groups)


def test_what_was_begun_keeps_its_directory_and_the_rest_is_cut_anew(tmp_path: Path) -> None:
    folder = tmp_path / "shards" / "task-002"
    sweep_here(tiny.experiment(), POINTS, SweepOptions(run_dir=folder, **HOW), numbers=[0, 4])
    groups = [[0, 1, 4, 5], [2, 3]]
    rest = [((1, 5), tmp_path / "shards" / "task-003"), ((2, 3), tmp_path / "shards" / "task-004")]
    assert plan_tasks(tmp_path, groups, num_workers=2) == rest
    write_json(folder / "sweep.json", tiny.read(folder, "sweep.json") | {"status": "interrupted"})
    assert plan_tasks(tmp_path, groups, num_workers=2) == [((0, 4), folder), *rest]


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(jn.ConfigError, match=r"needs Ray: pip install -e '\.\[ray\]'$"):
        sweep(tiny.experiment(), run_dir=tmp_path / "swept")
    assert not (tmp_path / "swept").exists()


def test_a_cluster_that_is_there_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def init(**options: Any) -> None:
        if "num_cpus" in options:
            raise ValueError("what a cluster has is not for us to say")
        said.append("joined")

    resources = {"CPU": 16.0, "GPU": 2.0}
    parts = {"is_initialized": lambda: False, "init": init, "shutdown": lambda: said.append("left")}
    fake = types.SimpleNamespace(**parts, cluster_resources=lambda: resources)
    monkeypatch.setitem(sys.modules, "ray", fake)
    with open_cluster(4) as four, open_cluster(None) as found:
        assert (four.has_gpus, four.num_workers, found.num_workers) == (True, 4, 2)
        resources.clear()
        resources["CPU"] = 16.0
    with open_cluster(None) as found:
        assert (found.has_gpus, found.num_workers) == (False, 16)
    assert sorted(said) == ["joined"] * 3 + ["left"] * 3


def test_a_cluster_that_does_not_answer_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(jn.ConfigError, match="cluster cannot be used .*nobody answers.*: start it, or unset"):
        sweep(tiny.experiment())


def test_at_its_end_the_sweep_says_itself_what_became_of_each_member(tmp_path: Path) -> None:
    with half_done(tmp_path / "swept") as (driver, task):
        assert [line["status"] for line in told_members(driver.path)] == ["waiting"] * 4
        found = jn.open_sweep(driver.path)
        driver.finish()
    told = told_members(driver.path)
    assert [line["status"] for line in told] == ["finished"] * 2 + ["waiting"] * 2
    for line, own in zip(told, told_members(task.folder), strict=False):
        assert line == own | {"dir": f"shards/task-001/{own['dir']}"}
    assert jn.open_sweep(driver.path).members == found.members
    # Of a member that goes on, its task knows better.
    (driver.path / "members.jsonl").write_text("".join(json.dumps(line | {"final": {}}) + "\n" for line in told))
    assert jn.open_sweep(driver.path).members == found.members


def test_a_task_that_ends_tells_why_its_members_were_not_side_by_side(tmp_path: Path) -> None:
    with half_done(tmp_path / "swept") as (driver, task):
        facts = tiny.read(task.folder, "sweep.json")
        facts["groups"][0]["width"]["note"] = "one at a time: more do not fit"
        write_json(task.folder / "sweep.json", facts)
        driver.settle(task, Outcome({**facts["summary"], "member_steps_per_second": 400.0}))
    *_, note, ended = driver.words
    assert note == "  task-001: one at a time: more do not fit"
    over = "2 of 4 members over (2 finished, 2 waiting)"
    assert ended.startswith(f"  task-001 ended (400 member-steps/s): {over}, best test ")
    assert ended.endswith("tasks left: 0, 2 workers with a core each")


def test_a_driver_that_waits_says_how_far_the_sweep_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with half_done(tmp_path / "swept") as (driver, _):
        said = len(driver.words)
        driver.look()
        assert len(driver.words) == said
        driver.throttle = ray_driver.Throttle(0.0)
        driver.pace.rate = 1234.0
        driver.look()
        assert driver.words[said].startswith("  2 of 4 members over (2 finished, 2 waiting), best test ")
        assert ", 1,234 member-steps/s, tasks left: 1, " in driver.words[said]
        # What is being replaced may be missed by a file system that machines share: that ends no sweep.
        (driver.path / "members.jsonl").write_text("{\n")
        driver.look()
        assert "cannot be read now" in driver.words[-1]


def test_the_pace_is_of_steps_after_the_first() -> None:
    times = iter([0.0, 10.0, 20.0, 20.5, 30.0, 40.0, 50.0])
    pace = Pace(lambda: next(times))
    pace.start(100)
    rates = []
    for steps in (100, 150, 250, 300, 300, 200, 700):
        pace.see(steps)
        rates.append(pace.rate)
    # Nothing new, the first, ten seconds, half a second, 50 in ten, a step back, and on from there.
    assert rates == [None, None, 10.0, 10.0, 5.0, 5.0, 50.0]


def test_the_rate_of_a_sweep_is_that_of_its_workers_while_they_train() -> None:
    task = {"member_steps": 600, "num_compilations": 2, "spent": {"train": 3.0, "compile": 9.0}}
    assert summarize([task, task, task], 2, seconds=20.0) == {
        "seconds": 20.0,
        "member_steps": 1800,
        "num_compilations": 6,
        "member_steps_per_second": 400.0,
    }
    assert summarize([task | {"spent": {}}], 2, seconds=1.0)["member_steps_per_second"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"record": False}, "leave record at its default"),
        ({"devices": 2}, "say num_workers instead"),
        ({"shard": "1/2"}, "shard is for the members of one process"),
        ({"plan_only": True}, "plan_only is for the members of one process"),
    ],
)
def test_options_that_mean_nothing_to_workers_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(jn.ConfigError, match=said):
        sweep(tiny.experiment(), **options)


def made_of(**resources: float) -> Any:
    """Ray, connected to a cluster of these."""
    return types.SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: resources)


def test_workers_are_given_the_kind_of_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_import_ray", lambda: made_of(CPU=8.0, GPU=2.0))
    told = {}
    for device in (None, "gpu", "cpu"):
        with open_cluster(None, device) as cluster:
            told[device] = str(cluster)
    gpus, cores = "2 workers with a GPU each", "8 workers with a core each"
    assert told == {None: gpus, "gpu": gpus, "cpu": cores}


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_a_device_that_the_cluster_lacks_is_named_before_anything_is_read(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_cluster, "_import_ray", lambda: made_of(CPU=8.0))
    with pytest.raises(jn.ConfigError, match=f"device is '{device}', and Ray's cluster has 0 GPUs and 8 cores"):
        sweep(tiny.experiment(), device=device, run_dir=tmp_path / "swept")
    assert not list(tmp_path.iterdir())


def unread(config: Any) -> Any:
    raise AssertionError("data were read")


def test_workers_refuse_a_mesh_before_anything_is_read() -> None:
    unbuilt = jn.Experiment(tiny.Config(), unread, unread, unread)
    sent = Sent(unbuilt, POINTS, SweepOptions(engine="ray", mesh="members=2"), {"name": "tiny"}, {})
    with pytest.raises(jn.ConfigError, match="mesh members=2,data=1 is of 2 devices, and this run is to use 1"):
        plan_there(sent, None)


def test_a_sweep_for_gpus_is_planned_where_there_are_none() -> None:
    sent = Sent(tiny.experiment(), POINTS, SweepOptions(engine="ray", device="gpu", **HOW), {"name": "tiny"}, {})
    assert plan_there(sent, None).facts["options"]["device"] == "gpu"


def test_halving_stays_in_one_process() -> None:
    with pytest.raises(jn.ConfigError, match="halving compares all members"):
        jn.sweep(tiny.experiment(), jn.halving(POINTS), engine="ray")


def test_a_sweep_goes_on_with_its_own_engine(tmp_path: Path) -> None:
    path = tmp_path / "swept"
    jn.sweep(tiny.experiment(), jn.grid(seed=[0]), run_dir=path, **HOW)
    with pytest.raises(jn.ConfigError, match="was run with engine='local'"):
        sweep(tiny.experiment(), jn.grid(seed=[0]), resume=path)


@pytest.mark.slow
def test_workers_train_what_one_process_does(
    cluster: Any,
    alone: jn.Sweep,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_driver, "SECONDS_BETWEEN_LINES", 0.5)
    found = sweep(tiny.experiment(), ALL_POINTS, run_dir=tmp_path / "ray", progress="plain")
    said = capsys.readouterr().out
    assert_equal(found, alone)
    assert [path.name for path in tasks(tmp_path / "ray")] == ["task-001", "task-002"]
    assert [tiny.read(path, "sweep.json")["numbers"] for path in tasks(tmp_path / "ray")] == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
    ]
    facts = tiny.read(tmp_path / "ray", "sweep.json")
    assert (facts["name"], facts["status"], facts["command"]) == ("tiny", "finished", sys.argv)
    assert facts["summary"]["member_steps"] == 12 * 20
    member = tiny.read(tmp_path / "ray" / "shards" / "task-001" / "members" / "0000")
    assert (member["name"], member["command"]) == ("tiny", sys.argv)
    # A worker has one core, and one device, whatever this process was given.
    assert len(member["devices"]["devices"]) == 1
    assert [line["status"] for line in told_members(tmp_path / "ray")] == ["finished"] * 12 + ["failed"]
    assert "\n  1 of 13 members over" in said, "nothing was said before the first task ended"
    assert "2 workers with a core each" in said and "13 of 13 members over" in said and "tasks left: 0" in said
    assert cluster.is_initialized()
    np.testing.assert_allclose(found.run(7).evaluate()["loss"], found.members[7].final["test_loss"], rtol=1e-5)


def killed_once(folder: Path) -> Callable[[Any], jn.Splits]:
    """Data of which the first process to train with them dies when it would save its members for the third time."""
    save, saved = Checkpoints.save, []

    def save_or_die(checkpoints: Checkpoints, step: int, *others: Any) -> None:
        # The second save waited for the first, which is whole.
        if len(saved) == 2:
            (folder / "killed").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        saved.append(step)
        save(checkpoints, step, *others)

    def data(config: Any) -> jn.Splits:
        # Planning loads the data first, in a process that trains nothing.
        if (folder / "swept").exists():
            with contextlib.suppress(FileExistsError):
                (folder / "mortal").touch(exist_ok=False)
                Checkpoints.save = save_or_die  # type: ignore[method-assign]
        return tiny.splits()

    return data


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_goes_on(cluster: Any, tmp_path: Path) -> None:
    del cluster
    plain = tiny.experiment(num_steps=2_000)
    points, how = jn.grid(learning_rate=[0.1, 0.05, 0.01, 0.02]), {"eval_every": 100, "checkpoint_every": 100}
    mortal = jn.Experiment(plain.config, killed_once(tmp_path), plain.task, plain.optimizer)
    found = sweep(mortal, points, run_dir=tmp_path / "swept", **how)
    killed = int((tmp_path / "killed").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(killed, 0)
    assert_equal(found, jn.sweep(plain, points, record=False, **{**HOW, **how}))
    parts = [tiny.read(path, "sweep.json") for path in tasks(tmp_path / "swept")]
    done = [part["summary"]["member_steps"] for part in parts]
    # The one that took over did not start from the beginning.
    assert sorted(done)[1] == 4_000 and 0 < sorted(done)[0] < 4_000
    assert len(found.lines) == 4 * 400


@pytest.mark.slow
def test_an_interrupted_sweep_runs_what_is_left(cluster: Any, tmp_path: Path) -> None:
    del cluster
    path, experiment = tmp_path / "swept", tiny.experiment(num_steps=2_000)
    points = jn.grid(batch_size=[8, 4, 6], learning_rate=[0.1, 0.05])

    def interrupt() -> None:
        # While the third task is under way, the first being over.
        while not list(path.glob("shards/*/members/*/run.json")) or not list(
            path.glob("shards/task-003/metrics.jsonl")
        ):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    watching = threading.Thread(target=interrupt)
    watching.start()
    stopped = sweep(experiment, points, run_dir=path, num_workers=2, steps_per_call=1)
    watching.join()
    assert stopped.status == "interrupted"
    over = {file: file.stat().st_mtime_ns for file in path.glob("shards/*/members/*/run.json")}
    assert 0 < len(over) < 6
    told = [(line["status"], line["step"]) for line in told_members(path)]
    assert told == [(member.status, member.step) for member in stopped.members]
    assert "interrupted" in dict(told)
    # For so many workers it would be cut otherwise, but all of it was begun.
    resumed = sweep(experiment, points, resume=path, num_workers=6, eval_every=1_000)
    assert len(tasks(path)) == 3
    assert {file: file.stat().st_mtime_ns for file in over} == over
    assert_equal(resumed, jn.sweep(experiment, points, record=False, **HOW | {"eval_every": 1_000}))
    assert tiny.read(path, "sweep.json")["status"] == "finished"
    assert [line["status"] for line in told_members(path)] == ["finished"] * 6


@pytest.mark.slow
def test_a_task_that_fails_leaves_the_others_as_they_are(cluster: Any, alone: jn.Sweep, tmp_path: Path) -> None:
    del cluster
    plain = tiny.experiment()

    def data(config: Any) -> jn.Splits:
        if config.batch_size == 4 and (tmp_path / "swept").exists():
            raise OSError("the disk is gone")
        return tiny.splits()

    broken = jn.Experiment(plain.config, data, plain.task, plain.optimizer)
    found = sweep(broken, ALL_POINTS, run_dir=tmp_path / "swept")
    *found_members, unbuilt = found.members
    assert {member.config["batch_size"] for member in found_members if member.status == "failed"} == {4}
    assert {member.config["batch_size"] for member in found_members if member.status == "finished"} == {8}
    assert all("the disk is gone" in str(member.error) for member in found_members if member.status == "failed")
    assert "batch_size is 0" in str(unbuilt.error)
    # Once what was wrong is mended, the sweep can be completed.
    assert_equal(sweep(plain, ALL_POINTS, resume=tmp_path / "swept"), alone)


def where() -> tuple[str, int]:
    """The platform of this process, and how many threads XLA computes with in it."""
    platform = jax.devices()[0].platform
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return platform, sum(name.endswith("XLAEigen") for name in names)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted as Linux shows them")
def test_a_worker_keeps_to_its_core(cluster: Any) -> None:
    del cluster
    with open_cluster(2) as workers:
        assert workers.ask(where) == ("cpu", 1)
        assert dict(workers.work(where, {"call": ()}, Interruption()))["call"].value == ("cpu", 1)


def test_a_worker_waits_for_the_one_before(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(tmp_path))
        threading.Timer(0.3, stack.pop_all().close).start()
        assert is_locked(tmp_path)
        ray_worker._wait_until_free(tmp_path)
        assert not is_locked(tmp_path)


@pytest.mark.slow
def test_a_call_that_loses_every_worker_fails(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del cluster
    monkeypatch.setattr(ray_cluster, "MAX_RETRIES", 0)
    with open_cluster(1) as workers:
        calls = {"dies": (signal.SIGKILL,), "lives": (0,)}
        outcomes = dict(workers.work(lambda signum: os.kill(os.getpid(), signum), calls, Interruption()))
    assert outcomes["lives"].error is None
    assert str(outcomes["dies"].error).startswith("its worker was lost 1 times: ")


@pytest.mark.slow
def test_what_cannot_travel_is_told_of(cluster: Any, tmp_path: Path) -> None:
    del cluster
    lock = threading.Lock()
    with pytest.raises(jn.ConfigError, match="cannot be sent to Ray's workers"):
        sweep(tiny.experiment(data=lock), run_dir=tmp_path / "swept")


SCRIPT = '''
"""A script of its own: a config class and lambdas that no worker can import."""
import dataclasses, sys
import jax, optax, ray
from jax._src import xla_bridge
import jaxnn as jn
from tests import tiny

@dataclasses.dataclass(frozen=True)
class Inner:
    momentum: float = 0.9

@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 0.1
    batch_size: int = 8
    num_steps: int = 20
    seed: int = 0
    inner: Inner = Inner()

experiment = jn.Experiment(
    Config(),
    data=lambda config: tiny.splits(),
    task=lambda config: jn.tasks.classification(tiny.MODEL),
    optimizer=lambda config: optax.sgd(config.learning_rate, momentum=config.inner.momentum),
)
if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    jn.main(experiment)
    assert not ray.is_initialized(), "what was started here was not shut down"
    assert not xla_bridge.backends_are_initialized(), "the process that hands out the work took a device"
'''


@pytest.mark.slow
def test_a_script_starts_ray_and_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    script = tmp_path / "lonely.py"
    script.write_text(SCRIPT)
    words = (
        "sweep --learning-rate 0.1 0.01 --momentum 0.5 0.9 --engine ray --num-workers 1 --width 2 --steps-per-call 5"
    )
    where = ["--run-dir", str(tmp_path / "swept")]
    done = subprocess.run(
        [sys.executable, str(script), *words.split(), *where],
        env={**os.environ, "PYTHONPATH": str(shell.ROOT), "XDG_CACHE_HOME": str(tmp_path), "RAY_ADDRESS": "local"},
        cwd=shell.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = jn.open_sweep(tmp_path / "swept")
    assert [member.status for member in found.members] == ["finished"] * 4
    assert {member.point["inner.momentum"] for member in found.members} == {0.5, 0.9}
    facts = tiny.read(tmp_path / "swept" / "shards" / "task-001", "sweep.json")
    assert (facts["name"], facts["jax_flags"]["jax_default_matmul_precision"]) == ("lonely", "highest")
