"""The timer: measures the cases of a study in alternation, and makes them larger on accelerators."""

from __future__ import annotations

import functools
import itertools
import math
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness._study import Bench, Case, Plain, Row, Rows, Study
from jaxnn.observe import available_bytes
from jaxnn.types import JaxnnError

_MOST_ROUNDS = 50


def interleaved[Key](
    measures: Mapping[Key, Callable[[], float]],
    *,
    rounds: int = 5,
    precision: float | None = None,
) -> dict[Key, tuple[float, ...]]:
    """Measures all contenders once per round, starting with a different one each round, and returns their values.

    A temporary disturbance of the machine then affects all of them, and ratios within a round stay comparable. With
    ``precision`` there are at least ``rounds``, until the 95 % interval of every median is within this fraction of
    the median on either side, and at most 50.

    >>> harness.interleaved({"slow": lambda: 2.0, "fast": lambda: 1.0}, rounds=3)
    {'slow': (2.0, 2.0, 2.0), 'fast': (1.0, 1.0, 1.0)}
    """

    def precise(values: list[float]) -> bool:
        (low, high), middle = median_interval(values), median(values)
        return max(high - middle, middle - low) <= (precision or 0.0) * abs(middle)

    figures: dict[Key, list[float]] = {key: [] for key in measures}
    order = list(measures)
    for count in range(rounds if precision is None else max(rounds, _MOST_ROUNDS)):
        if count >= rounds and all(map(precise, figures.values())):
            break
        start = count % max(1, len(order))
        for key in [*order[start:], *order[:start]]:
            figures[key].append(measures[key]())
    return {key: tuple(values) for key, values in figures.items()}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Returns a distribution-free confidence interval of the median, from order statistics (`scipy.stats`).

    With fewer values than the confidence needs (6 for 95 %) it is the range of the values.
    """
    from scipy.stats import quantile_test  # type: ignore[import-untyped]

    low, high = quantile_test(values, p=0.5).confidence_interval(confidence)
    return (low if low == low else min(values)), (high if high == high else max(values))  # NaN: too few values


def per_call(call: Callable[[], object], seconds: float, *, queued: bool = False) -> Callable[[], float]:
    """Returns a measure for `interleaved`, which repeats ``call`` for about ``seconds`` and returns the mean seconds.

    ``call`` waits for its own result, or is ``queued``: its result is an array, and only the last one is waited for. It
    has run once before, so compilation is not timed. The first measurement fixes the number of calls, at least one,
    from the fastest of up to five calls.

    >>> 0 < harness.per_call(lambda: sum(range(1000)), seconds=0.01)() < 0.01
    True
    """
    timer, count = timeit.Timer(call), 0

    def taken(times: int) -> float:
        if not queued:
            return timer.timeit(times)
        started = time.perf_counter()
        for _ in range(times):
            result = call()
        jax.block_until_ready(result)
        return time.perf_counter() - started

    def measure() -> float:
        nonlocal count
        if not count:
            estimates = [taken(1)]
            while len(estimates) < 5 and sum(estimates) < seconds:
                estimates.append(taken(1))
            count = max(1, round(seconds / min(estimates)))
        return taken(count) / count

    return measure


def measure(study: Study, context: Bench) -> Iterator[list[tuple[Case, Row]]]:
    """Yields the groups of a study, each case with its row; on an accelerator, groups of larger sizes follow.

    The case of the study's largest size is followed by its ``larger`` one until a call takes ``settings.grow_until``
    seconds and is not mostly overhead, or the larger one needs more than an eighth of the memory that is available on
    the device. A CPU keeps to the study's own sizes, and so do settings without ``grow_until``.
    """
    groups = [list(cases) for cases in study.cases(context)]
    until = getattr(context.settings, "grow_until", 0.0)
    memory = {kind: available_bytes(device) or math.inf for kind, device in context.devices.items()}
    known: dict[str, list[Row]] = {kind: [] for kind in context.devices}

    def grown(case: Case, row: Row) -> Iterator[Case]:
        if until and case.larger is not None and case.device != "cpu" and row.time is not None:
            larger = case.larger()
            size = next(name for name, value in larger.what.items() if value != case.what.get(name))
            own: list[Any] = [
                other.what[size]
                for other in itertools.chain(*groups)
                if other.device == case.device and other.what == {**case.what, size: other.what.get(size)}
            ]
            short = row.time.median < until or Rows(known[case.device]).mostly_overhead(row, size)
            if short and case.what[size] >= max(own) and larger.num_bytes <= memory[case.device] / 8:
                yield larger

    for group in groups:
        while group:  # too large for all devices: empty
            pairs = []
            for case, row in zip(group, measure_group(group, context.settings), strict=True):
                # On a CPU, where a call costs microseconds, a case may be no compiled call but a loop in Python.
                accelerated = row.seconds and case.device != "cpu"
                empty = call_overhead(context.devices[case.device], _in_queue(case)) if accelerated else 0.0
                pairs.append((case, row._replace(overhead=empty)))
                known[case.device].append(pairs[-1][1])
            yield pairs
            group = [larger for case, row in pairs for larger in grown(case, row)]


@functools.cache
def call_overhead(device: jax.Device, queued: bool) -> float:
    """Returns the median seconds of a compiled call that adds two numbers on ``device``, ``queued`` or waited for."""
    zero, add = jax.device_put(np.float32(0), device), jax.jit(jnp.add)

    def call() -> Any:
        return add(zero, zero)

    _waited(call)
    measure = per_call(call if queued else functools.partial(_waited, call), 0.01, queued=queued)
    return median(interleaved({"": measure}, rounds=5)[""])


def _in_queue(case: Case) -> bool:
    return case.queued and case.device != "cpu"


def measure_group(group: Sequence[Case], settings: Any) -> list[Row]:
    """Prepares the cases of a group, times them in alternation, and returns one row each.

    `NotMeasured`, any other JaxnnError, and XLA's RuntimeError and MemoryError become a row with the reason.
    """

    def start(case: Case) -> tuple[Any, float, Mapping[str, Plain]]:
        made = case.begin() if case.begin is not None else None
        call, work, observed = made if isinstance(made, tuple) else (made, case.work, {})
        if call is None:
            return None, work, observed
        if case.queued and not _in_queue(case):
            call = functools.partial(_waited, call)
        jax.block_until_ready(call())  # compiles and allocates
        return per_call(call, settings.seconds, queued=_in_queue(case)), work, observed

    started = [_attempt(start, case) for case in group]
    measures = {index: made[0] for index, (made, _) in enumerate(started) if made and made[0]}
    precision = getattr(settings, "precision", None)
    timed, broken = _attempt(lambda: interleaved(measures, rounds=settings.rounds, precision=precision))
    rows = []
    for index, (case, (prepared, missing)) in enumerate(zip(group, started, strict=True)):
        _, work, observed = prepared or (None, case.work, {})
        missing = missing or (broken if index in measures else "")
        if case.observe is not None and not missing:
            more, missing = _attempt(case.observe)
            observed = {**observed, **(more or {})}
        rows.append(Row(dict(case.what), (timed or {}).get(index, ()), work, case.unit, observed, missing))
    return rows


def _waited(call: Callable[[], Any]) -> Any:
    return jax.block_until_ready(call())


def _attempt[**P, T](action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T | None, str]:
    """Returns the result of ``action``, or why there is none: a study continues without the case."""
    try:
        return action(*args, **kwargs), ""
    except JaxnnError as error:
        return None, str(error)
    # What XLA raises if memory runs out or the device does not support a dtype.
    except (RuntimeError, MemoryError) as error:
        return None, f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
