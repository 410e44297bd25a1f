"""A GPU that is not there, for the choice of implementations."""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import pytest


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes JAX report a GPU as its default device."""

    def pretend(version: str = "cuda 13000", capability: str = "9.0") -> None:
        client = SimpleNamespace(platform_version=version)
        device = SimpleNamespace(client=client, compute_capability=capability)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda backend: [device])

    return pretend
