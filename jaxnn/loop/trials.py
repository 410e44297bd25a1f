"""Calls before the first step, whose results are thrown away: they settle memory and the steps per call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from jaxnn.loop.allocating import Allocation, settle_allocation
from jaxnn.loop.compiling import Programs
from jaxnn.loop.plan import Plan, typical_window, with_tails
from jaxnn.loop.tuning import Call, Choice, choose_steps_per_call
from jaxnn.nn import platform
from jaxnn.parallel import process_count
from jaxnn.types import TrainState


def try_out(
    programs: Programs, plan: Plan, given: int | None, allocator: str, stack: contextlib.ExitStack
) -> tuple[Allocation, Choice]:
    """Settles how memory is allocated, and then, since that changes what calls cost, the steps per call.

    Args:
        programs: what is compiled.
        plan: where windows end; its steps per call are open.
        given: the steps per call that are not to be measured, or None.
        allocator: the run option.
        stack: gets what is to be undone when the run ends.
    """
    make_call = make_calls(programs, "to measure steps per call")
    length = with_tails(plan._replace(steps_per_call=given or 1)).call_lengths()[0]
    programs.compile_train(length, "start")
    # Trying calls of many steps would take long, and many steps share a call's page faults. Several processes would
    # each try as many as they need, and all must make the same calls.
    call = make_call(1) if length == 1 and process_count() == 1 else None
    allocation = settle_allocation(allocator, programs.temporary_host_bytes(length), call, stack)
    return allocation, _choose(programs, make_call, plan, given)


def _choose(programs: Programs, make_call: Callable[[int], Call], plan: Plan, given: int | None) -> Choice:
    """The given steps per call, or those that measuring finds fastest."""
    window = typical_window(plan)
    if given is not None:
        return Choice(min(given, plan.num_steps), {})
    if window == 1:
        return Choice(1, {})
    return fastest_steps(programs, make_call, min(window, plan.num_steps))


def fastest_steps(programs: Programs, make_call: Callable[[int], Call], window: int) -> Choice:
    """The steps per call that measuring finds fastest, of which a ``window`` of steps is best made of whole calls."""
    # XLA makes the gradients of plain convolutions slow in loops on a CPU, so a loop is tried with care.
    wary = platform() == "cpu" and programs.plain_convolutions > 0
    return choose_steps_per_call(make_call, window, wary=wary)


def make_calls(programs: Programs, cause: str) -> Callable[[int], Call]:
    """From a number of steps to a call that trains so many, from where the call before left off.

    Args:
        programs: what is compiled.
        cause: why, for the ledger.
    """
    state: TrainState | None = None

    def make_call(length: int) -> Call:
        program = programs.compile_train(length, cause)
        # The same every time: what reading data costs does not depend on the steps per call.
        examples = programs.feed.sample(length)

        def call() -> object:
            nonlocal state
            state, totals = program(programs.init() if state is None else state, programs.zeros, examples)
            return totals

        return call

    return make_call
