"""What a table's column says of the device that was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxnn.observe import cpu_count, describe_devices
from jaxnn.observe.devices import device_kind, name_device
from jaxnn.record.provenance import git_state


class Column(NamedTuple):
    """A device of a machine, as a column of a table.

    Attributes:
        device: ``cpu``, ``gpu`` or ``tpu``.
        kind: what it calls itself.
        cores: CPU cores of the process.
        load: how many programs wanted them before, on average of a minute; None: unknown.
        versions: of Python, JAX, …
        commit: of jaxnn's work tree, with ``+`` where it was changed; None: it is none.
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
        """What tells it from others: ``CPU, AMD EPYC, 2 cores``."""
        return name_device(self.device, self.kind, self.cores)

    def runs_the_same(self, other: Column) -> bool:
        """Whether both were measured with the same code, as far as that is known."""
        return (self.versions, self.commit) == (other.versions, other.commit) and not (self.commit or "").endswith("+")


def describe_column(device: jax.Device) -> Column:
    """What the column of ``device`` says."""
    described: dict[str, Any] = describe_devices()
    git = git_state(Path(__file__).parent, tracked=True)
    return Column(
        device=device.platform,
        kind=device_kind(device),
        cores=cpu_count() or 1,
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        versions={name: described["versions"].get(name) for name in ("python", "jax", "jaxlib", "jaxnn")},
        commit=None if git is None else git["commit"][:12] + ("+" if git["dirty"] else ""),
        date=time.strftime("%Y-%m-%d"),
    )
