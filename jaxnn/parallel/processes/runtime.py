"""JAX's own runtime of many processes: all that is reached in JAX's private modules, in one place.

What is public, ``jax.distributed.initialize``, ends the process from C++ when another one is missing or gone
(SIGABRT and forty lines of C++), tells nobody which, and hides the client whose key-value store lets processes agree
without a device. So the client and the detection of clusters are taken from ``jax._src``, as Orbax does.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
from jax._src import clusters, distributed, xla_bridge

from jaxnn.types import ConfigError

# What ends a process in C++ is to be later than what ends it with a sentence: by so much, and by at least so long.
HEARTBEAT_FACTOR = 4
LEAST_HEARTBEAT_SECONDS = 100
# Who shuts down has met all others just before.
SHUTDOWN_SECONDS = 30


class Detected(NamedTuple):
    """What a cluster says of this process."""

    coordinator: str
    num_processes: int
    process_id: int


def client() -> Any | None:
    """The client of JAX's coordination service, with the key-value store and barriers; None in a single process."""
    return distributed.global_state.client


def process_id() -> int:
    """Which process this is. Unlike ``jax.process_index`` it starts no backend."""
    return int(distributed.global_state.process_id)


def process_count() -> int:
    """How many processes there are, without starting a backend."""
    return int(distributed.global_state.num_processes)


def detect(seconds: float) -> Detected | None:
    """What SLURM, Open MPI, Kubernetes or Cloud TPU say of this process; None where none of them started it.

    Args:
        seconds: how long to wait for the name of the first process to be known.

    Raises:
        ConfigError: there is a cluster that cannot be asked.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            address, count, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
                None, None, None, None, None, max(1, int(seconds))
            )
        # Each kind of cluster fails in its own way: a service account without rights, a variable that is no number.
        except Exception as error:
            raise ConfigError(f"--distributed: {_one_line(error)}.") from error
    if address is None or count is None or index is None:
        if said:
            raise ConfigError(f"--distributed: {_one_line(said[0].message)}.")
        return None
    return Detected(address, int(count), int(index))


def initialize(
    *,
    address: str,
    num_processes: int,
    process_id: int,
    local_devices: bool,
    start_timeout: float,
    lost_after: float,
) -> None:
    """``jax.distributed.initialize``, once it is known that all processes are there.

    Args:
        address: where this process reaches the coordination service; process 0 starts it there.
        num_processes: how many there are.
        process_id: which this is.
        local_devices: give this process one device, as the cluster that started it says.
        start_timeout: seconds in which all are to connect.
        lost_after: seconds after which a silent process is gone, for who looks before JAX does.
    """
    # JAX's preemption service takes SIGTERM in C++ for good: the process would not end by it any more.
    jax.config.update("jax_enable_preemption_service", False)
    # Proxies in the environment do not matter: what is connected to is on this machine.
    jax.config.update("jax_check_proxy_envs", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        num_processes,
        process_id,
        cluster_detection_method=None if local_devices else "deactivate",
        initialization_timeout=max(1, round(start_timeout)),
        heartbeat_timeout_seconds=max(LEAST_HEARTBEAT_SECONDS, round(HEARTBEAT_FACTOR * lost_after)),
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=address,
    )


def check_not_started() -> None:
    """Raises ConfigError where it is too late to be one process of many."""
    if client() is not None:
        raise ConfigError("this process is one of several already: start_processes is called once.")
    if xla_bridge.backends_are_initialized():
        raise ConfigError("a backend of JAX runs already: start_processes comes before anything is computed.")


def shutdown() -> None:
    """Leaves the coordination service, together with all others; process 0 ends it."""
    jax.distributed.shutdown()


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")
