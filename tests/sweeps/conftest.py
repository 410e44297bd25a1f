"""The sweep that most tests of a record only read: a process trains it once."""

import pytest

import jaxnn as jn
from tests import swept, tiny


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> jn.Sweep:
    """Two groups of four members in two chunks each, of 30 steps."""
    how = {**tiny.MEMBERS, "checkpoint_every": 10, "run_dir": tmp_path_factory.mktemp("finished") / "sweep"}
    return jn.sweep(swept.EXPERIMENT, swept.POINTS, **how)
