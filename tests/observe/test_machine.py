"""The devices and memory, why JAX uses no GPU, where arrays are stored; spans of the clock, throughput and tables."""

import importlib.metadata
import json
import os
import pathlib
import resource
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn import observe
from jaxnn.observe import Clock, Table, markdown_table, steady_throughput, text_table
from jaxnn.types import ConfigError

PLATFORM = jax.default_backend()


def raise_no_backend(platform: str | None = None) -> None:
    raise RuntimeError("Unable to initialize\nbackend 'cuda'.")


def test_description_is_json(monkeypatch):
    described = observe.describe_devices()
    assert json.loads(json.dumps(described)) == described and described["backend"] == PLATFORM
    assert [device["id"] for device in described["devices"]] == [d.id for d in jax.devices()]
    assert described["versions"]["jax"] == jax.__version__
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert observe.describe_devices()["cpu_count"] == 2, "those of this process"
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    with pytest.raises(ConfigError, match="Unable to initialize backend 'cuda'"):  # in one line
        observe.describe_devices()


def test_missing_gpu_has_a_reason(tmp_path, monkeypatch):
    plugins: list[str] = []

    def version(package: str) -> str:
        if not plugins:
            raise importlib.metadata.PackageNotFoundError
        return "1"

    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    monkeypatch.setattr(importlib.metadata, "version", version)
    before = jax.config.jax_platforms
    try:
        for platforms, found, words, absent in (
            (None, [], 'not installed: run pip install "jax[cuda13]"', "JAX_PLATFORMS"),
            ("cpu", ["1"], "unset JAX_PLATFORMS, which allows only 'cpu'", "pip"),
            ("cpu", [], ", and unset JAX_PLATFORMS", "failed"),
            (None, ["1"], "jax-cuda13-plugin failed (Unable to ini", "JAX_PLATFORMS"),
            ("cpu, gpu", ["1"], "jax-cuda13-plugin failed (Unable to ini", "JAX_PLATFORMS"),
        ):
            jax.config.update("jax_platforms", platforms)
            plugins[:] = found
            reason = observe.missing_gpu(tmp_path) or ""
            assert reason.startswith("An NVIDIA GPU is visible to the system") and words in reason
            assert absent not in reason
    finally:
        jax.config.update("jax_platforms", before)


def test_no_reason_without_a_gpu_or_if_jax_uses_it(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()  # the driver's own node is no GPU
    assert observe.missing_gpu(tmp_path) is None
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(jax, "devices", lambda platform: ["cuda:0"])
    assert observe.missing_gpu(tmp_path) is None
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    assert observe.missing_gpu(tmp_path) is not None


def device(**stats: int) -> Any:
    """A GPU that reports its memory."""
    return SimpleNamespace(platform="gpu", id=0, memory_stats=lambda: stats)


def test_nbytes_of_every_kind_of_leaf():
    keys, planned = jax.random.split(jax.random.key(0), 3), jax.ShapeDtypeStruct((2,), jnp.int32)
    tree = [jnp.zeros((2, 3)), jnp.zeros(5, jnp.bfloat16), np.zeros(7, np.uint8), keys, planned, 1.0, None]
    assert observe.nbytes(tree) == 6 * 4 + 5 * 2 + 7 + 3 * 2 * 4 + 2 * 4 + 8 and observe.nbytes({}) == 0


def test_peak_memory_is_the_process_or_the_fullest_device(monkeypatch):
    peak, what = observe.peak_memory_bytes()
    assert what == "resident in the process" and peak > 2**25
    devices = [device(peak_bytes_in_use=5), device(peak_bytes_in_use=9), device()]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert observe.peak_memory_bytes() == (9, f"in use on {devices[1]}")


@pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux's own numbers")
def test_available_bytes(monkeypatch):
    assert observe.available_bytes(device(bytes_limit=100, bytes_in_use=30)) == 70
    assert observe.available_bytes(device()) is None
    cpu, page = jax.devices("cpu")[0], os.sysconf("SC_PAGE_SIZE")
    assert 0 < (observe.available_bytes(cpu) or 0) <= os.sysconf("SC_PHYS_PAGES") * page
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * page
    for limit, least, most in ((taken + 2**26, 1, 2**27), (taken // 2, 0, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, resource.RLIM_INFINITY))
        left = observe.available_bytes(cpu)
        assert left is not None and least <= left <= most


def test_format_bytes():
    # 1023.999 KiB rounds up to the next unit.
    sizes = (0, 1023, 1024, 1536, 1024**2 - 1, 5 * 1024**3, 3 * 1024**5)
    texts = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "3072.0 TiB"]
    assert [*map(observe.format_bytes, sizes)] == texts


def test_placement_counts_copies_and_shards():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    params = {"kernel": jnp.zeros((2, 3)), "bias": jax.device_put(jnp.zeros(3), jax.devices()[0])}
    replicated = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P()))
    sharded = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P("data")))
    trees = {"parameters": params, "key": jax.random.key(0), "copies": replicated, "data": sharded, "model_state": {}}
    observed = {tree.name: tree for tree in observe.observe_placement(**trees)}
    assert {name: tree.device_bytes for name, tree in observed.items()} == {
        "parameters": {f"{PLATFORM}:0": 36},
        "key": {f"{PLATFORM}:0": 8},
        "copies": {f"{PLATFORM}:0": 32, f"{PLATFORM}:1": 32},
        "data": {f"{PLATFORM}:0": 16, f"{PLATFORM}:1": 16},
        "model state": {},
    }
    assert [tree.num_bytes for tree in observed.values()] == [36, 8, 32, 32, 0]
    assert str(observed["parameters"]) == f"parameters: 2 leaves, 36 B on {PLATFORM}:0"
    assert str(observed["copies"]) == f"copies: 1 leaf, 32 B on {PLATFORM}:0, {PLATFORM}:1, 32 B each"
    assert str(observed["model state"]) == "model state: 0 leaves, 0 B on no device"


def test_inner_spans_pause_outer_ones():
    now = [100.0]
    clock = Clock(lambda: now[0])
    assert clock.current == (None, None, 100.0)
    with clock.span("compute"):
        now[0] += 1.0
        with clock.span("evaluation", "of a test"):
            now[0] += 2.0
            assert clock.seconds["evaluation"] == 2.0, "an open span counts up to now"
            assert clock.current == ("evaluation", "of a test", 101.0), "reading the seconds starts no span"
            with pytest.raises(KeyError), clock.span("checkpoint"):
                now[0] += 4.0
                raise KeyError
        assert clock.current == ("compute", None, 107.0)
        now[0] += 8.0
    now[0] += 16.0  # outside every span
    with clock.span("evaluation"), clock.span("evaluation"):
        now[0] += 32.0
    # compute 1 + 8, evaluation 2 + 32, checkpoint 4; other 16; together 63, the wall time.
    assert clock.seconds == {"compute": 9.0, "evaluation": 34.0, "checkpoint": 4.0, "other": 16.0}


def test_throughput_is_the_median_with_the_interquartile_range():
    # Rates 10, 20, 30, 40, 50: median 30, quartiles 20 and 40, spread (40 - 20) / 30.
    assert steady_throughput([30.0, 10.0, 50.0, 20.0, 40.0]) == (30.0, pytest.approx(2 / 3), 5)
    assert steady_throughput([]) is None


def test_tables_are_aligned_and_escaped():
    rows, header = [("a", ""), ("longer", "<b>|")], ("name", "x")
    assert text_table(rows, header) == "name    x\na\nlonger  <b>|", "without trailing spaces"
    assert markdown_table(rows, header).splitlines()[1:] == ["| --- | --- |", "| a |  |", "| longer | <b>\\| |"]
    noted = Table(header, rows, ["a note"])
    assert repr(noted).endswith("\na note") and noted._repr_html_().endswith("<p>a note</p>")
    assert "&lt;b&gt;" in noted._repr_html_() and "<b>" not in Table(None, rows)._repr_html_()
