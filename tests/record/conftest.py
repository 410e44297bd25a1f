"""The cache of compiled programs, for tests that train one network many times."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def cached(compiled_once: None) -> None:
    """Caches compiled programs."""
