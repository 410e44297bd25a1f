"""Which devices a run computes on: those of a backend, all or some of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal

import jax

from jaxnn.nn import platform as default_platform
from jaxnn.observe import UNOPENED, missing_gpu
from jaxnn.types import ConfigError, suggest

type Wanted = int | Literal["all"] | None

PLATFORMS = ("cpu", "gpu", "tpu")
INSTALL = {
    "gpu": 'install JAX for NVIDIA GPUs with pip install "jax[cuda13]", or choose --device cpu',
    "tpu": 'install JAX for TPUs with pip install "jax[tpu]", or choose --device cpu',
    "cpu": "unset JAX_PLATFORMS",
}


def find_devices(platform: str | None = None) -> list[jax.Device]:
    """All devices of ``platform``, of all processes, those of one process next to each other.

    Args:
        platform: ``cpu``, ``gpu`` or ``tpu``; None: where a computation that names no device runs.

    Raises:
        ConfigError: JAX cannot open it; with the reason and what to install.
    """
    try:
        devices = jax.devices(platform or default_platform())
    except UNOPENED as error:
        raise _unopened(platform, error) from error
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def _unopened(platform: str | None, error: Exception) -> ConfigError:
    """What is said of a kind of device that JAX cannot open."""
    reason = f" ({' '.join(str(error).split()).rstrip('.')})" if str(error) else ""
    told = missing_gpu() if platform == "gpu" else None
    if told is None and (allowed := jax.config.jax_platforms):
        told = f"JAX_PLATFORMS allows only {allowed!r}: unset it, or name what is there."
    told = told or f"{INSTALL.get(platform or '', INSTALL['cpu'])}."
    what = "JAX cannot open a device" if platform is None else f"device is {platform!r}, which JAX cannot open"
    return ConfigError(f"{what} here{reason}: {told}")


def first_devices(wanted: Sequence[str] | None = None) -> dict[str, jax.Device]:
    """The first device of each kind that there is in this process, ``{"cpu": …, "gpu": …}``.

    Args:
        wanted: kinds, such as ``("cpu", "gpu")``; None: all that there are.

    Raises:
        ConfigError: a kind that does not exist, or that JAX does not have here.
    """
    for kind in wanted or ():
        if kind not in PLATFORMS:
            raise ConfigError(f"devices has {kind!r}, and there is no such kind: {suggest(kind, PLATFORMS)}.")
    if wanted is not None and not wanted:
        raise ConfigError("devices is empty: give kinds such as cpu,gpu, or leave it out for all that there are.")
    found = {kind: device for kind in PLATFORMS if (device := _first(kind)) is not None}
    for kind in wanted or ():
        if kind not in found:
            reason = (missing_gpu() if kind == "gpu" else None) or f"JAX has {', '.join(found)} here"
            raise ConfigError(f"devices asks for {kind}, which is not there: {reason.rstrip('.')}.")
    return {kind: device for kind, device in found.items() if wanted is None or kind in wanted}


def _first(kind: str) -> jax.Device | None:
    try:
        return jax.local_devices(backend=kind)[0]
    except UNOPENED:
        return None


def choose_devices(devices: Sequence[jax.Device], wanted: Wanted, default: int | None = None) -> list[jax.Device]:
    """The first ``wanted`` of ``devices``.

    Args:
        devices: those there are.
        wanted: how many, or ``"all"``; None: ``default``.
        default: how many where nothing was asked for; None: all.

    Raises:
        ConfigError: there are fewer; never are fewer used in silence. Or some process would have none.
    """
    count = len(devices) if wanted == "all" else wanted or default or len(devices)
    if count > len(devices):
        raise ConfigError(f"devices is {count}, and JAX has {_listed(devices)} here: {_remedy(devices, count)}.")
    if jax.process_count() > 1 and count != len(devices):
        raise ConfigError(
            f"devices is {count}, and this run's {jax.process_count()} processes have {len(devices)}: all of them take "
            "part, so leave devices out, or start fewer processes."
        )
    return list(devices[:count])


def computing_on(platform: str | None) -> contextlib.AbstractContextManager[object]:
    """Within the block, what names no device runs on ``platform``; None: where it does anyway."""
    if platform is None:
        return contextlib.nullcontext()
    device = find_devices(platform)[0]
    if platform == find_devices()[0].platform:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = jax.default_device(device)
    return context


def _listed(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}"


def _remedy(devices: Sequence[jax.Device], count: int) -> str:
    """What to do about too few devices; a CPU can stand for any number."""
    fewer = "ask for no more than these"
    if devices[0].platform != "cpu":
        return fewer
    return f"{fewer}, or have the CPU stand for {count} with JAX_NUM_CPU_DEVICES={count} in the environment"
