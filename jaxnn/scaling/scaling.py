"""``jn.scaling``: how fast an experiment trains on more and more devices, measured and predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from jaxnn.data import check_batch_size
from jaxnn.loop.checks import check_data, check_parts
from jaxnn.loop.options import check_config, with_changes
from jaxnn.parallel import check_divides, choose_devices, computing_on, find_devices, is_leader
from jaxnn.record.directory import make_room
from jaxnn.record.provenance import config_json
from jaxnn.scaling.cases import Case, Message, Sizes, message_sizes
from jaxnn.scaling.cost import Reduction, fit_link
from jaxnn.scaling.machine import observe_machine
from jaxnn.scaling.options import ScalingOptions, powers_of_two
from jaxnn.scaling.programs import Workshop
from jaxnn.scaling.study import ScalingStudy
from jaxnn.scaling.timing import Contender, time_in_turn
from jaxnn.types import ConfigError, Experiment


def scaling(experiment: Experiment[Any], options: ScalingOptions | None = None, **changes: Any) -> ScalingStudy:
    """Measures how fast ``experiment`` trains on 1, 2, 4, … devices, and predicts it for more.

    Both kinds of scaling are measured: strong, one batch of ``config.batch_size`` shared by all devices, and weak, as
    many examples on each. Each step is timed beside the same one without collectives, in which every device trains by
    itself, and all-reduces by themselves; all in one process, in turn. Examples lie on the devices: what feeding costs
    is no part of it.

    It costs about ``rounds × seconds`` for each of 10 to 30 programs, twice that on the whole, and their compilations.

    Args:
        experiment: what would be run.
        options: how to measure.
        **changes: single scaling options, such as ``devices=(1, 2, 4, 8)`` or ``strategy="fsdp"``.

    Raises:
        ConfigError, DataError: it cannot be run, there are fewer devices, or some cannot share a batch evenly.
    """
    options = with_changes(options or ScalingOptions(), changes)
    config = experiment.config
    check_config(config)
    if options.save is not None and is_leader():
        make_room(options.save.parent)
    with computing_on(options.device):
        devices = find_devices(options.device)
        sizes = _sizes(config.batch_size, options, devices)
        splits = experiment.data(config)
        check_data(splits)
        check_parts(experiment)
        cases = sizes.cases(options.predict)
        check_batch_size(splits.train, config.batch_size)
        _check_weak(splits.train.num_examples, sizes)
        say = _say if options.progress == "auto" and is_leader() else _keep_quiet
        machine = observe_machine(devices)
        workshop = Workshop(experiment, splits, options)
        contenders = _compile(workshop, cases, sizes, say)
        timings = time_in_turn(contenders, options.rounds, options.seconds, say)
    reductions = tuple(
        Reduction(key.num_devices, key.num_bytes, timing.median, machine.turns(key.num_devices))
        for key, timing in timings.items()
        if isinstance(key, Message)
    )
    study = ScalingStudy(
        name=splits.name,
        config=config_json(config),
        strategy=options.strategy,
        machine=machine,
        sizes=sizes,
        predict_for=options.predict,
        steps_per_call=options.steps_per_call,
        parameter_bytes=workshop.parameter_bytes,
        timings={key: timing for key, timing in timings.items() if isinstance(key, Case)},
        collectives=workshop.collectives,
        reductions=reductions,
        link=fit_link(reductions),
    )
    if options.save is not None and is_leader():
        study.save(options.save)
    return study


def _sizes(batch_size: int, options: ScalingOptions, devices: list[jax.Device]) -> Sizes:
    """Which numbers of devices are there, and can share the batch.

    Raises:
        ConfigError: one is more than there are, or cannot.
    """
    most = len(devices)
    counts = options.devices or (powers_of_two(most) if jax.process_count() == 1 else (1, most))
    for count in counts:
        if count > 1:
            choose_devices(devices, count)
        check_divides(batch_size, count)
    return Sizes(counts, batch_size, options.batch_per_device or batch_size // max(counts))


def _check_weak(num_examples: int, sizes: Sizes) -> None:
    """Confirms that the largest batch of weak scaling is one of the training data.

    Raises:
        ConfigError: it is not.
    """
    most = max(sizes.devices)
    if most * sizes.batch_per_device > num_examples:
        raise ConfigError(
            f"batch_per_device is {sizes.batch_per_device:,}, so {most} devices have {most * sizes.batch_per_device:,} "
            f"examples a step, and there are {num_examples:,}: give {num_examples // most:,} at the most."
        )


def _compile(
    workshop: Workshop, cases: list[Case], sizes: Sizes, say: Callable[[str], None]
) -> dict[Case | Message, Contender]:
    started = time.perf_counter()
    contenders: dict[Case | Message, Contender] = {case: workshop.step(case) for case in cases}
    for num_devices in sizes.devices:
        for num_bytes in message_sizes(workshop.parameter_bytes) if num_devices > 1 else ():
            message = Message(num_devices, num_bytes)
            contenders[message] = workshop.reduction(message)
    say(f"{len(contenders)} programs compiled in {time.perf_counter() - started:.0f} s")
    return contenders


def _say(line: str) -> None:
    print(f"scaling: {line}", flush=True)


def _keep_quiet(line: str) -> None:
    """Nobody asked."""
