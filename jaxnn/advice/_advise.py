"""``jn.advise``: measures an experiment on each device that there is, and says which to use."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxnn.advice._advice import Advice, DeviceFigures
from jaxnn.advice._advise_options import AdviseOptions
from jaxnn.advice._probes import measure_parts, plan_batch_size, plan_members
from jaxnn.data import check_batch_size
from jaxnn.engine import Trial, check_config, check_data, check_parts, with_changes
from jaxnn.observe import device_name, missing_gpu
from jaxnn.parallel import first_devices
from jaxnn.types import ConfigError, Experiment

# Batch sizes are tried in steps of a factor, so many down from the config's and up, so that a crossover is found.
FACTOR, DOWN, UP = 4, 2, 5


def advise(experiment: Experiment[Any], options: AdviseOptions | None = None, **changes: Any) -> Advice:
    """Measures ``experiment`` on each kind of device, and says which to use and what would fill it.

    For each: throughput at several batch sizes, where the time of a step goes, throughput of several sweep members side
    by side. Nothing is trained or written. It costs some seconds and about ten compilations a device.

    Args:
        experiment: what would be run.
        options: how to measure.
        **changes: single options, such as ``devices=("cpu", "gpu")``.

    Raises:
        ConfigError, DataError: it cannot be run, or a device is not there.
    """
    options = with_changes(options or AdviseOptions(), changes)
    config = experiment.config
    check_config(config)
    devices = first_devices(options.devices)
    splits = experiment.data(config)
    check_data(splits)
    check_parts(experiment)
    check_batch_size(splits.train, config.batch_size)
    # Read once, whatever is tried.
    held = dataclasses.replace(experiment, data=lambda _: splits)
    sizes = _sizes(config.batch_size, splits.train.num_examples)
    figures = {}
    for kind, device in devices.items():
        _say(options, f"{device_name(device)}: batch sizes {sizes[0]} to {sizes[-1]}")
        plan = plan_batch_size(held, sizes, kind)
        parts = measure_parts(held, splits, kind)
        figures[kind] = DeviceFigures(device_name(device), plan, parts, _widths(held, options, kind))
    asked = options.devices is None and "gpu" not in devices
    absent = missing_gpu() or "JAX has no GPU here, so none was measured." if asked else ""
    return Advice(splits.name, config.batch_size, figures, absent)


def _sizes(own: int, num_examples: int) -> list[int]:
    """Ascending, the config's own among them."""
    below = [own // FACTOR**power for power in range(DOWN + 1)]
    above = [own * FACTOR**power for power in range(1, UP + 1)]
    return sorted({size for size in below + above if 1 <= size <= num_examples})


def _widths(experiment: Experiment[Any], options: AdviseOptions, kind: str) -> tuple[Trial, ...]:
    if options.members == 1:
        return ()
    _say(options, f"{kind}: up to {options.members} members side by side")
    try:
        return plan_members(experiment, options.members, kind).trials
    # Not every experiment can be swept: data that are streamed, say.
    except ConfigError:
        return ()


def _say(options: AdviseOptions, line: str) -> None:
    if options.progress == "auto":
        print(f"advise: {line}", flush=True)
