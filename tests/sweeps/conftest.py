"""The sweep that most tests of a record only read, which a process trains once, and a cluster of Ray."""

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import jaxnn as jn
from tests import shell, swept, tiny


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> jn.Sweep:
    """Two groups of four members in two chunks each, of 30 steps."""
    how = {**tiny.MEMBERS, "checkpoint_every": 10, "run_dir": tmp_path_factory.mktemp("finished") / "sweep"}
    return jn.sweep(swept.EXPERIMENT, swept.POINTS, **how)


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
