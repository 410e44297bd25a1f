"""Bytes of arrays, of the process and of devices."""

import os
import pathlib
import re
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.observe import available_bytes, format_bytes, nbytes, peak_memory_bytes


class Device:
    """A device that keeps count of its memory."""

    platform = "gpu"

    def __init__(self, **stats: int) -> None:
        self.stats = stats

    def memory_stats(self) -> dict[str, int]:
        return self.stats

    def __str__(self) -> str:
        return "cuda:0"


def test_bytes_of_a_tree_with_every_kind_of_leaf() -> None:
    tree = {
        "float32": jnp.zeros((2, 3)),  # 6 * 4 = 24
        "bfloat16": jnp.zeros(5, jnp.bfloat16),  # 5 * 2 = 10
        "numpy": np.zeros(7, np.uint8),  # 7
        "keys": jax.random.split(jax.random.key(0), 3),  # 3 * 2 * 4 = 24
        "planned": jax.ShapeDtypeStruct((2,), jnp.int32),  # 2 * 4 = 8
        "number": 1.0,  # 8
        "nothing": None,
    }
    assert nbytes(tree) == 24 + 10 + 7 + 24 + 8 + 8
    assert nbytes({}) == 0


def test_the_peak_of_a_cpu_run_is_the_process_and_covers_what_it_holds() -> None:
    held = np.ones(32 * 1024 * 1024, np.uint8)
    peak, what = peak_memory_bytes()
    assert what == "resident in the process"
    assert held.nbytes < peak
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        (high_water,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert peak / 1024 == pytest.approx(int(high_water), rel=0.5)


def test_the_peak_of_a_gpu_run_is_its_fullest_device(monkeypatch) -> None:
    devices = [Device(peak_bytes_in_use=5), Device(peak_bytes_in_use=9), Device()]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert peak_memory_bytes() == (9, "in use on cuda:0")
    assert available_bytes(Device(bytes_limit=100, bytes_in_use=30)) == 70
    assert available_bytes(Device()) is None


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a second opinion")
def test_available_bytes_of_the_host() -> None:
    on_host = available_bytes(jax.devices("cpu")[0])
    # All pages that nobody uses are available, and no more than there are.
    page = os.sysconf("SC_PAGE_SIZE")
    unused, installed = (os.sysconf(name) * page for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    assert on_host is not None and unused / 2 < on_host <= installed


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the address space")
def test_a_limit_on_the_address_space_leaves_less(monkeypatch: pytest.MonkeyPatch) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * page
    limit = taken + 2**26
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    left = available_bytes(jax.devices("cpu")[0])
    assert left is not None and left <= 2**27
    monkeypatch.setattr(resource, "getrlimit", lambda _: (taken // 2, resource.RLIM_INFINITY))
    assert available_bytes(jax.devices("cpu")[0]) == 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),  # 1023.999 KiB rounds up to the next unit
        (5 * 1024**3, "5.0 GiB"),
        (3 * 1024**5, "3072.0 TiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
