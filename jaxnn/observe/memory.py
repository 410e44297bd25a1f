"""Memory in bytes: what arrays take, what was taken at most, what is left."""

from __future__ import annotations

import math
import os
import pathlib
import sys

import jax
import numpy as np

from jaxnn.types import PyTree


def nbytes(tree: PyTree) -> int:
    """Bytes of all leaves: arrays, PRNG keys, ``jax.ShapeDtypeStruct`` or Python numbers.

    An array spread or copied over several devices counts once, at its logical size.
    """
    return sum(leaf_nbytes(leaf) for leaf in jax.tree.leaves(tree))


def leaf_nbytes(leaf: PyTree, shape: tuple[int, ...] | None = None) -> int:
    """Bytes of one leaf, or of a part of it that has ``shape``."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return math.prod(leaf.shape if shape is None else shape) * int(leaf.dtype.itemsize)


def peak_memory_bytes() -> tuple[int, str]:
    """The most memory taken so far, and what that number is of.

    Returns:
        The peak of the fullest local device where devices keep count (GPU, TPU), else that of the
        resident memory of this process; and a phrase that says which.
    """
    peaks = [
        (stats["peak_bytes_in_use"], f"in use on {device}")
        for device in jax.local_devices()
        if "peak_bytes_in_use" in (stats := device.memory_stats() or {})
    ]
    return max(peaks) if peaks else (_peak_resident_bytes(), "resident in the process")


def available_bytes(device: jax.Device) -> int | None:
    """Bytes that may still be taken on ``device``; None: unknown.

    For a CPU the host's free memory, or what a limit on this process's address space or its container leaves of it.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    known = [left for left in (_available_host_bytes(), _address_space_left(), _container_left()) if left is not None]
    return max(0, min(known)) if known else None


def format_bytes(num_bytes: float) -> str:
    """``512 B``, ``1.5 KiB``, ``2.0 MiB``, and so on up to TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(num_bytes, 1) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _peak_resident_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _address_space_left() -> int | None:
    """Beyond a limit on the address space XLA does not fail but waits for ever: its threads cannot allocate."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = pathlib.Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not taken.exists():
        return None
    return limit - int(taken.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _container_left(root: str = "/sys/fs/cgroup") -> int | None:
    """What the limit of a container (cgroup v2) leaves; files that are cached there can be dropped."""
    folder = pathlib.Path(root)
    try:
        limit, taken = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - taken + int(counts.get("inactive_file", 0))


def _available_host_bytes() -> int | None:
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
