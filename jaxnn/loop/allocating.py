"""Whether a run has freed memory kept: decided by what a compiled call takes and by what a few calls show."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxnn.loop.tuning import ENOUGH_STEPS
from jaxnn.observe import (
    MAPPED_BYTES,
    can_keep_freed_memory,
    format_bytes,
    keeping_freed_memory,
    page_faults,
    share_heap,
)
from jaxnn.types import ConfigError

# The first calls ask for new memory all the same: any of JAX's threads may run one, and blocks must find their places.
MOST_CALLS = 8


class Allocation(NamedTuple):
    """What became of the run option ``allocator``.

    Attributes:
        kept: whether freed memory is kept for the time of the run.
        temporary_bytes: what a call takes on the host and frees again; 0 on other devices than a CPU.
        page_faults: what the best of a few calls cost with freed memory kept; None where none was made.
    """

    kept: bool
    temporary_bytes: int
    page_faults: int | None = None

    def line(self, steps_per_call: int) -> str | None:
        """What a report says of it; None: nothing was done, or so many steps share a call that it hardly matters."""
        taken = f"a call's {format_bytes(self.temporary_bytes)} of temporaries"
        if self.kept:
            counted = "" if self.page_faults is None else f", now {self.page_faults:,} page faults"
            return f"keeps freed memory for the run ({taken}{counted}); --allocator default leaves it to glibc"
        if self.page_faults is None or steps_per_call >= ENOUGH_STEPS:
            return None
        return (
            f"gives freed memory back, since keeping it left {taken} at {self.page_faults:,} page faults; "
            "MALLOC_ARENA_MAX=1 in the environment that Python starts in cures that"
        )


def keep_from_the_start(wish: str, stack: contextlib.ExitStack) -> None:
    """Has freed memory kept where that is asked for, if it can be before JAX starts its threads.

    Raises:
        ConfigError: it cannot be kept here.
    """
    if wish != "keep":
        return
    if not can_keep_freed_memory():
        raise ConfigError(
            "allocator is 'keep', and only glibc's on Linux can be told to keep freed memory: leave allocator out."
        )
    share_heap()
    stack.enter_context(keeping_freed_memory())


def settle_allocation(
    wish: str, temporary_bytes: int, call: Callable[[], object] | None, stack: contextlib.ExitStack
) -> Allocation:
    """Decides, for ``auto``, and tries it out.

    Args:
        wish: the run option.
        temporary_bytes: what a call takes on the host and frees again.
        call: trains one call's worth and returns arrays it does not wait for; None: nothing is tried.
        stack: gets what ends with the run.
    """
    large = temporary_bytes >= MAPPED_BYTES
    if wish == "default" or (wish == "auto" and not (large and can_keep_freed_memory())):
        return Allocation(False, temporary_bytes)
    with contextlib.ExitStack() as trial:
        if wish == "auto":
            trial.enter_context(keeping_freed_memory())
        expected = temporary_bytes // mmap.PAGESIZE
        faults = None if call is None or not large else fewest_page_faults(call, enough=expected // 2)
        kept = wish == "keep" or faults is None or faults <= expected // 2
        if kept:
            stack.enter_context(trial.pop_all())
    return Allocation(kept, temporary_bytes, faults)


def fewest_page_faults(call: Callable[[], object], enough: int) -> int:
    """The page faults of the best of a few calls, one after another; no more calls once one had ``enough`` or fewer."""
    fewest: float = math.inf
    for _ in range(MOST_CALLS):
        before = page_faults()
        jax.block_until_ready(call())
        fewest = min(fewest, page_faults() - before)
        if fewest <= enough:
            break
    return int(fewest)
