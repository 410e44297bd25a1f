"""Runs studies on the devices at hand, and keeps their page up to date."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxnn.bench.figures import Plain, Row, Rows
from jaxnn.bench.machine import describe_machine
from jaxnn.bench.results import FILE, Measured, Part, Results, merge_results, read_results, write_page, write_results
from jaxnn.bench.study import Bench, Case, NotMeasured, Prepared, Study, find_studies
from jaxnn.bench.timer import interleaved, per_call
from jaxnn.observe import keeping_freed_memory, share_heap
from jaxnn.parallel import PLATFORMS, first_devices
from jaxnn.record import make_room
from jaxnn.types import ConfigError, JaxnnError, suggest

TITLE = "Measured figures"


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
    # As in a run: page faults of large arrays would be counted as computing. Before JAX starts its threads.
    share_heap()
    found = first_devices(devices)
    mine = {describe_machine(device).label for device in found.values()}
    page = dict(read_results(folder)) if folder is not None and (folder / FILE).exists() else {}
    for study in studies:  # before anything is measured in vain
        old, new = page.get(study.name), Measured(study.definition(study.quick if quick else study.full), quick, {})
        if old is not None and set(old.parts) - mine:
            old.check_alike(study.name, new, str(folder), "what was asked for")
    if folder is not None:
        make_room(folder)
    for study in studies:
        say(f"{study.name}: {study.title}")
        context = Bench(found, study.quick if quick else study.full, prices or {})
        with keeping_freed_memory():  # what a study took is returned before the next
            page[study.name] = _measure_study(study, context, quick, page, folder, say)
        if folder is not None:
            known, found_here = {each.name: each for each in studies}, find_studies()
            if set(found_here) & set(page):  # a page of this checkout's studies names those that are missing
                known = {**found_here, **known}
            write_page(page, folder, known, title=TITLE, changed=[study.name])
    if folder is not None:
        say(f"bench: {folder / 'results.md'}")
    return {study.name: page[study.name] for study in studies}


def merge(sources: Sequence[str | Path], out: str | Path) -> Results:
    """Merges the results of several machines into one page.

    Args:
        sources: folders or ``results.json`` files.
        out: folder of the page.

    Raises:
        ConfigError: fewer than two sources.
        RecordError: a source cannot be read, or two do not fit together.
    """
    if len(sources) < 2:
        raise ConfigError("merge needs the results of two machines or more: give their folders.")
    results = merge_results([(str(source), read_results(Path(source))) for source in sources])
    write_page(results, Path(out), find_studies(), title=TITLE, changed=list(results))
    return results


def _measure_study(
    study: Study, context: Bench, quick: bool, page: Results, folder: Path | None, say: Callable[[str], None]
) -> Measured:
    """Measures group by group; what is done is written after each, since a study may take hours."""
    machines = {kind: describe_machine(device) for kind, device in context.devices.items()}
    new = Measured(study.definition(context.settings), quick, {})
    old = page.get(study.name)
    if old is None or old.definition != new.definition:
        old = new
    before = {
        kind: part.rows
        for kind, machine in machines.items()
        if (part := old.parts.get(machine.label)) and not part.complete and part.machine.runs_the_same(machine)
    }
    rows: dict[str, list[Row]] = {kind: [] for kind in context.devices}

    def so_far(complete: bool) -> dict[str, Part]:
        return {machine.label: Part(machine, Rows(rows[kind]), complete) for kind, machine in machines.items()}

    for group in filter(None, study.cases(context)):  # a group may be empty: too large for every device here
        started = time.perf_counter()
        known = [before.get(case.device, Rows()).one(**case.what) for case in group] if study.resumable else []
        same = known and all(row.what == case.what and not row.missing for row, case in zip(known, group, strict=True))
        for case, row in zip(group, known if same else measure_group(group, context.settings), strict=True):
            rows[case.device].append(row)
        shared = set.intersection(*(set(case.what.items()) for case in group))
        names = ", ".join(f"{name} {value}" for name, value in group[0].what.items() if (name, value) in shared)
        took = "measured before" if same else f"{time.perf_counter() - started:.1f} s"
        say(f"{study.name}: {len(group)} cases{f' of {names}' if names else ''}: {took}")
        kept = {label for label, part in old.parts.items() if part.complete}
        partial_parts = {label: part for label, part in so_far(False).items() if label not in kept}
        if folder is not None and partial_parts and (study.name not in page or page[study.name] is old):
            merged = new._replace(parts={**old.parts, **partial_parts})
            write_results({**page, study.name: merged}, folder)
    return new._replace(parts={**old.parts, **so_far(True)})


def measure_group(group: Sequence[Case], settings: Any) -> list[Row]:
    """Prepares the cases of a group, times them in alternation, and returns one row each.

    What raises `NotMeasured`, a JaxnnError, or a RuntimeError or MemoryError of XLA becomes a row that says why.
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
