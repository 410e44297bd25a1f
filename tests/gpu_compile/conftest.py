"""Programs for GPUs are compiled each time: without a GPU, JAX cannot load them from its cache."""

import pytest

from tests.conftest import use_cache


@pytest.fixture(scope="module", autouse=True)
def cached() -> None:
    """In place of the cache that other tests use."""
    use_cache(None, 0.0)
