"""What the machine has, and why JAX may not see it."""

import json
import os
import pathlib

import jax
import pytest

from jaxnn.observe import describe_devices, missing_gpu
from jaxnn.observe.devices import explain_missing_gpu
from jaxnn.types import ConfigError

NO_BACKEND = "Unknown backend cuda. Available backends are ['cpu']"


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


def test_a_backend_that_does_not_start_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    with pytest.raises(ConfigError, match="Unable to initialize backend 'cuda'") as caught:
        describe_devices()
    assert "\n" not in str(caught.value)


def test_no_gpu_in_the_system_is_nothing_to_say(tmp_path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()  # the driver's own node is no GPU
    assert missing_gpu(tmp_path) is None


def test_a_gpu_that_jax_has_is_nothing_to_say(machine_with_gpu, monkeypatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda platform: ["cuda:0"])
    assert missing_gpu(machine_with_gpu) is None


def test_a_gpu_that_jax_lacks_is_said(machine_with_gpu, monkeypatch) -> None:
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    sentence = missing_gpu(machine_with_gpu)
    assert sentence is not None and sentence.startswith("An NVIDIA GPU is visible to the system")


def test_a_device_node_is_a_gpu_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert missing_gpu(tmp_path) is not None


def test_each_cause_has_its_sentence() -> None:
    plugin = "jax-cuda13-plugin"
    absent = explain_missing_gpu(None, None, NO_BACKEND)
    assert "not installed" in absent and 'pip install "jax[cuda13]"' in absent
    assert "JAX_PLATFORMS" not in absent

    pinned = explain_missing_gpu("cpu", plugin, NO_BACKEND)
    assert "unset JAX_PLATFORMS, which allows only 'cpu'" in pinned and "pip" not in pinned

    both = explain_missing_gpu("cpu", None, NO_BACKEND)
    assert "not installed" in both and "unset JAX_PLATFORMS" in both

    for platforms in ("", "cuda", "cpu, gpu"):
        failed = explain_missing_gpu(platforms, plugin, "CUDA driver too old")
        assert f"{plugin} failed (CUDA driver too old)" in failed
        assert "JAX_PLATFORMS" not in failed
