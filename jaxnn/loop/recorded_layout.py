"""How a record was laid out on its devices, as far as it goes with what is asked for now and with what is here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxnn.loop.options import DEFAULTS
from jaxnn.parallel import choose_devices, find_devices, find_strategy, parse_mesh
from jaxnn.types import ConfigError


def recorded_layout(
    recorded: Mapping[str, Any], given: Mapping[str, Any], device: str | None, where: str
) -> dict[str, Any]:
    """The ``devices``, ``strategy`` and ``mesh`` of a record that is gone on with; what is given now goes before them.

    Args:
        recorded: the options of the record.
        given: the options that are given now.
        device: the kind of device to go on with; None: JAX's.
        where: the record, for messages: ``the run in runs/…``.

    Raises:
        ConfigError: the devices that the record asks for are not here.
    """
    found = find_devices(device)
    kept = _without_clashes(recorded, given, len(found))
    if "devices" not in given and "mesh" not in given:
        _check_devices(kept, found, where)
    return kept


def _without_clashes(recorded: Mapping[str, Any], given: Mapping[str, Any], num_devices: int) -> dict[str, Any]:
    """The recorded layout without what speaks against an option that is given; ``num_devices`` are there."""
    kept = {name: recorded[name] for name in ("devices", "strategy", "mesh")}
    if "mesh" in given:
        kept["devices"] = None
        if "strategy" not in given and not _fits(recorded["strategy"], given["mesh"]):
            kept["strategy"] = DEFAULTS.strategy
    elif recorded["mesh"] is not None:
        # The mesh says how many by itself, and stays where that is what is asked for.
        size = _size(recorded["mesh"])
        kept["devices"] = None
        asked = num_devices if given.get("devices") == "all" else given.get("devices", size)
        if asked != size:
            kept["mesh"] = None
        elif "strategy" in given and not _fits(given["strategy"], recorded["mesh"]):
            kept |= {"mesh": None, "devices": size}
    return kept


def _check_devices(kept: Mapping[str, Any], found: Sequence[jax.Device], where: str) -> None:
    """Raises ConfigError unless ``found`` can be the devices of the record."""
    try:
        choose_devices(found, kept["devices"] if kept["mesh"] is None else _size(kept["mesh"]))
    except ConfigError as error:
        used = f"devices={kept['devices']}" if kept["mesh"] is None else f"mesh {kept['mesh']}"
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"{where} used {used}: give --devices {len(found)} to go on with what is here ({reason})."
        ) from error


def _size(mesh: str) -> int:
    """How many devices a mesh is of."""
    return math.prod(parse_mesh(mesh).values())


def _fits(strategy: Any, mesh: str) -> bool:
    """Whether a strategy can use a mesh."""
    return find_strategy(strategy).fits(parse_mesh(mesh))
