"""Training an experiment as a call to be timed: steps on data that lie on the device, without reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxnn.loop.compiling import Programs
from jaxnn.loop.feed import make_feed
from jaxnn.loop.trials import fastest_steps, make_calls
from jaxnn.loop.tuning import CALL_SECONDS, Call, seconds_per_step
from jaxnn.observe import Clock, Ledger
from jaxnn.parallel import SINGLE, computing_on
from jaxnn.types import Experiment, Splits


def training_call(
    experiment: Experiment[Any], splits: Splits, kind: str, num_steps: int | None = None
) -> tuple[Callable[[], Any], int, dict[str, list[str]]]:
    """A call that trains some steps, from where the call before left off, and waits for the last.

    Args:
        experiment: what is trained; its ``data`` is not called.
        splits: its data, read once for all devices.
        kind: the device's, ``cpu``, ``gpu`` or ``tpu``.
        num_steps: compiled into one program, as the loop does; None: as many as a run would have there, by measuring.

    Returns:
        The call, the number of its steps, and the implementations of operations that they compute with.
    """
    config = experiment.config
    with computing_on(kind):
        feed = make_feed(splits, config.seed, config.batch_size, layout=SINGLE)
        programs = Programs(experiment, splits.train, feed, Ledger(), Clock(), SINGLE)
        make_call = make_calls(programs, "start")
        num_steps = num_steps or _enough_steps(programs, make_call, config.num_steps)
        call = make_call(num_steps)
        implementations = programs.implementations
    return called_on(kind, call), num_steps, implementations


def _enough_steps(programs: Programs, make_call: Callable[[int], Call], most: int) -> int:
    """So many that a call's own cost, which on a fast device is more than a small step's, hardly matters."""
    # Steps this long need no company; to compile many in vain takes minutes.
    if seconds_per_step(make_call(1), 1) >= CALL_SECONDS:
        return 1
    return fastest_steps(programs, make_call, most).steps_per_call


def called_on(kind: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` on a kind of device, waited for."""

    def waited_for() -> Any:
        with computing_on(kind):
            return jax.block_until_ready(call())

    return waited_for
