"""The devices JAX computes on, why a GPU is not among them, and which of them hold the arrays of a run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import operator
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax

from jaxnn.observe._memory import format_bytes, leaf_nbytes, nbytes
from jaxnn.types import ConfigError, PyTree, TrainingError

# Raised by JAX if it cannot open a device; the latter if JAX_PLATFORMS leaves it none.
UNOPENED = (RuntimeError, AssertionError)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxnn")
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_INSTALL = 'pip install "jax[cuda13]"'


def describe_devices() -> dict[str, Any]:
    """The backend, its devices with their memory in bytes, the CPU cores of this process, and versions, for JSON.

    Unknown values, such as the memory of a CPU device, are None. Raises ConfigError if JAX cannot start a backend.
    """
    try:
        devices = jax.devices()
    except UNOPENED as error:
        raise ConfigError(
            f"JAX could not start a backend ({_one_line(error)}): "
            f"unset JAX_PLATFORMS, or install what it asks for, for NVIDIA with {_INSTALL}."
        ) from error
    described = []
    for device in devices:
        local = device.process_index == jax.process_index()
        stats = (device.memory_stats() if local else None) or {}
        described.append(
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "process": device.process_index,
                "memory_limit_bytes": stats.get("bytes_limit"),
                "memory_in_use_bytes": stats.get("bytes_in_use"),
            }
        )
    return {
        "backend": jax.default_backend(),
        "devices": described,
        "cpu_count": cpu_count(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }


def missing_gpu(root: str | os.PathLike[str] = "/") -> str | None:
    """Why JAX does not use an NVIDIA GPU that the system has, and what to do; None if there is none, or JAX uses it.

    ``root`` is the folder that contains ``proc`` and ``dev``.
    """
    root = pathlib.Path(root)
    if not [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("dev/nvidia[0-9]*")]:
        return None
    try:
        jax.devices("cuda")
        return None
    except UNOPENED as error:
        reason = _one_line(error)
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


def cpu_count() -> int | None:
    """Number of CPU cores this process may use, which a container or taskset limits; None: unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


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
    """Full name of ``device``: ``CPU, AMD EPYC, 2 cores``, ``GPU, NVIDIA H100``."""
    cores = cpu_count() or 1
    counted = f", {cores} core{'s' if cores != 1 else ''}" if device.platform == "cpu" else ""
    return f"{device.platform.upper()}, {device_kind(device)}{counted}"


@dataclasses.dataclass(frozen=True)
class TreePlacement:
    """Where the leaves of one pytree are stored.

    Attributes:
        name: of the pytree, such as ``"parameters"``.
        num_committed: number of leaves that JAX may not move, which pins what is computed from them.
        num_bytes: their logical size; a copy on a second device does not count.
        device_bytes: bytes by device (``"gpu:0"``), copies counted; NumPy arrays are on ``"host"``.
        first_leaf: path of the first leaf by platform (``"gpu"``, ``"cpu"``, ``"host"``).
    """

    name: str
    num_leaves: int
    num_committed: int
    num_bytes: int
    device_bytes: Mapping[str, int]
    first_leaf: Mapping[str, str]

    def line(self) -> str:
        """``parameters: 4 leaves, 1.5 MiB on gpu:0 (committed)``; on several devices also the bytes of the fullest."""
        where = ", ".join(self.device_bytes) or "no device"
        leaves = f"{self.num_leaves} {'leaf' if self.num_leaves == 1 else 'leaves'}"
        all_of_them = self.num_committed == self.num_leaves
        committed = f" ({'' if all_of_them else f'{self.num_committed} '}committed)" if self.num_committed else ""
        each = f", {format_bytes(max(self.device_bytes.values()))} each" if len(self.device_bytes) > 1 else ""
        return f"{self.name}: {leaves}, {format_bytes(self.num_bytes)} on {where}{committed}{each}"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the pytrees of a run are stored: one entry per pytree, in the order given."""

    trees: tuple[TreePlacement, ...]

    def check(self, platform: str) -> None:
        """Raises TrainingError, which names the first leaf that is not on ``platform``, such as ``"gpu"``."""
        for tree in self.trees:
            for found, leaf in tree.first_leaf.items():
                if found != platform:
                    raise TrainingError(
                        f"{tree.name}{leaf} sits on {found}, not on {platform} where the run is "
                        "to compute: move it there with jax.device_put."
                    )

    def lines(self) -> list[str]:
        """One readable line per pytree."""
        return [tree.line() for tree in self.trees]

    def as_json(self) -> dict[str, Any]:
        """Content of ``placement.json``: each pytree's entry by its name."""
        return {tree.name: dataclasses.asdict(tree) for tree in self.trees}


def observe_placement(**trees: PyTree) -> Placement:
    """Reads from the arrays where each pytree is stored, ``parameters=state.params``; moves and waits for nothing."""
    observed = []
    for name, tree in trees.items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        device_bytes: dict[str, int] = {}
        first_leaf: dict[str, str] = {}
        for path, leaf in leaves:
            held = {"host": leaf_nbytes(leaf)}
            if isinstance(leaf, jax.Array):
                shard = leaf_nbytes(leaf, leaf.sharding.shard_shape(leaf.shape))
                devices: list[jax.Device] = sorted(leaf.sharding.device_set, key=operator.attrgetter("id"))
                held = {f"{device.platform}:{device.id}": shard for device in devices}
            for device, num_bytes in held.items():
                device_bytes[device] = device_bytes.get(device, 0) + num_bytes
                first_leaf.setdefault(device.partition(":")[0], jax.tree_util.keystr(path))
        committed = sum(getattr(leaf, "committed", False) for _, leaf in leaves)
        shown = name.replace("_", " ")
        observed.append(TreePlacement(shown, len(leaves), committed, nbytes(tree), device_bytes, first_leaf))
    return Placement(tuple(observed))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
