"""Flags that say what a script computes on before JAX starts: devices of the CPU, one process of several."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax

from jaxnn.cli.errors import BAD_INPUT, FAILED, RESUMABLE
from jaxnn.engine import check_count
from jaxnn.parallel import EXPLICIT, LOST_AFTER, START_TIMEOUT, Place, detect_place, joined
from jaxnn.types import ConfigError, JaxnnError, TrainingError


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Which process of several this is; flags of every script, the same in all of them but for --process-id."""

    cpu_devices: int | None = None
    """Have the CPU stand for so many devices, to try out what several do; they share its cores."""
    distributed: bool = False
    """Join the processes that SLURM, Open MPI, Kubernetes or Cloud TPU started together."""
    coordinator: str | None = None
    """HOST:PORT, the machine of process 0 and a free port there; instead of --distributed, with the next two."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    start_timeout: float = START_TIMEOUT
    """Seconds within which all of them must have started."""
    lost_after: float = LOST_AFTER
    """Seconds of silence after which one counts as lost and the others end; one that is killed is noticed at once."""

    def __post_init__(self) -> None:
        if self.cpu_devices is not None:
            check_count("cpu_devices", self.cpu_devices, 1)

    def place(self) -> Place | None:
        """Which process this is; None: the only one.

        Raises:
            ConfigError: no cluster started this process, what is given cannot be, or is half of what it takes.
        """
        given = {"coordinator": self.coordinator, "num_processes": self.num_processes, "process_id": self.process_id}
        missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
        if self.distributed and len(missing) < len(given):
            raise ConfigError(f"--distributed finds out by itself what {EXPLICIT} say: give it or them.")
        if self.distributed:
            return detect_place(self.start_timeout, self.lost_after)
        if len(missing) == len(given):
            return None
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            raise ConfigError(f"{' and '.join(missing)} must be given too: {EXPLICIT}.")
        return Place(self.coordinator, self.num_processes, self.process_id, self.start_timeout, self.lost_after)


@contextlib.contextmanager
def processes(options: ClusterOptions, device: str | None = None) -> Iterator[None]:
    """One process of several within the block, where it is one; see ``jaxnn.parallel.joined``.

    Args:
        options: which, and what of the machine is opened.
        device: the kind that the run asks for; a CPU's run opens nothing else.
    """
    _open_machine(options, device)
    if (place := options.place()) is None:
        yield
        return
    _keep_off_proxies()
    with joined(place, _status_of):
        yield


def _open_machine(options: ClusterOptions, device: str | None) -> None:
    # An accelerator that is opened is one less for others, most of its memory too.
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if options.cpu_devices is None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    except RuntimeError as error:
        raise ConfigError(
            f"cpu_devices is {options.cpu_devices}, and JAX has started already: compute nothing before jn.main."
        ) from error


def check_alone(arguments: Sequence[str], command: str) -> None:
    """Refuses the flags of several processes to a command that is for one.

    Raises:
        ConfigError: one is among ``arguments``.
    """
    names = {field.name for field in dataclasses.fields(ClusterOptions)} - {"cpu_devices"}
    flags = {f"--{name.replace('_', '-')}" for name in names}
    for word in arguments:
        if (flag := word.partition("=")[0].replace("_", "-")) in flags:
            others = "split its members over machines with --shard I/N" if command == "sweep" else "leave it out"
            raise ConfigError(f"{flag} makes one run of several processes, and {command} is for one process: {others}.")


def _status_of(error: BaseException) -> int:
    """The exit status that the other processes end with after ``error`` in this one."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, KeyboardInterrupt):
        return RESUMABLE  # they lost a process, as if it had been killed
    return BAD_INPUT if isinstance(error, JaxnnError) and not isinstance(error, TrainingError) else FAILED


def _keep_off_proxies() -> None:
    """Has the connections of JAX's runtime, which are within this machine, not go through a proxy for the web."""
    names = [os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy"), "127.0.0.1"]
    os.environ["no_grpc_proxy"] = ",".join(filter(None, names))
