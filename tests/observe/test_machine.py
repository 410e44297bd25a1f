"""The machine's devices, and why JAX does not use a GPU."""

import importlib.metadata
import json
import os
import pathlib

import jax
import pytest

from jaxnn.observe import describe_devices, missing_gpu
from jaxnn.types import ConfigError


def raise_no_backend(platform: str | None = None) -> None:
    raise RuntimeError("Unable to initialize\nbackend 'cuda'.")


@pytest.fixture
def machine_with_gpu(tmp_path) -> pathlib.Path:
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    return tmp_path


def test_the_description_is_json_and_names_what_there_is() -> None:
    described = describe_devices()
    assert json.loads(json.dumps(described)) == described
    assert described["backend"] == jax.default_backend()
    assert [device["id"] for device in described["devices"]] == [d.id for d in jax.devices()]
    assert {device["platform"] for device in described["devices"]} == {jax.default_backend()}
    assert described["versions"]["jax"] == jax.__version__
    assert set(described["versions"]) >= {"python", "jaxlib", "flax", "optax", "numpy", "jaxnn"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's CPU affinity")
def test_only_the_cpus_this_process_may_use_are_counted() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert describe_devices()["cpu_count"] == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_backend_that_does_not_start_is_one_clear_error(monkeypatch) -> None:
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    with pytest.raises(ConfigError, match="Unable to initialize backend 'cuda'") as caught:
        describe_devices()
    assert "\n" not in str(caught.value)


def test_no_gpu_in_the_system_or_one_that_jax_uses_gives_no_reason(tmp_path, machine_with_gpu, monkeypatch) -> None:
    (tmp_path / "none" / "dev").mkdir(parents=True)
    (tmp_path / "none" / "dev/nvidiactl").touch()  # the driver's own node is no GPU
    assert missing_gpu(tmp_path / "none") is None
    monkeypatch.setattr(jax, "devices", lambda platform: ["cuda:0"])
    assert missing_gpu(machine_with_gpu) is None


def test_a_device_node_is_a_gpu_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert missing_gpu(tmp_path) is not None


@pytest.mark.parametrize(
    ("platforms", "plugin", "words", "absent"),
    [
        (None, False, ["not installed", 'pip install "jax[cuda13]"'], "JAX_PLATFORMS"),
        ("cpu", True, ["unset JAX_PLATFORMS, which allows only 'cpu'"], "pip"),
        ("cpu", False, ["not installed", "unset JAX_PLATFORMS"], "failed"),
        *((p, True, ["jax-cuda13-plugin failed (Unable to ini"], "JAX_PLATFORMS") for p in ("", "cuda", "cpu, gpu")),
    ],
)
def test_each_cause_of_a_missing_gpu_has_its_reason(
    platforms: str | None, plugin: bool, words: list[str], absent: str, machine_with_gpu, monkeypatch
) -> None:
    def version(package: str) -> str:
        if not plugin:
            raise importlib.metadata.PackageNotFoundError
        return "1"

    monkeypatch.setattr(jax, "devices", raise_no_backend)
    monkeypatch.setattr(importlib.metadata, "version", version)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        reason = missing_gpu(machine_with_gpu)
    finally:
        jax.config.update("jax_platforms", before)
    assert reason is not None and reason.startswith("An NVIDIA GPU is visible to the system")
    assert all(word in reason for word in words) and absent not in reason
