"""The choice among an operation's implementations: by platform, by what was measured at its size, by obstacles."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnn._batch_context import Context, setting
from jaxnn._compat import compute_capability, platform
from jaxnn.types import ConfigError, suggest

_portable: ContextVar[bool] = ContextVar("portable", default=False)
_reasons: ContextVar[dict[str, bool] | None] = ContextVar("reasons", default=None)
# A measurement holds for smaller sizes, and below this many times its own.
_HOLDS_BELOW = 2


class Size(NamedTuple):
    """What decides on a GPU which implementation is faster."""

    value: int  # keys of attention, features of a recurrent layer
    dtype: Any
    text: str  # ``4 × 256 keys``


def choose(
    operation: str,
    given: str | None,
    obstacles: Mapping[str, str | None],
    preferred: Mapping[str, Sequence[str]],
    size: Size | None = None,
) -> str:
    """Returns the implementation ``given``, or for None the first of the ``preferred`` without an obstacle.

    ``preferred`` has the implementations by platform, best first, ``"other"`` for every platform that it does not name;
    ``obstacles`` maps an implementation to the reason why it cannot be used here, or None. On a GPU, the faster one at
    this ``size`` is first, if it was measured on a card of this compute capability (``measured.json``). ConfigError if
    ``given`` is unknown or has an obstacle, or if all have.

    >>> from jaxnn.kernels import choose
    >>> forms = {"cpu": ("native", "xla"), "other": ("xla",)}
    >>> choose("sort", None, {"native": "the package is not installed"}, forms)
    'xla'
    """
    if given is None:
        order = preferred["other"] if _portable.get() else preferred.get(platform(), preferred["other"])
        if size is not None and (first := _measured(operation, size, obstacles)) is not None:
            return first
        found = next((name for name in order if obstacles.get(name) is None), None)
        if found is None:
            raise ConfigError(f"{operation} cannot be computed here: {'; '.join(map(str, obstacles.values()))}.")
        if (reasons := _reasons.get()) is not None:
            reasons |= {f"{operation} without {name}: {obstacles[name]}": False for name in order[: order.index(found)]}
        return found
    known = {name for names in preferred.values() for name in names}
    if given not in known:
        raise ConfigError(f"{operation} has no implementation {given!r}: {suggest(str(given), known)}.")
    if (obstacle := obstacles.get(given)) is not None:
        raise ConfigError(f"{operation} cannot use {given!r} here: {obstacle}; leave implementation out.")
    return given


@functools.cache
def _measurements() -> list[dict[str, Any]]:
    """Rows of ``measured.json``, which the benchmark ``gpu_day`` writes."""
    text = resources.files("jaxnn.kernels").joinpath("measured.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]


def _measured(operation: str, size: Size, obstacles: Mapping[str, str | None]) -> str | None:
    """The implementation that was faster at the nearest size measured on such a card; None: no one knows."""
    capability = 0.0 if _portable.get() else compute_capability()
    what = operation, str(jnp.dtype(size.dtype)), capability
    rows = [row for row in _measurements() if (row["operation"], row["dtype"], float(row["capability"])) == what]
    row = min(rows, key=lambda row: abs(math.log(row["size"] / size.value)), default=None)
    if row is None or size.value >= _HOLDS_BELOW * row["size"]:
        return None
    times: dict[str, float] = {name: t for name, t in row["microseconds"].items() if obstacles.get(name) is None}
    if len(times) < 2:
        return None
    first = min(times, key=lambda name: times[name])
    if (reasons := _reasons.get()) is not None:
        compared = ", ".join(f"{name} {each:,} µs" for name, each in times.items())
        reasons[f"{operation} of {size.text}: {first}, measured on an {row['device']} ({compared})"] = True
    return first


def portable() -> Context:
    """Context in which implementations are chosen that any platform has, for programs that are used elsewhere."""
    return setting(_portable, True)


def collect_reasons() -> Context:
    """Context that collects why operations traced in it have their implementations: True if it was measured.

    It has a reason where one is chosen by size, or one that is preferred on this device cannot be used.
    """
    return setting(_reasons, {})


def scope(operation: str, chosen: str | Callable[..., Any]) -> Any:
    """Returns the `jax.named_scope` ``jaxnn.operation.name``, in which an implementation is traced."""
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", "function").strip("<>")
    return jax.named_scope(f"jaxnn.{operation}.{name}")
