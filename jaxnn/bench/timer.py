"""The timer of all benchmarks: contenders are measured in alternation, until the figures are precise enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

from jaxnn.bench.figures import median_interval

ESTIMATES = 5


def interleaved[Key](
    measures: Mapping[Key, Callable[[], float]],
    *,
    rounds: int = 5,
    precision: float | None = None,
    most_rounds: int = 50,
    say: Callable[[str], None] = lambda line: None,
) -> dict[Key, tuple[float, ...]]:
    """Measures all contenders once per round, starting with a different one each round.

    What disturbs the machine for a while then disturbs all of them, and ratios within a round stay comparable.

    Args:
        measures: by contender, a function that measures once and returns the figure, such as `per_call`.
        rounds: number of rounds, or the least number with ``precision``.
        precision: stop once the 95 % interval of every contender's median is within this share of the median on either
            side; None: after ``rounds``.
        most_rounds: stop after this many rounds at the latest.
        say: gets one line per round.

    Returns:
        By contender, one figure per round.

    Example:
        >>> interleaved({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
        {'a': (1.0, 1.0), 'b': (2.0, 2.0)}
    """
    figures: dict[Key, list[float]] = {key: [] for key in measures}
    order, count = list(measures), 0
    while order and (count < rounds or (precision is not None and count < most_rounds)):
        started = time.perf_counter()
        for key in [*order[count % len(order) :], *order[: count % len(order)]]:
            figures[key].append(measures[key]())
        count += 1
        say(f"round {count}: {len(order)} measured in {time.perf_counter() - started:.1f} s")
        if precision is not None and count >= rounds and all(_precise(found, precision) for found in figures.values()):
            break
    return {key: tuple(found) for key, found in figures.items()}


def _precise(values: list[float], precision: float) -> bool:
    low, high = median_interval(values)
    return max(high - median(values), median(values) - low) <= precision * abs(median(values))


def per_call(call: Callable[[], object], seconds: float) -> Callable[[], float]:
    """A measure for `interleaved`: the mean seconds of one of the calls that take about ``seconds`` together.

    Args:
        call: waits for its own result, and ran once before, so that compilation is not timed.
        seconds: duration of one measurement; at least one call is timed. The number of calls is fixed by the first
            measurement, from the least of a few calls.
    """
    count = 0

    def timed(number: int) -> float:
        started = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - started) / number

    def measure() -> float:
        nonlocal count
        if not count:
            estimates = [timed(1)]
            while len(estimates) < ESTIMATES and sum(estimates) < seconds:
                estimates.append(timed(1))
            count = max(1, round(seconds / min(estimates)))
        return timed(count)

    return measure
