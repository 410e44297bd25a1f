"""Training steps of an experiment as a call to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxnn.engine import CALL_SECONDS, fastest_steps, make_calls, programs_of, seconds_per_step
from jaxnn.parallel import computing_on
from jaxnn.types import Experiment, Splits


def training_call(
    experiment: Experiment[Any], splits: Splits, kind: str, num_steps: int | None = None
) -> tuple[Callable[[], Any], int, dict[str, list[str]]]:
    """A call that trains for some steps, continuing where the call before ended, and waits for the result.

    Args:
        experiment: what is trained; its ``data`` is not called.
        splits: its data, read once for all devices.
        kind: kind of device, ``cpu``, ``gpu`` or ``tpu``.
        num_steps: steps per call; None: as many as a run would use there, chosen by measuring.

    Returns:
        The call, its number of steps, and the implementations of operations that are used.
    """
    config = experiment.config
    with computing_on(kind):
        programs = programs_of(experiment, splits)
        make_call = make_calls(programs, "start")
        if num_steps is None:
            # Steps this long need no company: compiling many takes minutes.
            long = seconds_per_step(make_call(1), 1) >= CALL_SECONDS
            num_steps = 1 if long else fastest_steps(programs, make_call, config.num_steps).steps_per_call
        call, implementations = make_call(num_steps), programs.implementations
    return call_on(kind, call), num_steps, implementations


def call_on(kind: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` on a kind of device; waits for the result."""

    def wait() -> Any:
        with computing_on(kind):
            return jax.block_until_ready(call())

    return wait
