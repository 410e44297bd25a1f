"""The sweep that most tests of a record only read: a process trains it once."""

import pytest

import jaxnn as jn
from tests import tiny


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> jn.Sweep:
    """Two groups of four members in two chunks each, of 30 steps."""
    points = jn.grid(learning_rate=[0.01, 0.1, 0.2, 0.3], batch_size=[8, 16])
    how = {**tiny.MEMBERS, "checkpoint_every": 10}
    return jn.sweep(tiny.experiment(num_steps=30), points, run_dir=tmp_path_factory.mktemp("finished") / "sweep", **how)
