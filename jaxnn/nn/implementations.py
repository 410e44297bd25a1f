"""Which implementation of an operation runs where: the one place that asks for the backend.

An operation with several implementations takes ``implementation=None`` as an argument: None is the first of
`PREFERRED` that can do what is asked, a name overrides it. What was taken is a named scope in the traced program, so
that a report tells what it observes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from jaxnn.types import ConfigError, suggest

SCOPE = "jaxnn"
# By operation and platform, best first; "other" is every platform not named. docs/performance.md has the measurements.
PREFERRED: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "convolution": {"cpu": ("canonical", "xla"), "other": ("xla", "canonical")},
        "recurrence": {"gpu": ("cudnn", "paired", "hoisted"), "other": ("hoisted", "paired", "cudnn")},
        "attention": {"cpu": ("whole", "chunked"), "gpu": ("cudnn", "xla", "whole", "chunked"), "other": ("xla",)},
        "embedding": {"gpu": ("one_hot", "gather"), "other": ("gather", "one_hot")},
        "normalization": {"cpu": ("analytic", "xla"), "other": ("xla", "analytic")},
    }
)


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``: where a computation that names no device will run."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else str(device.platform)


def choose(operation: str, given: str | None, obstacles: Mapping[str, str | None]) -> str:
    """The implementation of ``operation`` to trace.

    Args:
        operation: a key of `PREFERRED`.
        given: the name of the one that was asked for, or None for the first that can be used here.
        obstacles: for each implementation that cannot do what is asked, why not; None or absent: it can.

    Raises:
        ConfigError: the one asked for is unknown or cannot do it, or none can.
    """
    preferred = PREFERRED[operation]
    if given is None:
        order = preferred.get(platform(), preferred["other"])
        found = next((name for name in order if obstacles.get(name) is None), None)
        if found is None:
            raise ConfigError(f"{operation} cannot be computed here: {'; '.join(map(str, obstacles.values()))}.")
        return found
    known = {name for names in preferred.values() for name in names}
    if given not in known:
        raise ConfigError(f"{operation} has no implementation {given!r}: {suggest(str(given), known)}.")
    if (obstacle := obstacles.get(given)) is not None:
        raise ConfigError(f"{operation} cannot use {given!r} here: {obstacle}; leave implementation out.")
    return given


def scope(operation: str, name: str) -> Any:
    """The context in which an implementation is traced: its operations carry ``jaxnn.operation.name``."""
    return jax.named_scope(f"{SCOPE}.{operation}.{name}")
