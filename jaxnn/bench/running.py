"""Running a study: its cases begun, timed in turn and observed; what cannot be is a row that says why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxnn.bench.rows import Plain, Row, Rows
from jaxnn.bench.study import Begun, Bench, Case, NotMeasured, Study
from jaxnn.bench.timing import time_in_turn
from jaxnn.types import JaxnnError


def run_study(
    study: Study,
    bench: Bench,
    say: Callable[[str], None],
    *,
    keep: Callable[[dict[str, Rows]], None] = lambda rows: None,
    before: Mapping[str, Rows] | None = None,
) -> dict[str, Rows]:
    """What was measured on each device.

    Args:
        study: what to measure.
        bench: on which devices, and how thoroughly.
        say: gets a line for each group of cases.
        keep: gets the rows so far after each group, since a study may take hours.
        before: by device, what is measured already; a group of which that is all is not begun.

    Returns:
        The rows of each of ``bench.devices``, in the order of the study's cases.
    """
    rows: dict[str, list[Row]] = {name: [] for name in bench.devices}
    # A size may be too large for every device that is here.
    for group in filter(None, study.cases(bench)):
        started, known = time.perf_counter(), _known(group, before or {})
        for case, row in zip(group, known or _measure(group, bench.settings), strict=True):
            rows[case.device].append(row)
        if known is None:
            keep({name: Rows(found) for name, found in rows.items()})
        say(f"{_told(group)} {'was measured before' if known else f'in {time.perf_counter() - started:.1f} s'}")
    return {name: Rows(found) for name, found in rows.items()}


def _known(group: Sequence[Case], before: Mapping[str, Rows]) -> list[Row] | None:
    """The rows of a group that was measured; its cases are compared, so it is all of them or none."""
    found = [before.get(case.device, Rows()).one(**case.what) for case in group]
    # A row that says more is another case's.
    same = all(row.what == case.what and not row.missing for row, case in zip(found, group, strict=True))
    return found if same else None


def _measure(group: Sequence[Case], settings: Any) -> list[Row]:
    started = [_attempt(partial(_start, case)) for case in group]
    calls = {index: begun.call for index, (begun, _) in enumerate(started) if begun is not None}
    timed, broken = _attempt(partial(time_in_turn, calls, settings.rounds, settings.seconds))
    rows = []
    for index, (case, (begun, missing)) in enumerate(zip(group, started, strict=True)):
        work = case.work if begun is None else begun.work
        missing = missing or (broken if begun is not None else "")
        observed: Mapping[str, Plain] | None = None
        known = {} if begun is None else begun.observed
        if case.observe is not None and not missing:
            observed, missing = _attempt(case.observe)
        seconds = (timed or {}).get(index, ())
        rows.append(Row(dict(case.what), seconds, work, case.unit, {**known, **(observed or {})}, missing))
    return rows


def _start(case: Case) -> Begun | None:
    """The case's call, once made: that compiles, and touches all memory."""
    if case.begin is None:
        return None
    made = case.begin()
    begun = made if isinstance(made, Begun) else Begun(made, case.work)
    begun.call()
    return begun


def _attempt[T](action: Callable[[], T]) -> tuple[T | None, str]:
    """What ``action`` gives, or why it cannot be done here: a study goes on without a case."""
    try:
        return action(), ""
    except (NotMeasured, JaxnnError) as error:
        return None, str(error)
    # What XLA says of memory that is short, or of a type that this device does not compute with.
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        return None, f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"


def _told(group: Sequence[Case]) -> str:
    """What the cases of a group have in common."""
    shared = set.intersection(*(set(case.what.items()) for case in group))
    names = [f"{name} {value}" for name, value in group[0].what.items() if (name, value) in shared]
    return f"{len(group)} case{'s' if len(group) != 1 else ''}{' of ' if names else ''}{', '.join(names)}"
