"""The timer of all benchmarks, and studies measured with it on the devices at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from jaxnn.bench._figures import Plain, Row, Rows, median_interval
from jaxnn.bench._results import (
    RESULTS_FILE,
    Measured,
    Part,
    Results,
    describe_machine,
    read_results,
    write_page,
    write_results,
)
from jaxnn.bench._study import Bench, Case, NotMeasured, Prepared, Study, find_studies
from jaxnn.parallel import PLATFORMS, first_devices
from jaxnn.record import make_room
from jaxnn.types import ConfigError, JaxnnError, suggest


def interleaved[Key](
    measures: Mapping[Key, Callable[[], float]],
    *,
    rounds: int = 5,
    precision: float | None = None,
    most_rounds: int = 50,
) -> dict[Key, tuple[float, ...]]:
    """Measures all contenders once per round, starting with a different one each round.

    A temporary disturbance of the machine then affects all of them, and ratios within a round stay comparable.

    Args:
        measures: by contender, a function that measures once and returns the figure, such as `per_call`.
        rounds: number of rounds, or the least number with ``precision``.
        precision: stop once the 95 % interval of every contender's median is within this share of the median on either
            side; None: after ``rounds``.
        most_rounds: stop after this many rounds, or ``rounds`` if that is more, at the latest.

    Returns:
        By contender, one figure per round.

    Example:
        >>> interleaved({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
        {'a': (1.0, 1.0), 'b': (2.0, 2.0)}
    """

    def precise(values: list[float]) -> bool:
        (low, high), middle = median_interval(values), median(values)
        return max(high - middle, middle - low) <= (precision or 0.0) * abs(middle)

    figures: dict[Key, list[float]] = {key: [] for key in measures}
    order = list(measures)
    for count in range(rounds if precision is None else max(rounds, most_rounds)):
        if count >= rounds and all(precise(values) for values in figures.values()):
            break
        start = count % max(1, len(order))
        for key in [*order[start:], *order[:start]]:
            figures[key].append(measures[key]())
    return {key: tuple(values) for key, values in figures.items()}


def per_call(call: Callable[[], object], seconds: float) -> Callable[[], float]:
    """A measure for `interleaved`: the mean seconds of one of the calls that take about ``seconds`` together.

    Args:
        call: waits for its own result, and ran once before, so that compilation is not timed.
        seconds: duration of one measurement; at least one call is timed. The number of calls is fixed by the first
            measurement, from the fastest of up to five calls.
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
            while len(estimates) < 5 and sum(estimates) < seconds:
                estimates.append(timed(1))
            count = max(1, round(seconds / min(estimates)))
        return timed(count)

    return measure


def measure_group(group: Sequence[Case], settings: Any) -> list[Row]:
    """Prepares the cases of a group, times them in alternation, and returns one row each.

    `NotMeasured`, a JaxnnError, and a RuntimeError or MemoryError of XLA become a row with the reason.
    """
    started = [_attempt(partial(_start, case)) for case in group]
    measures = {
        index: per_call(prepared.call, settings.seconds)
        for index, (prepared, _) in enumerate(started)
        if prepared is not None
    }
    precision = getattr(settings, "precision", None)
    timed, broken = _attempt(partial(interleaved, measures, rounds=settings.rounds, precision=precision))
    rows = []
    for index, (case, (prepared, missing)) in enumerate(zip(group, started, strict=True)):
        missing = missing or (broken if prepared is not None else "")
        observed: Mapping[str, Plain] = {} if prepared is None else prepared.observed
        if case.observe is not None and not missing:
            more, missing = _attempt(case.observe)
            observed = {**observed, **(more or {})}
        work = case.work if prepared is None else prepared.work
        rows.append(Row(dict(case.what), (timed or {}).get(index, ()), work, case.unit, observed, missing))
    return rows


def _start(case: Case) -> Prepared | None:
    """The case's call, called once: that compiles, and touches all memory."""
    if case.begin is None:
        return None
    made = case.begin()
    prepared = made if isinstance(made, Prepared) else Prepared(made, case.work)
    prepared.call()
    return prepared


def _attempt[T](action: Callable[[], T]) -> tuple[T | None, str]:
    """The result of ``action``, or why there is none here: a study continues without a case."""
    try:
        return action(), ""
    except (NotMeasured, JaxnnError) as error:
        return None, str(error)
    # XLA's errors for memory that is short, or a type that this device does not support.
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        return None, f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"


def bench(
    *studies: Study,
    devices: Sequence[str] | None = None,
    quick: bool = False,
    out: str | Path | None = None,
    prices: Mapping[str, float] | None = None,
    say: Callable[[str], None] = print,
) -> Results:
    """Measures ``studies`` and returns their figures by name.

    Figures in ``out`` are kept, except those of the same study and device: a page may be made study by study. A study
    that was interrupted there resumes, if code and versions are the same.

    Args:
        *studies: what to measure, see `find_studies`.
        devices: kinds, such as ``("cpu", "gpu")``; None: all available.
        quick: small sizes and few rounds.
        out: folder that gets ``results.json``, ``results.md`` and pictures; None: nothing is written.
        prices: dollars per hour by kind of device, ``{"cpu": 0.12, "gpu": 2.5}``.
        say: gets one line per step.

    Raises:
        ConfigError: a device is not available, or a price is not a positive number.
        RecordError: ``out`` has figures of another definition, or cannot be written.
    """
    for kind, dollars in (prices or {}).items():
        if kind not in PLATFORMS:
            raise ConfigError(f"prices has {kind!r}, which is no kind of device: {suggest(kind, PLATFORMS)}.")
        if isinstance(dollars, bool) or not isinstance(dollars, int | float) or not 0 < dollars < math.inf:
            raise ConfigError(f"prices[{kind!r}] is {dollars!r}, but must be dollars per hour, more than 0.")
    folder = None if out is None else Path(out)
    found = first_devices(devices)
    mine = {describe_machine(device).label for device in found.values()}
    page = dict(read_results(folder)) if folder is not None and (folder / RESULTS_FILE).exists() else {}
    for study in studies:  # before anything is measured in vain
        old, new = page.get(study.name), Measured(study.definition(study.quick if quick else study.full), quick, {})
        if old is not None and set(old.parts) - mine:
            old.check_comparable(study.name, new, str(folder), "what was asked for")
    if folder is not None:
        make_room(folder)
    for study in studies:
        say(f"{study.name}: {study.title}")
        context = Bench(found, study.quick if quick else study.full, prices or {})
        page[study.name] = _measure_study(study, context, quick, page, folder, say)
        if folder is not None:
            known, here = {each.name: each for each in studies}, find_studies()
            # A page of this checkout's studies names those that are missing.
            write_page(page, folder, {**here, **known} if set(here) & set(page) else known, [study.name])
    if folder is not None:
        say(f"bench: {folder / 'results.md'}")
    return {study.name: page[study.name] for study in studies}


def _measure_study(
    study: Study, context: Bench, quick: bool, page: Results, folder: Path | None, say: Callable[[str], None]
) -> Measured:
    """Measures group by group; results are written after each, since a study may take hours."""
    machines = {kind: describe_machine(device) for kind, device in context.devices.items()}
    new = Measured(study.definition(context.settings), quick, {})
    old = page.get(study.name, new)
    fits = old.definition == new.definition
    kept = old.parts if fits else {}
    complete = {label for label, part in kept.items() if part.complete}
    before = {  # rows of an interrupted run of the same committed code and versions
        kind: part.rows
        for kind, machine in machines.items()
        if (part := kept.get(machine.label)) and study.resumable and not part.complete
        if part.machine.runs_the_same(machine)
    }
    rows: dict[str, list[Row]] = {kind: [] for kind in context.devices}

    def so_far(complete: bool) -> dict[str, Part]:
        return {machine.label: Part(machine, Rows(rows[kind]), complete) for kind, machine in machines.items()}

    for group in filter(None, study.cases(context)):  # a group may be empty: too large for every device here
        started = time.perf_counter()
        known = [before.get(case.device, Rows()).one(**case.what) for case in group]
        same = all(row.what == case.what and not row.missing for row, case in zip(known, group, strict=True))
        for case, row in zip(group, known if same else measure_group(group, context.settings), strict=True):
            rows[case.device].append(row)
        shared = set.intersection(*(set(case.what.items()) for case in group))
        names = ", ".join(f"{name} {value}" for name, value in group[0].what.items() if (name, value) in shared)
        took = "measured before" if same else f"{time.perf_counter() - started:.1f} s"
        say(f"{study.name}: {len(group)} cases{f' of {names}' if names else ''}: {took}")
        # Complete figures stay until new ones are complete.
        partial_parts = {label: part for label, part in so_far(False).items() if label not in complete}
        if folder is not None and partial_parts and fits:
            write_results({**page, study.name: new._replace(parts={**kept, **partial_parts})}, folder)
    return new._replace(parts={**kept, **so_far(True)})
