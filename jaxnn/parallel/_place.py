"""The place of this process in a run of several: its rank, their number, and the address of process 0."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import warnings

import jax

from jaxnn._compat import detect_cluster
from jaxnn.types import ConfigError, JaxnnError, on_one_line

EXPLICIT = "--coordinator HOST:PORT --num-processes N --process-id I"

_place: Place | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in a run of several, for `joined`.

    >>> from jaxnn.parallel import Place
    >>> Place("node1:12345", num_processes=2, process_id=0).port
    12345
    """

    coordinator: str  # ``HOST:PORT`` at which process 0 listens
    num_processes: int  # at least 2
    process_id: int  # from 0
    start_timeout: float = 300.0  # seconds within which all must start
    lost_after: float = 60.0  # seconds of silence after which a process is lost; a killed one is noticed at once
    detected: bool = False  # whether a cluster assigned it, and with it one of the machine's devices
    host: str = dataclasses.field(init=False)  # from ``coordinator``, as is the port
    port: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        count, seconds = self.num_processes, {"start_timeout": self.start_timeout, "lost_after": self.lost_after}
        mistakes = {
            f"num_processes is {count}, and a run of several has at least 2: start more, or omit --distributed, or "
            "--coordinator, --num-processes and --process-id.": count < 2,
            f"process_id is {self.process_id}, and must be one of 0 to {count - 1}, since there are {count} "
            "processes.": not 0 <= self.process_id < count,
            **{f"{name} is {s!r} seconds, and must be more than 0.": not s > 0 for name, s in seconds.items()},
            f"the coordinator is {self.coordinator!r}, and must be HOST:PORT, the machine of process 0 and a free port "
            "on it: node1:12345.": not host or not port.isdecimal() or not 0 < int(port) < 2**16,
        }
        if mistake := next((message for message, holds in mistakes.items() if holds), None):
            raise ConfigError(mistake)
        object.__setattr__(self, "host", host.removeprefix("[").removesuffix("]"))
        object.__setattr__(self, "port", int(port))

    @classmethod
    def of_flags(
        cls,
        coordinator: str | None,
        num_processes: int | None,
        process_id: int | None,
        *,
        distributed: bool,
        start_timeout: float,
        lost_after: float,
    ) -> Place | None:
        """The place that flags name, or a cluster assigned if ``distributed``; None: the process is the only one.

        ConfigError if flags are incomplete or contradictory, or no cluster started the process.
        """
        given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
        missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
        if distributed and len(missing) < len(given):
            raise ConfigError(f"--distributed detects the values of {EXPLICIT}: give either it or them.")
        if distributed:
            return cls._detect(start_timeout, lost_after)
        if len(missing) == len(given):
            return None
        if coordinator is None or num_processes is None or process_id is None:
            raise ConfigError(f"{' and '.join(missing)} must be given too: {EXPLICIT}.")
        return cls(coordinator, num_processes, process_id, start_timeout, lost_after)

    @classmethod
    def _detect(cls, start_timeout: float, lost_after: float) -> Place:
        """The place assigned by SLURM, Open MPI, Kubernetes or Cloud TPU; ConfigError if there is none."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                address, count, rank = detect_cluster(start_timeout)
            except JaxnnError:
                raise
            # Kinds of clusters fail differently: a service account without rights, a variable that is no number.
            except Exception as error:
                raise ConfigError(f"--distributed: {on_one_line(error)}.") from error
        if address is not None and count is not None and rank is not None:
            return cls(address, int(count), int(rank), start_timeout, lost_after, detected=True)
        if warned:
            raise ConfigError(f"--distributed: {on_one_line(warned[0].message)}.")
        raise ConfigError(
            "--distributed: no cluster started this process; looked for SLURM (srun), Open MPI (mpirun), Kubernetes (a "
            f"Job) and Cloud TPU. Start it with one of them, or pass its place: {EXPLICIT}."
        )


def interfaces(host: str) -> list[str] | None:
    """The addresses at which process 0 listens, so that others reach it as ``host``; None for all interfaces."""
    # All are needed behind NAT, and if the machine's name is an address of the loopback interface, as on Debian.
    found: list[str] = []
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.create_server(address, family=family):
                found.append(str(address[0]))
    name, here = host.partition(".")[0], socket.gethostname().partition(".")[0]
    loopback = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
    return None if not found or (loopback and name == here != "localhost") else found


def set_place(place: Place | None) -> None:
    """Sets the place of this process; None for a run of one."""
    global _place
    _place = place


def process_id() -> int:
    """The rank of this process; unlike ``jax.process_index`` it starts no backend."""
    if _place is None:
        return jax.process_index() if jax.distributed.is_initialized() else 0
    return _place.process_id


def process_count() -> int:
    """The number of processes; unlike ``jax.process_count`` it starts no backend."""
    if _place is None:
        return jax.process_count() if jax.distributed.is_initialized() else 1
    return _place.num_processes


def is_primary() -> bool:
    """Whether this is process 0, which prints and records."""
    return process_id() == 0
