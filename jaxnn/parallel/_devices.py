"""The devices of a run, and the mesh that arranges them along named axes."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxnn._compat import UNOPENED
from jaxnn._compat import platform as default_platform
from jaxnn.observe import missing_gpu
from jaxnn.types import ConfigError, on_one_line, suggest

type Wanted = int | Literal["all"] | None

DATA = "data"
"""The mesh axis along which batches are sharded."""
PLATFORMS = ("cpu", "gpu", "tpu")
INSTALL = {
    "gpu": 'install JAX for NVIDIA GPUs with pip install "jax[cuda13]", or choose --device cpu',
    "tpu": 'install JAX for TPUs with pip install "jax[tpu]", or choose --device cpu',
    "cpu": "unset JAX_PLATFORMS",
}


def find_devices(platform: str | None = None) -> list[jax.Device]:
    """All devices of ``platform``, default JAX's default, by process; ConfigError if JAX cannot open it."""
    try:
        devices = jax.devices(platform or default_platform())
    except UNOPENED as error:
        reason = f" ({on_one_line(error)})" if str(error) else ""
        remedy = missing_gpu() if platform == "gpu" else None
        if remedy is None and (allowed := jax.config.jax_platforms):
            remedy = f"JAX_PLATFORMS allows only {allowed!r}: unset it, or set it to an available platform."
        remedy = remedy or f"{INSTALL.get(platform or 'cpu', INSTALL['cpu'])}."
        what = "JAX cannot open a device" if platform is None else f"device is {platform!r}, which JAX cannot open"
        raise ConfigError(f"{what} here{reason}: {remedy}") from error
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def first_devices(wanted: Sequence[str] | None = None) -> dict[str, jax.Device]:
    """This process's first device of each ``wanted`` kind, default all; ConfigError if one is not available."""
    if wanted is not None and not wanted:
        raise ConfigError("devices is empty: pass kinds such as cpu,gpu, or omit it for all available ones.")
    for kind in wanted or ():
        if kind not in PLATFORMS:
            raise ConfigError(f"devices has the unknown kind {kind!r}: {suggest(kind, PLATFORMS)}.")
        find_devices(kind)
    found: dict[str, jax.Device] = {}
    for kind in PLATFORMS if wanted is None else filter(wanted.__contains__, PLATFORMS):
        with contextlib.suppress(*UNOPENED):
            found[kind] = jax.local_devices(backend=kind)[0]
    return found


def choose_devices(devices: Sequence[jax.Device], wanted: Wanted, default: int | None = None) -> list[jax.Device]:
    """The first ``wanted`` (default ``default``, default all) of ``devices``; ConfigError if there are fewer."""
    count = len(devices) if wanted == "all" else wanted or default or len(devices)
    if count > len(devices):
        platform, remedy = devices[0].platform, "request no more than these"
        if platform == "cpu":
            remedy += f", or split the CPU into {count} devices with JAX_NUM_CPU_DEVICES={count} in the environment"
        available = f"{len(devices)} {platform.upper()} device{'s are' if len(devices) > 1 else ' is'} available"
        raise ConfigError(f"requested {count} devices, but only {available}: {remedy}.")
    if jax.process_count() > 1 and count != len(devices):
        raise ConfigError(
            f"devices is {count}, but the {jax.process_count()} processes of this run have {len(devices)}, which all "
            "take part: omit devices, or start fewer processes."
        )
    return list(devices[:count])


def computing_on(platform: str | None) -> contextlib.AbstractContextManager[object]:
    """Makes ``platform`` the default for computations within the block; None keeps JAX's default."""
    if platform is None or platform == find_devices()[0].platform:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = jax.default_device(find_devices(platform)[0])
    return context


def parse_mesh(text: str) -> dict[str, int]:
    """Parses ``"data=2,model=2"`` to ``{"data": 2, "model": 2}``; without a ``data`` axis one of size 1 comes first."""
    axes: dict[str, int] = {}
    for part in str(text).split(","):
        name, _, size = part.strip().partition("=")
        if not (name.isidentifier() and size.isdecimal() and int(size) >= 1) or name in axes:
            raise ConfigError(
                f"mesh is {text!r}, and must be axes with their sizes, as in data=2,model=2: batches are sharded along "
                "data, parameters along the axes that the model names."
            )
        axes[name] = int(size)
    return axes if DATA in axes else {DATA: 1, **axes}


def format_mesh(axes: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def make_mesh(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> Mesh:
    """Arranges ``devices`` as a grid, neighbours along the last axis; ConfigError if their number does not fit."""
    size = math.prod(axes.values())
    if size != len(devices):
        raise ConfigError(
            f"mesh {format_mesh(axes)} is of {size} devices, and this run is to use {len(devices)}: make them agree."
        )
    # Axes are Auto: XLA chooses the shardings of activations, for which jaxnn's models name no axes.
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
