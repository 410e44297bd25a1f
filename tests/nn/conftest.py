"""A GPU that is not there, for the choice of implementations."""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import pytest


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes JAX report a GPU as its default device."""

    def pretend(capability: str = "9.0") -> None:
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda backend: [device])

    return pretend
