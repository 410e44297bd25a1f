"""Memory in bytes: of arrays, at the peak, and available."""

from __future__ import annotations

import math
import os
import pathlib
import resource
import sys

import jax
import numpy as np

from jaxnn.types import PyTree


def nbytes(tree: PyTree) -> int:
    """Bytes of all leaves: arrays, PRNG keys, ``jax.ShapeDtypeStruct`` or Python numbers.

    An array that is sharded or replicated over several devices counts once, at its logical size.
    """
    return sum(leaf_nbytes(leaf) for leaf in jax.tree.leaves(tree))


def leaf_nbytes(leaf: PyTree, shape: tuple[int, ...] | None = None) -> int:
    """Bytes of one leaf, or of a part of it that has ``shape``."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return math.prod(leaf.shape if shape is None else shape) * int(leaf.dtype.itemsize)


def peak_memory_bytes() -> tuple[int, str]:
    """Peak of memory so far, and a phrase that names it.

    It is that of the fullest local device if devices count it (GPU, TPU), else the resident memory of this process.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peaks = [
        (stats["peak_bytes_in_use"], f"in use on {device}")
        for device in jax.local_devices()
        if "peak_bytes_in_use" in (stats := device.memory_stats() or {})
    ]
    return max(peaks) if peaks else (peak, "resident in the process")


def available_bytes(device: jax.Device) -> int | None:
    """Bytes that can still be allocated on ``device``; None: unknown.

    For a CPU the host's available memory, or less if the address space of this process or its container is limited.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    known = [left for left in (_free_on_host(), _left_in_container()) if left is not None]
    # Beyond a limit on the address space XLA does not fail but waits forever: its threads cannot allocate.
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = pathlib.Path("/proc/self/statm")
    if limit != resource.RLIM_INFINITY and taken.exists():
        known.append(limit - int(taken.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(known)) if known else None


def format_bytes(num_bytes: float) -> str:
    """``512 B``, ``1.5 KiB``, ``2.0 MiB``, up to TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(num_bytes, 1) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _free_on_host() -> int | None:
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _left_in_container() -> int | None:
    """What the limit of a container (cgroup v2) leaves; cached files in it can be dropped."""
    folder = pathlib.Path("/sys/fs/cgroup")
    try:
        limit, taken = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - taken + int(counts.get("inactive_file", 0))
