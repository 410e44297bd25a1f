"""All that jaxnn uses of JAX's private modules; only runs of several processes import them.

``jax.distributed`` is public, but the client of its coordination service, whose key-value store lets processes agree
without a device, is not; neither is the detection of a cluster apart from the start.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

import jax

from jaxnn.types import ConfigError


def coordination_client() -> Any:
    """The client of JAX's coordination service, with a key-value store and barriers; None before it has started."""
    return _private("distributed", "global_state.client")


def detect_cluster(seconds: float) -> tuple[str | None, int | None, int | None]:
    """Address of process 0, number of processes and rank as SLURM, Open MPI, Kubernetes or Cloud TPU give them.

    Args:
        seconds: how long to wait for the name of the first process to be known.
    """
    detect = _private("clusters", "ClusterEnv.auto_detect_unset_distributed_params")
    address, count, rank, _ = detect(None, None, None, None, None, max(1, int(seconds)))
    return address, count, rank


def _private(module: str, name: str) -> Any:
    """Raises ConfigError if this version of JAX keeps it elsewhere."""
    try:
        return operator.attrgetter(name)(importlib.import_module(f"jax._src.{module}"))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"runs of several processes do not work with jax {jax.__version__}, whose internals changed ({error}): "
            "install jax 0.12.0.1, or train in one process."
        ) from error
