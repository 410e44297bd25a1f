"""The machine that figures were measured on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxnn.observe import cpu_count, describe_devices, device_kind, name_device
from jaxnn.record import git_state


class Machine(NamedTuple):
    """A device, the software that measured on it, and when: one column of a table.

    Attributes:
        device: ``cpu``, ``gpu`` or ``tpu``.
        kind: model name of the device.
        cores: CPU cores available to the process.
        load: load average of the last minute before the measurement; None: unknown.
        versions: of Python, JAX, jaxlib and jaxnn.
        commit: of the work tree, with ``+`` if it has changes; None: no work tree.
        date: of the measurement, ``YYYY-MM-DD``.
    """

    device: str
    kind: str
    cores: int
    load: float | None
    versions: Mapping[str, str | None]
    commit: str | None
    date: str

    @property
    def label(self) -> str:
        """Name of the column: ``CPU, AMD EPYC, 2 cores``."""
        return name_device(self.device, self.kind, self.cores)

    def runs_the_same(self, other: Machine) -> bool:
        """Whether both measured with the same committed code and versions."""
        return (self.versions, self.commit) == (other.versions, other.commit) and not (self.commit or "").endswith("+")


def describe_machine(device: jax.Device | None = None) -> Machine:
    """Describes ``device``, by default the first one of this process, and what runs on it now."""
    device = device or jax.devices()[0]
    described: dict[str, Any] = describe_devices()
    git = git_state(Path(__file__).parent, tracked=True)
    return Machine(
        device=device.platform,
        kind=device_kind(device),
        cores=cpu_count() or 1,
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        versions={name: described["versions"].get(name) for name in ("python", "jax", "jaxlib", "jaxnn")},
        commit=None if git is None else git["commit"][:12] + ("+" if git["dirty"] else ""),
        date=time.strftime("%Y-%m-%d"),
    )
