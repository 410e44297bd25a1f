"""What JAX computes on, and why not on the GPU that is there."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import jax

from jaxnn.types import ConfigError

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxnn")
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
# What JAX raises where it cannot open a device: the latter where JAX_PLATFORMS leaves it none.
UNOPENED = (RuntimeError, AssertionError)
_INSTALL = 'pip install "jax[cuda13]"'


def describe_devices() -> dict[str, Any]:
    """The backend, its devices with their memory in bytes, the CPUs of this process, and versions.

    Returns:
        A plain dict for JSON: ``backend``, ``devices``, ``cpu_count``, ``versions``; what is
        unknown, such as the memory of a CPU device, is None.

    Raises:
        ConfigError: JAX cannot start a backend.
    """
    try:
        devices = jax.devices()
    except UNOPENED as error:
        raise ConfigError(
            f"JAX could not start a backend ({_one_line(error)}): "
            f"unset JAX_PLATFORMS, or install what it asks for, for NVIDIA with {_INSTALL}."
        ) from error
    return {
        "backend": jax.default_backend(),
        "devices": [_describe(device) for device in devices],
        "cpu_count": cpu_count(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }


def missing_gpu(root: str | os.PathLike[str] = "/") -> str | None:
    """One sentence if the system has an NVIDIA GPU that JAX does not: why, and what to do.

    Args:
        root: where ``/proc`` and ``/dev`` are looked for.

    Returns:
        None if there is no such GPU, or JAX has it.
    """
    root = pathlib.Path(root)
    seen = [*root.glob("proc/driver/nvidia/gpus/*"), *root.glob("dev/nvidia[0-9]*")]
    if not seen:
        return None
    try:
        jax.devices("cuda")
    except UNOPENED as error:
        plugin = next((name for name in _CUDA_PLUGINS if _version(name)), None)
        return explain_missing_gpu(jax.config.jax_platforms, plugin, _one_line(error))
    return None


def explain_missing_gpu(platforms: str | None, plugin: str | None, error: str) -> str:
    """Why JAX has no GPU where the system has one, and what to do, in one sentence.

    Args:
        platforms: what ``JAX_PLATFORMS`` allows, comma-separated; None or empty: everything.
        plugin: the CUDA plugin of JAX that is installed, or None.
        error: what JAX said when asked for the GPU, in one line.
    """
    allowed = {name.strip() for name in (platforms or "cuda").split(",")}
    pinned = not {"cuda", "gpu"} & allowed
    unpin = f"unset JAX_PLATFORMS, which allows only {platforms!r}"
    seen = "An NVIDIA GPU is visible to the system but not to JAX"
    if plugin is None:
        also = f", and {unpin}" if pinned else ""
        return f"{seen}, because JAX's CUDA plugin is not installed: run {_INSTALL}{also}."
    if pinned:
        return f"{seen}: {unpin}."
    return f"{seen}, because {plugin} failed ({error}): update the driver, or run {_INSTALL} anew."


def _describe(device: jax.Device) -> dict[str, Any]:
    here = device.process_index == jax.process_index()
    stats = (device.memory_stats() if here else None) or {}
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "process": device.process_index,
        "memory_limit_bytes": stats.get("bytes_limit"),
        "memory_in_use_bytes": stats.get("bytes_in_use"),
    }


def cpu_count() -> int | None:
    """How many CPUs this process may use; None: unknown."""
    # A container or taskset may leave this process fewer CPUs than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def processor_name() -> str:
    """What the processor calls itself, where the system tells."""
    facts = pathlib.Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def device_kind(device: jax.Device) -> str:
    """What ``device`` calls itself; of a CPU, what the processor does."""
    return processor_name() if device.platform == "cpu" else device.device_kind


def device_name(device: jax.Device) -> str:
    """What tells ``device`` from others: ``CPU, AMD EPYC, 2 cores``, ``GPU, NVIDIA H100``."""
    return name_device(device.platform, device_kind(device), cpu_count() or 1)


def name_device(platform: str, kind: str, cores: int) -> str:
    """A device's name, of what was noted of it: see `device_name`. ``cores`` are those of a CPU."""
    counted = f", {cores} core{'s' if cores != 1 else ''}" if platform == "cpu" else ""
    return f"{platform.upper()}, {kind}{counted}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
