"""Scaling options: over which devices a study goes, and how long it measures."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from jaxnn.loop.options import check_choice, check_count, check_seconds
from jaxnn.types import ConfigError

CHOICES = {
    "strategy": ("data", "fsdp", "pmap"),
    "device": (None, "cpu", "gpu", "tpu"),
    "progress": ("auto", "none"),
}
LEAST = {"steps_per_call": 1, "rounds": 1}


@dataclasses.dataclass(frozen=True)
class ScalingOptions:
    """How to measure; flags of every script's ``scaling`` and keyword arguments of ``jn.scaling``."""

    devices: tuple[int, ...] | None = None
    """The numbers of devices to train on; default: 1, 2, 4, … up to all. Of several processes: 1 and all."""
    predict: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    """Larger numbers of devices, to predict for."""
    strategy: Literal["data", "fsdp", "pmap"] = "data"
    """As in a run: data splits batches, fsdp the state too, pmap is data's classic form."""
    device: Literal["cpu", "gpu", "tpu"] | None = None
    """The kind of device to compute on; default: JAX's, a GPU where there is one."""
    batch_per_device: int | None = None
    """Examples each device gets in weak scaling; default: what each of the most devices gets in strong scaling."""
    steps_per_call: int = 16
    """Training steps compiled into one call."""
    rounds: int = 5
    """How often everything is measured, in turn."""
    seconds: float = 0.3
    """How long a measurement goes on, at the least one call."""
    save: Path | None = None
    """Write all figures to SAVE.json and a picture to SAVE.png."""
    progress: Literal["auto", "none"] = "auto"
    """Whether to say what is being done."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            check_count(name, getattr(self, name), least)
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_seconds("seconds", self.seconds)
        if self.batch_per_device is not None:
            check_count("batch_per_device", self.batch_per_device, 1)
        for name in ("devices", "predict"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _ascending(name, getattr(self, name)))


def _ascending(name: str, counts: Any) -> tuple[int, ...]:
    """Numbers of devices, each once.

    Raises:
        ConfigError: one is no such number, or there is none where one is needed.
    """
    counts = tuple(counts) if isinstance(counts, tuple | list | range) else (counts,)
    for count in counts:
        check_count(name, count, 1)
    if name == "devices" and not counts:
        raise ConfigError("devices is empty: give the numbers of devices to train on, as in devices=(1, 2, 4).")
    return tuple(sorted(set(counts)))


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, … up to ``most``, which is there too."""
    return tuple(sorted({*(2**power for power in range(int(math.log2(most)) + 1)), most}))
