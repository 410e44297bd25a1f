"""Timing the calls of a group in turn: what disturbs the machine for a while disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

ESTIMATES = 5


def time_in_turn[Key](
    calls: Mapping[Key, Callable[[], object]], rounds: int, seconds: float
) -> dict[Key, tuple[float, ...]]:
    """The seconds of each call, one figure a round; another call is first each round.

    Args:
        calls: each waits for its own result; they were called before.
        rounds: how many.
        seconds: how long each is timed in a round, at least once.
    """
    counts = {key: max(1, round(seconds / _estimated(call, seconds))) for key, call in calls.items()}
    measured: dict[Key, list[float]] = {key: [] for key in calls}
    keys = list(calls)
    for index in range(rounds):
        first = index % len(keys) if keys else 0
        for key in [*keys[first:], *keys[:first]]:
            measured[key].append(_seconds_of(calls[key], counts[key]))
    return {key: tuple(figures) for key, figures in measured.items()}


def _estimated(call: Callable[[], object], seconds: float) -> float:
    """The least of some calls, for a single one may be held up; they take ``seconds`` at most, but for the last."""
    least = spent = _seconds_of(call, 1)
    for _ in range(ESTIMATES - 1):
        if spent >= seconds:
            break
        taken = _seconds_of(call, 1)
        least, spent = min(least, taken), spent + taken
    return least


def _seconds_of(call: Callable[[], object], count: int) -> float:
    """The mean over ``count`` calls."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count
