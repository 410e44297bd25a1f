"""The choice of an operation's implementation: by platform, by what was measured at its size, by obstacles."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnn._batch_context import Context, setting
from jaxnn._compat import compute_capability, platform
from jaxnn.types import ConfigError, suggest

_GPU_ATTENTION = "cudnn", "xla", "math", "memory_efficient"
# By operation and platform, best first; "other" is every platform not named. docs/performance.md has the measurements.
_PREFERRED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "convolution": {
        "cpu": ("onednn", "channels_last", "xla"),
        "gpu": ("patches", "xla"),
        "other": ("xla", "channels_last"),
    },
    "dense": {"cpu": ("onednn", "xla"), "other": ("xla",)},
    "dropout": {"cpu": ("native", "xla"), "other": ("xla",)},
    "lookup": {"cpu": ("native", "xla"), "other": ("xla",)},
    "recurrence": {
        "cpu": ("native", "fused_inputs", "cudnn"),
        "gpu": ("cudnn", "fused_inputs"),
        "other": ("fused_inputs", "cudnn"),
    },
    "attention": {"cpu": ("native", "math", "memory_efficient"), "gpu": _GPU_ATTENTION, "other": ("xla",)},
    "normalization": {"cpu": ("native", "custom_vjp", "xla"), "other": ("xla", "custom_vjp")},
    "adam": {"cpu": ("native", "xla"), "other": ("xla",)},
    "trees": {"cpu": ("native", "histograms"), "other": ("histograms",)},
    "histogram": {"cpu": ("by_column", "all_columns"), "other": ("all_columns", "by_column")},
}
_MANY_CLASSES = 1024
_portable: ContextVar[bool] = ContextVar("portable", default=False)
_reasons: ContextVar[dict[str, bool] | None] = ContextVar("reasons", default=None)
# A measurement holds for smaller sizes, and below this many times its own.
_HOLDS_BELOW = 2


def padded_classes(count: int) -> int:
    """Returns the width of a product with ``count`` classes: on a GPU a multiple of 128 for 1,024 classes or more.

    Tensor cores load rows in units of 16 bytes, which 8 numbers of two bytes fill; a row of 50,257, as GPT-2's, starts
    anywhere. Of fewer than 1,024 classes the padding would be a large share, and the product is a small one.
    """
    is_ragged = count >= _MANY_CLASSES and count % 8 != 0
    return count + -count % 128 if is_ragged and platform() == "gpu" else count


class Size(NamedTuple):
    """What decides on a GPU which implementation is faster."""

    value: int  # keys of attention, features of a recurrent layer
    dtype: Any
    text: str  # ``4 × 256 keys``


def choose(operation: str, given: str | None, obstacles: Mapping[str, str | None], size: Size | None = None) -> str:
    """Returns the implementation ``given``, or for None the first of `_PREFERRED` without an obstacle.

    ``obstacles`` maps an implementation to the reason why it cannot be used here, or None. On a GPU, the faster one at
    this ``size`` is first, if it was measured on a card of this compute capability (``measured.json``).

    >>> jn.nn.choose("normalization", None, {"native": "the package is not installed"})  # on a CPU
    'custom_vjp'
    """
    preferred = _PREFERRED[operation]
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
    text = resources.files("jaxnn.nn").joinpath("measured.json").read_text()
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
