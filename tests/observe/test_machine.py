"""The machine's devices and memory, why JAX does not use a GPU, and where arrays are stored."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.observe import (
    Placement,
    available_bytes,
    check_placement,
    describe_devices,
    format_bytes,
    missing_gpu,
    nbytes,
    observe_placement,
    peak_memory_bytes,
)
from jaxnn.types import ConfigError, TrainingError

PLATFORM = jax.default_backend()


def raise_no_backend(platform: str | None = None) -> None:
    raise RuntimeError("Unable to initialize\nbackend 'cuda'.")


# --- devices ---


def test_description_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    described = describe_devices()
    assert json.loads(json.dumps(described)) == described
    assert described["backend"] == PLATFORM
    assert [device["id"] for device in described["devices"]] == [d.id for d in jax.devices()]
    assert {device["platform"] for device in described["devices"]} == {PLATFORM}
    assert described["versions"]["jax"] == jax.__version__
    assert set(described["versions"]) >= {"python", "jaxlib", "flax", "optax", "numpy", "jaxnn"}
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    with pytest.raises(ConfigError, match="Unable to initialize backend 'cuda'") as caught:
        describe_devices()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's CPU affinity")
def test_cpu_count_is_that_of_this_process() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert describe_devices()["cpu_count"] == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("platforms", "plugin", "words", "absent"),
    [
        (None, False, ["not installed", 'pip install "jax[cuda13]"'], "JAX_PLATFORMS"),
        ("cpu", True, ["unset JAX_PLATFORMS, which allows only 'cpu'"], "pip"),
        ("cpu", False, ["not installed", "unset JAX_PLATFORMS"], "failed"),
        *((p, True, ["jax-cuda13-plugin failed (Unable to ini"], "JAX_PLATFORMS") for p in ("", "cuda", "cpu, gpu")),
    ],
)
def test_missing_gpu_has_a_reason(
    platforms: str | None, plugin: bool, words: list[str], absent: str, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    def version(package: str) -> str:
        if not plugin:
            raise importlib.metadata.PackageNotFoundError
        return "1"

    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    monkeypatch.setattr(importlib.metadata, "version", version)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        reason = missing_gpu(tmp_path)
    finally:
        jax.config.update("jax_platforms", before)
    assert reason is not None and reason.startswith("An NVIDIA GPU is visible to the system")
    assert all(word in reason for word in words) and absent not in reason


def test_no_reason_without_a_gpu_or_if_jax_uses_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()  # the driver's own node is no GPU
    assert missing_gpu(tmp_path) is None
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(jax, "devices", lambda platform: ["cuda:0"])
    assert missing_gpu(tmp_path) is None
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    assert missing_gpu(tmp_path) is not None


# --- memory ---


class Device:
    """A device that reports its memory."""

    platform = "gpu"

    def __init__(self, **stats: int) -> None:
        self.stats = stats

    def memory_stats(self) -> dict[str, int]:
        return self.stats

    def __str__(self) -> str:
        return "cuda:0"


def test_nbytes_of_every_kind_of_leaf() -> None:
    tree = {
        "float32": jnp.zeros((2, 3)),  # 6 * 4 = 24
        "bfloat16": jnp.zeros(5, jnp.bfloat16),  # 5 * 2 = 10
        "numpy": np.zeros(7, np.uint8),  # 7
        "keys": jax.random.split(jax.random.key(0), 3),  # 3 * 2 * 4 = 24
        "planned": jax.ShapeDtypeStruct((2,), jnp.int32),  # 2 * 4 = 8
        "number": 1.0,  # 8
        "nothing": None,
    }
    assert nbytes(tree) == 24 + 10 + 7 + 24 + 8 + 8 and nbytes({}) == 0


def test_peak_memory_is_the_process_or_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    held = np.ones(32 * 1024 * 1024, np.uint8)
    peak, what = peak_memory_bytes()
    assert what == "resident in the process" and held.nbytes < peak
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        (high_water,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert peak / 1024 == pytest.approx(int(high_water), rel=0.5)
    devices = [Device(peak_bytes_in_use=5), Device(peak_bytes_in_use=9), Device()]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert peak_memory_bytes() == (9, "in use on cuda:0")


@pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux's own numbers")
def test_available_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes(Device(bytes_limit=100, bytes_in_use=30)) == 70  # type: ignore[arg-type]
    assert available_bytes(Device()) is None  # type: ignore[arg-type]
    cpu, page = jax.devices("cpu")[0], os.sysconf("SC_PAGE_SIZE")
    # All unused pages are available, and no more than are installed.
    unused, installed = (os.sysconf(name) * page for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    assert unused / 2 < (available_bytes(cpu) or 0) <= installed
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * page
    for limit, least, most in ((taken + 2**26, 1, 2**27), (taken // 2, 0, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, resource.RLIM_INFINITY))
        left = available_bytes(cpu)
        assert left is not None and least <= left <= most


def test_format_bytes() -> None:
    # 1023.999 KiB rounds up to the next unit.
    sizes = (0, 1023, 1024, 1536, 1024**2 - 1, 5 * 1024**3, 3 * 1024**5)
    texts = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "3072.0 TiB"]
    assert [*map(format_bytes, sizes)] == texts


# --- placement ---


def test_placement_counts_copies_shards_and_committed_leaves() -> None:
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=types, devices=jax.devices()[:2])
    params = {"kernel": jnp.zeros((2, 3)), "bias": jax.device_put(jnp.zeros(3), jax.devices()[0])}
    replicated = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P()))
    sharded = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P("data")))
    trees = {"parameters": params, "key": jax.random.key(0), "copies": replicated, "data": sharded, "model_state": {}}
    observed = {tree.name: tree for tree in observe_placement(**trees)}
    assert {name: tree.device_bytes for name, tree in observed.items()} == {
        "parameters": {f"{PLATFORM}:0": 36},
        "key": {f"{PLATFORM}:0": 8},
        "copies": {f"{PLATFORM}:0": 32, f"{PLATFORM}:1": 32},
        "data": {f"{PLATFORM}:0": 16, f"{PLATFORM}:1": 16},
        "model state": {},
    }
    counts = [(tree.num_leaves, tree.num_bytes) for tree in observed.values()]
    assert counts == [(2, 36), (1, 8), (1, 32), (1, 32), (0, 0)]
    assert tuple(observed["parameters"].first_leaf) == (PLATFORM,) and observed["parameters"].num_committed == 1
    assert str(observed["parameters"]).endswith("(1 committed)")
    assert str(observed["model state"]) == "model state: 0 leaves, 0 B on no device"
    check_placement(observed.values(), PLATFORM)


def test_check_placement_names_the_first_leaf_elsewhere() -> None:
    state = {"layer": {"bias": jnp.zeros(2), "kernel": np.zeros((2, 2), np.float32)}, "rest": np.zeros(3, np.float32)}
    placement = observe_placement(optimizer_state=state)
    assert placement[0].device_bytes == {f"{PLATFORM}:0": 8, "host": 16 + 12}
    good = Placement("parameters", 4, 4, 1536 * 1024, {"gpu:0": 1}, {"gpu": "['a']"})
    bad = Placement("data", 2, 1, 8, {"gpu:0": 4, "cpu:0": 4}, {"gpu": "[0]", "cpu": "[1]"})
    check_placement([good], "gpu")
    for placements, platform, words in (
        (placement, PLATFORM, r"^optimizer state\['layer'\]\['kernel'\] is on host"),
        ([good, bad], "gpu", r"^data\[1\] is on cpu, not on gpu"),
    ):
        with pytest.raises(TrainingError, match=words):
            check_placement(placements, platform)
    assert str(good) == "parameters: 4 leaves, 1.5 MiB on gpu:0 (committed)"
    assert json.loads(json.dumps(dataclasses.asdict(good)))["device_bytes"] == {"gpu:0": 1}
