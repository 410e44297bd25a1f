"""What a study ran on, and whether its devices have cores of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxnn.observe import cpu_count

# The share of the cores that others may have at work.
BUSY = 0.5


class Machine(NamedTuple):
    """Where was measured.

    Attributes:
        platform: ``cpu``, ``gpu`` or ``tpu``.
        kind: what its devices call themselves.
        num_devices: how many there are.
        num_processes: of how many processes.
        cores: CPU cores of this process.
        shared_cores: the CPU cores that all devices share; None where each device has its own.
        load: how many programs wanted its cores before the study, on average of a minute; None: unknown.
        jax: the version.
    """

    platform: str
    kind: str
    num_devices: int
    num_processes: int
    cores: int
    shared_cores: int | None
    load: float | None
    jax: str

    def turns(self, num_devices: float) -> float:
        """How many of ``num_devices`` share a core, at the least 1.0: they take turns."""
        return 1.0 if self.shared_cores is None else max(1.0, num_devices / self.shared_cores)

    @property
    def is_busy(self) -> bool:
        """Whether others were at work, so that measurements tell of them too."""
        return self.load is not None and self.load > BUSY * self.cores

    def __str__(self) -> str:
        processes = f" of {self.num_processes} processes" if self.num_processes > 1 else ""
        if self.shared_cores is None:
            kind = "" if self.kind == self.platform else f" ({self.kind})"
            return f"{self.num_devices} {self.platform} device{_s(self.num_devices)}{kind}{processes}, jax {self.jax}"
        cores = f"{self.shared_cores} CPU core{_s(self.shared_cores)}"
        return f"{self.num_devices} simulated devices{processes} on {cores}, jax {self.jax}"


def observe_machine(devices: Sequence[jax.Device]) -> Machine:
    """The machine, or machines, of ``devices``, which are those of all processes."""
    first, cores = devices[0], cpu_count() or 1
    shared = None
    if first.platform == "cpu":
        hosts = _hosts()
        # A device a host has all of its cores.
        shared = None if len(devices) <= hosts else hosts * cores
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Machine(
        first.platform, first.device_kind, len(devices), jax.process_count(), cores, shared, load, jax.__version__
    )


def _hosts() -> int:
    """On how many machines the processes run."""
    if jax.process_count() == 1:
        return 1
    import socket
    import zlib

    from jax.experimental import multihost_utils

    name = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return len(np.unique(multihost_utils.process_allgather(name)))


def _s(count: int) -> str:
    return "" if count == 1 else "s"
