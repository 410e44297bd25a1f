"""``python experiment.py scaling``: how fast it would train on more devices, simulated ones where there is only one."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxnn.cli.cores import simulate_devices
from jaxnn.parallel import find_devices, is_leader, process_count
from jaxnn.scaling import ScalingOptions, ScalingStudy, scaling
from jaxnn.scaling.options import powers_of_two
from jaxnn.types import Experiment

TOLD = "Measures how fast it would train on several numbers of devices, and predicts it for more."
# The most devices that a CPU stands for where no number is given.
SIMULATED = 8


def run_scaling(experiment: Experiment[Any], options: ScalingOptions) -> ScalingStudy:
    """Runs and prints the study that a command line asks for."""
    study = scaling(experiment, with_devices(options) if process_count() == 1 else options)
    if is_leader():
        print(study)
    return study


def with_devices(options: ScalingOptions) -> ScalingOptions:
    """``options`` for a machine with one device: the CPU stands for several, and this says so."""
    most = max(options.devices or (SIMULATED,))
    simulate_devices(most)
    found = find_devices(options.device)
    if found[0].platform == "cpu":
        _say(options, "the CPU", len(found))
    elif len(found) == 1 and most > 1 and options.device is None:
        _say(options, f"there is one {found[0].platform} here: the CPU", most)
        return dataclasses.replace(options, device="cpu", devices=options.devices or powers_of_two(most))
    return options


def _say(options: ScalingOptions, who: str, count: int) -> None:
    if options.progress == "auto":
        print(f"scaling: {who} stands for {count} device{'s, which share its cores' if count > 1 else ''}", flush=True)
