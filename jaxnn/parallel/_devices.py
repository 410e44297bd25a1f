"""Devices of a run, and the mesh that arranges them along named axes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxnn.nn import platform as default_platform
from jaxnn.observe import UNOPENED, missing_gpu
from jaxnn.types import ConfigError, suggest

type Wanted = int | Literal["all"] | None

DATA = "data"
"""The mesh axis that batches are split over."""
PLATFORMS = ("cpu", "gpu", "tpu")
INSTALL = {
    "gpu": 'install JAX for NVIDIA GPUs with pip install "jax[cuda13]", or choose --device cpu',
    "tpu": 'install JAX for TPUs with pip install "jax[tpu]", or choose --device cpu',
    "cpu": "unset JAX_PLATFORMS",
}


def find_devices(platform: str | None = None) -> list[jax.Device]:
    """All devices of ``platform``, of all processes; those of one process are next to each other.

    None is where a computation that names no device runs. Raises ConfigError, with the reason and what to install, if
    JAX cannot open it.
    """
    try:
        devices = jax.devices(platform or default_platform())
    except UNOPENED as error:
        reason = f" ({' '.join(str(error).split()).rstrip('.')})" if str(error) else ""
        remedy = missing_gpu() if platform == "gpu" else None
        if remedy is None and (allowed := jax.config.jax_platforms):
            remedy = f"JAX_PLATFORMS allows only {allowed!r}: unset it, or name what is there."
        remedy = remedy or f"{INSTALL.get(platform or 'cpu', INSTALL['cpu'])}."
        what = "JAX cannot open a device" if platform is None else f"device is {platform!r}, which JAX cannot open"
        raise ConfigError(f"{what} here{reason}: {remedy}") from error
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def first_devices(wanted: Sequence[str] | None = None) -> dict[str, jax.Device]:
    """The first device of each kind in this process, ``{"cpu": …, "gpu": …}``, or of the ``wanted`` kinds alone.

    Raises ConfigError if one of those is unknown or JAX does not have it here.
    """
    found: dict[str, jax.Device] = {}
    for kind in PLATFORMS:
        with contextlib.suppress(*UNOPENED):
            found[kind] = jax.local_devices(backend=kind)[0]
    if wanted is None:
        return found
    if not wanted:
        raise ConfigError("devices is empty: give kinds such as cpu,gpu, or leave it out for all that there are.")
    for kind in wanted:
        if kind not in PLATFORMS:
            raise ConfigError(f"devices has {kind!r}, and there is no such kind: {suggest(kind, PLATFORMS)}.")
        if kind not in found:
            reason = (missing_gpu() if kind == "gpu" else None) or f"JAX has {', '.join(found)} here"
            raise ConfigError(f"devices asks for {kind}, which is not there: {reason.rstrip('.')}.")
    return {kind: device for kind, device in found.items() if kind in wanted}


def choose_devices(devices: Sequence[jax.Device], wanted: Wanted, default: int | None = None) -> list[jax.Device]:
    """The first ``wanted`` of ``devices``, ``default`` if that is None, all if both are.

    Raises ConfigError if there are fewer, or some process would have none.
    """
    count = len(devices) if wanted == "all" else wanted or default or len(devices)
    if count > len(devices):
        platform, remedy = devices[0].platform, "ask for no more than these"
        if platform == "cpu":
            remedy += f", or have the CPU stand for {count} with JAX_NUM_CPU_DEVICES={count} in the environment"
        available = f"{len(devices)} {platform.upper()} device{'s are' if len(devices) > 1 else ' is'} available"
        raise ConfigError(f"requested {count} devices, but only {available}: {remedy}.")
    if jax.process_count() > 1 and count != len(devices):
        raise ConfigError(
            f"devices is {count}, and this run's {jax.process_count()} processes have {len(devices)}: all of them take "
            "part, so leave devices out, or start fewer processes."
        )
    return list(devices[:count])


def computing_on(platform: str | None) -> contextlib.AbstractContextManager[object]:
    """Within the block, what names no device runs on ``platform``; None: where it does anyway."""
    if platform is None or platform == find_devices()[0].platform:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = jax.default_device(find_devices(platform)[0])
    return context


def parse_mesh(text: str) -> dict[str, int]:
    """Returns ``{"data": 2, "model": 2}`` for ``"data=2,model=2"``, ConfigError for what is no such list.

    An axis ``data`` of size 1 comes first if none is named.
    """
    axes: dict[str, int] = {}
    for part in str(text).split(","):
        name, _, size = part.strip().partition("=")
        if not (name.isidentifier() and size.isdecimal() and int(size) >= 1) or name in axes:
            raise ConfigError(
                f"mesh is {text!r}, and must be axes with their sizes, as in data=2,model=2: batches are split over "
                "data, a model's parameters over the axes that it names."
            )
        axes[name] = int(size)
    return axes if DATA in axes else {DATA: 1, **axes}


def format_mesh(axes: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def make_mesh(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> Mesh:
    """``devices`` as a grid, neighbours of the last axis next to each other; ConfigError if they do not fill it."""
    size = math.prod(axes.values())
    if size != len(devices):
        raise ConfigError(
            f"mesh {format_mesh(axes)} is of {size} devices, and this run is to use {len(devices)}: make them agree."
        )
    # Axes are Auto: XLA chooses the shardings of activations, of which jaxnn's models name no axis.
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def check_divides(batch_size: int, size: int, name: str = "batch_size") -> None:
    """Raises ConfigError, which names the nearest sizes that fit, unless ``size`` devices can share a batch evenly."""
    if batch_size % size:
        below, above = batch_size // size * size, (batch_size // size + 1) * size
        nearest = f"{below} and {above}" if below else f"{above}"
        raise ConfigError(
            f"{name} is {batch_size}, which {size} devices cannot share evenly: the nearest that they can are "
            f"{nearest}; or choose another number of devices."
        )
