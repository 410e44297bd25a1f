"""The devices JAX computes on, why a GPU is not among them, their memory, and which of them hold a run's arrays."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import math
import operator
import os
import pathlib
import platform
import resource
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxnn._compat import UNOPENED
from jaxnn._text import format_bytes
from jaxnn.kernels import describe_native
from jaxnn.types import ConfigError, PyTree, cpu_count, on_one_line

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxnn", "jaxnn-native")
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_INSTALL = 'pip install "jax[cuda13]"'


def describe_devices() -> dict[str, Any]:
    """Returns the backend, its devices with their memory in bytes, CPU cores, native kernels, and versions.

    Unknown values, such as the memory of a CPU device, are None. Raises ConfigError if JAX cannot start a backend.

    >>> sorted(jn.observe.describe_devices())
    ['backend', 'cpu_count', 'devices', 'native', 'versions']
    """
    try:
        devices = jax.devices()
    except UNOPENED as error:
        raise ConfigError(
            f"JAX could not start a backend ({on_one_line(error)}): "
            f"unset JAX_PLATFORMS, or install what it asks for, for NVIDIA with {_INSTALL}."
        ) from error

    def describe(device: jax.Device) -> dict[str, Any]:
        local = device.process_index == jax.process_index()
        stats = (device.memory_stats() if local else None) or {}
        memory = {"memory_limit_bytes": stats.get("bytes_limit"), "memory_in_use_bytes": stats.get("bytes_in_use")}
        place = {"id": device.id, "platform": device.platform, "kind": device.device_kind}
        return {**place, "process": device.process_index, **memory}

    return {
        "backend": jax.default_backend(),
        "devices": [describe(device) for device in devices],
        "cpu_count": cpu_count(),
        "native": describe_native() if jax.default_backend() == "cpu" else None,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }


def missing_gpu(root: str | os.PathLike[str] = "/") -> str | None:
    """Returns why JAX does not use an NVIDIA GPU that the system has; None if there is none, or JAX uses it.

    ``root`` is the folder that contains ``proc`` and ``dev``.

    >>> if reason := jn.observe.missing_gpu():
    ...     print(reason)
    """
    root = pathlib.Path(root)
    if not [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("dev/nvidia[0-9]*")]:
        return None
    try:
        jax.devices("cuda")
        return None
    except UNOPENED as error:
        reason = on_one_line(error)
    platforms: str | None = jax.config.jax_platforms
    plugin = next((name for name in _CUDA_PLUGINS if _version(name)), None)
    pinned = platforms and not {"cuda", "gpu"} & {name.strip() for name in platforms.split(",")}
    unpin = f"unset JAX_PLATFORMS, which allows only {platforms!r}"
    seen = "An NVIDIA GPU is visible to the system but not to JAX"
    if plugin is None:
        also = f", and {unpin}" if pinned else ""
        return f"{seen}, because JAX's CUDA plugin is not installed: run {_INSTALL}{also}."
    if pinned:
        return f"{seen}: {unpin}."
    return f"{seen}, because {plugin} failed ({reason}): update the driver, or run {_INSTALL} again."


def device_kind(device: jax.Device) -> str:
    """Model name of ``device``; of a CPU, that of the processor if the system reports it."""
    if device.platform != "cpu":
        kind: str = device.device_kind
        return kind
    facts = pathlib.Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def device_name(device: jax.Device) -> str:
    """Returns the full name of ``device``, such as ``GPU, NVIDIA H100``.

    >>> jn.observe.device_name(jax.devices("cpu")[0])
    'CPU, ... core...'
    """
    cores = cpu_count() or 1
    counted = f", {cores} core{'s' if cores != 1 else ''}" if device.platform == "cpu" else ""
    return f"{device.platform.upper()}, {device_kind(device)}{counted}"


def nbytes(tree: PyTree) -> int:
    """Returns the bytes of all leaves: arrays, PRNG keys, ``jax.ShapeDtypeStruct`` or Python numbers.

    An array that is sharded or replicated over several devices counts once, at its logical size.

    >>> jn.observe.nbytes({"kernel": np.zeros((2, 3), np.float32), "bias": jax.ShapeDtypeStruct((3,), jnp.bfloat16)})
    30
    """
    leaves = (leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in jax.tree.leaves(tree))
    return sum(math.prod(leaf.shape) * int(leaf.dtype.itemsize) for leaf in leaves)


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
    known = []
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        known.append(int(fields["MemAvailable"].split()[0]) * 1024)
    if (left := _left_in_container()) is not None:
        known.append(left)
    # Beyond a limit on the address space XLA does not fail but waits forever: its threads cannot allocate.
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = pathlib.Path("/proc/self/statm")
    if limit != resource.RLIM_INFINITY and taken.exists():
        known.append(limit - int(taken.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(known)) if known else None


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the arrays of one pytree are stored."""

    name: str  # of the pytree, such as ``"parameters"``
    num_leaves: int
    num_bytes: int  # their logical size; a copy on a second device does not count
    device_bytes: Mapping[str, int]  # bytes by device (``"gpu:0"``), copies counted

    @staticmethod
    def of(**trees: PyTree) -> list[Placement]:
        """Returns the placement of pytrees of arrays, ``parameters=state.params``; moves nothing, waits for nothing."""
        observed = []
        for name, tree in trees.items():
            leaves, device_bytes = jax.tree.leaves(tree), collections.Counter[str]()
            for leaf in leaves:
                shard = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
                for device in sorted(leaf.sharding.device_set, key=operator.attrgetter("id")):
                    device_bytes[f"{device.platform}:{device.id}"] += nbytes(shard)
            observed.append(Placement(name.replace("_", " "), len(leaves), nbytes(tree), dict(device_bytes)))
        return observed

    def __str__(self) -> str:
        """``parameters: 4 leaves, 1.5 MiB on gpu:0``; on several devices also the bytes of the fullest."""
        where = ", ".join(self.device_bytes) or "no device"
        leaves = f"{self.num_leaves} {'leaf' if self.num_leaves == 1 else 'leaves'}"
        each = f", {format_bytes(max(self.device_bytes.values()))} each" if len(self.device_bytes) > 1 else ""
        return f"{self.name}: {leaves}, {format_bytes(self.num_bytes)} on {where}{each}"


def _left_in_container() -> int | None:
    """What the limit of a container (cgroup v2) leaves; cached files in it can be dropped."""
    folder = pathlib.Path("/sys/fs/cgroup")
    try:
        limit, taken = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - taken + int(counts.get("inactive_file", 0))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
