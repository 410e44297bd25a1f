"""A sweep on Ray: workers train what one process does, and a lost worker is replaced."""

import contextlib
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn.record import Checkpoints
from tests import shell, tiny

HOW: dict[str, Any] = {**tiny.HOW, "vmap_size": 2}
# Of the last the experiment cannot be built.
POINTS = jn.grid(learning_rate=[0.1, 0.05], batch_size=[8, 4]) + jn.grid(batch_size=[0], learning_rate=[0.1])

FOUR = jn.grid(learning_rate=[0.1, 0.05, 0.01, 0.02])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray on this machine with two workers, which can import what a test module defines."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    path = os.pathsep.join([str(shell.ROOT), str(shell.ROOT / "tests" / "sweeps")])
    before = signal.getsignal(signal.SIGTERM)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    with warnings.catch_warnings():
        # Ray forks to execute another program at once, which JAX's threads do not mind.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(address="local", num_cpus=2, runtime_env={"env_vars": {"PYTHONPATH": path}}, **quiet)
    signal.signal(signal.SIGTERM, before)
    yield ray
    ray.shutdown()


def sweep(experiment: jn.Experiment[Any], points: jn.search.Points = POINTS, **options: Any) -> jn.Sweep:
    return jn.sweep(experiment, points, executor="ray", **{**HOW, **options})


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
            sweep(tiny.experiment(), **options)
    with pytest.raises(jn.ConfigError, match="halving compares all members"):
        jn.sweep(tiny.experiment(), jn.search.halving(POINTS), executor="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(jn.ConfigError, match=r"needs ray, which is not installed: pip install \"jaxnn\[ray\]\"\.$"):
        sweep(tiny.experiment(), run_dir=tmp_path / "swept")
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
        sweep(tiny.experiment(), run_dir=tmp_path / "swept")
    with pytest.raises(jn.ConfigError, match="device is 'gpu', and Ray's cluster has 0 GPUs and 8 cores"):
        sweep(tiny.experiment(), run_dir=tmp_path / "swept", device="gpu")
    assert calls == ["joined", "left"] * 2 and not list(tmp_path.iterdir())
    ray.init = silent
    with pytest.raises(jn.ConfigError, match="cluster cannot be used .*no answer.*: start it, or unset"):
        sweep(tiny.experiment())


@pytest.mark.slow
def test_workers_train_what_one_process_does(cluster, tmp_path, capsys):
    found = sweep(tiny.experiment(), run_dir=tmp_path / "ray", progress="plain")
    printed = capsys.readouterr().out
    assert_equal(found, jn.sweep(tiny.experiment(), POINTS, record=False, **HOW))
    assert "2 workers with a core each" in printed and "shard 1/2 ended" in printed
    assert "sweep of 5: 4 finished, 1 failed" in printed and cluster.is_initialized()
    shards = [tmp_path / "ray" / "shards" / f"{part}-of-2" for part in (1, 2)]
    for facts in (tiny.read(path, "sweep.json") for path in shards):
        # A worker has one core, and one device, whatever this process was given.
        assert facts["command"] == sys.argv and len(facts["devices"]["devices"]) == 1
    np.testing.assert_allclose(found.run(3).evaluate()["loss"], found.members[3].final["test_loss"], rtol=1e-5)


def killed_once(plain: jn.Experiment[Any], folder: Path) -> jn.Experiment[Any]:
    """``plain``, of which the first process that trains is killed at its third save, when its first is complete."""

    def data(config: Any) -> jn.Splits:
        # Planning loads the data first, in a process that trains nothing. One process creates the file.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            (folder / "swept" / "mortal").touch(exist_ok=False)
            save, steps = Checkpoints.save, iter(range(2))

            def save_or_end(checkpoints: Checkpoints, *arguments: Any) -> None:
                if next(steps, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                save(checkpoints, *arguments)

            Checkpoints.save = save_or_end  # type: ignore[method-assign]
        return tiny.splits()

    return jn.Experiment(plain.config, data, plain.task, plain.optimizer)


@pytest.mark.slow
def test_killed_worker_is_replaced_and_its_shard_continues(cluster, tmp_path):
    plain, how = tiny.experiment(num_steps=2_000), {"eval_every": 100, "checkpoint_every": 100}
    found = sweep(killed_once(plain, tmp_path), FOUR, run_dir=tmp_path / "swept", **how)
    assert (tmp_path / "swept" / "mortal").exists()
    assert_equal(found, jn.sweep(plain, FOUR, record=False, **{**HOW, **how}))
    shards = (tmp_path / "swept" / "shards").iterdir()
    least, most = sorted(tiny.read(path, "sweep.json")["summary"]["member_steps"] for path in shards)
    # The worker that took over did not start from the beginning.
    assert most == 4_000 and 0 < least < 4_000 and len(found.lines) == 4 * 400


SCRIPT = '''
"""A config class and lambdas that no worker can import."""
import dataclasses, optax, jaxnn as jn
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
def test_script_starts_ray_and_ends_it(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    (tmp_path / "lonely.py").write_text(SCRIPT)
    words = "sweep --momentum 0.5 0.9 --executor ray --num-workers 1 --vmap-size 2 --steps-per-call 5 --run-dir"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "RAY_ADDRESS": "local"}
    done = shell.python(tmp_path / "lonely.py", *words.split(), tmp_path / "swept", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [member.status for member in jn.open_sweep(tmp_path / "swept").members] == ["finished"] * 2
    assert tiny.read(tmp_path / "swept" / "shards" / "1-of-1", "sweep.json")["name"] == "lonely"
