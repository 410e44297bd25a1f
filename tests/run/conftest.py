"""One trained run, for tests that resume it, read its record or compare with its state."""

import pytest

import jaxnn as jn
from tests import tiny


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    """The tiny experiment, trained for 20 steps without a break; copy the directory to change it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return tiny.fit(tiny.experiment(), path, checkpoint_every=5, keep_last=4)
