"""The grid of devices: how many stand along each named axis, and what is split over which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxnn.types import ConfigError

DATA = "data"
"""The mesh axis that batches are split over."""


def parse_mesh(text: str) -> dict[str, int]:
    """``"data=2,model=2"`` is ``{"data": 2, "model": 2}``; an axis ``data`` of 1 goes first where none is named.

    Raises:
        ConfigError: it is no such list.
    """
    axes: dict[str, int] = {}
    for part in str(text).split(","):
        name, _, size = part.strip().partition("=")
        if not (name.isidentifier() and size.isdecimal() and int(size) >= 1) or name in axes:
            raise ConfigError(
                f"mesh is {text!r}, and must be axes with their sizes, as in data=2,model=2: batches are split over "
                "data, a model's parameters over the axes that it names."
            )
        axes[name] = int(size)
    return axes if DATA in axes else {DATA: 1, **axes}


def format_mesh(axes: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def make_mesh(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> Mesh:
    """``devices`` as a grid, neighbours of the last axis next to each other.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices.
    """
    if math.prod(axes.values()) != len(devices):
        raise ConfigError(
            f"mesh {format_mesh(axes)} is of {math.prod(axes.values())} devices, and this run is to use "
            f"{len(devices)}: make them agree."
        )
    # Axes are Auto: XLA chooses how what is between them lies, since jaxnn's models name no axis of an activation.
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def check_divides(batch_size: int, size: int, name: str = "batch_size") -> None:
    """Confirms that a batch can be split evenly over the data axis.

    Raises:
        ConfigError: it cannot; the message names the nearest sizes that can.
    """
    if batch_size % size:
        below, above = batch_size // size * size, (batch_size // size + 1) * size
        nearest = f"{below} and {above}" if below else f"{above}"
        raise ConfigError(
            f"{name} is {batch_size}, which {size} devices cannot share evenly: the nearest that they can are "
            f"{nearest}; or choose another number of devices."
        )
