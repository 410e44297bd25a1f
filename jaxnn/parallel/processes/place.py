"""Which process this is, of how many, and where process 0 listens."""

from __future__ import annotations

import dataclasses
import warnings

from jaxnn._compat import detect_cluster
from jaxnn.types import ConfigError, JaxnnError

START_TIMEOUT = 300.0
LOST_AFTER = 60.0
EXPLICIT = "--coordinator HOST:PORT --num-processes N --process-id I"


@dataclasses.dataclass(frozen=True)
class Place:
    """A process among those of a run.

    Attributes:
        coordinator: ``HOST:PORT`` where process 0 listens and the others find it.
        num_processes: how many there are, at least 2.
        process_id: which this is, from 0.
        start_timeout: seconds within which all must have started.
        lost_after: seconds of silence after which a process is gone; one that was killed is noticed at once.
        detected: whether a cluster said so; it then says too which of a machine's devices this process has.
    """

    coordinator: str
    num_processes: int
    process_id: int
    start_timeout: float = START_TIMEOUT
    lost_after: float = LOST_AFTER
    detected: bool = False

    def __post_init__(self) -> None:
        if self.num_processes < 2:
            raise ConfigError(
                f"num_processes is {self.num_processes}, and a run of several has at least 2: start more, or leave out "
                "--distributed, or --coordinator, --num-processes and --process-id."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"process_id is {self.process_id}, and must be one of 0 to {self.num_processes - 1}, since there are "
                f"{self.num_processes} processes."
            )
        for name in ("start_timeout", "lost_after"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r} seconds, and must be more than 0.")
        _split(self.coordinator)

    @property
    def host(self) -> str:
        """The machine of process 0."""
        return _split(self.coordinator)[0]

    @property
    def port(self) -> int:
        """The port where it listens."""
        return _split(self.coordinator)[1]


def detect_place(start_timeout: float = START_TIMEOUT, lost_after: float = LOST_AFTER) -> Place:
    """The place that SLURM, Open MPI, Kubernetes or Cloud TPU gave to this process.

    Raises:
        ConfigError: none of them did, or it cannot be asked.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            address, count, rank = detect_cluster(start_timeout)
        except JaxnnError:
            raise
        # Each kind of cluster fails in its own way: a service account without rights, a variable that is no number.
        except Exception as error:
            raise ConfigError(f"--distributed: {_one_line(error)}.") from error
    if address is None or count is None or rank is None:
        if warned:
            raise ConfigError(f"--distributed: {_one_line(warned[0].message)}.")
        raise ConfigError(
            "--distributed: no cluster started this process; looked for SLURM (srun), Open MPI (mpirun), Kubernetes (a "
            f"Job) and Cloud TPU. Start it with one of them, or say where it is: {EXPLICIT}."
        )
    return Place(address, int(count), int(rank), start_timeout, lost_after, detected=True)


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"the coordinator is {address!r}, and must be HOST:PORT, the machine of process 0 and a free port there: "
            "node01:12345."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")
