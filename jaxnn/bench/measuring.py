"""``jn.bench``: measures studies on the devices that there are, and writes one page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from jaxnn.bench.machine import Column, describe_column
from jaxnn.bench.results import (
    FILE,
    Measured,
    Part,
    Results,
    check_alike,
    merge_results,
    read_results,
)
from jaxnn.bench.rows import Rows
from jaxnn.bench.running import run_study
from jaxnn.bench.studies import STUDIES, find_study
from jaxnn.bench.study import Bench, Study
from jaxnn.bench.writing import Page, write_page
from jaxnn.observe import device_name, keeping_freed_memory, share_heap
from jaxnn.parallel.devices import PLATFORMS, first_devices
from jaxnn.record.directory import make_room
from jaxnn.types import ConfigError, suggest


def bench(
    names: Sequence[str] | str = "all",
    *,
    devices: Sequence[str] | None = None,
    quick: bool = False,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    prices: Mapping[str, float] | None = None,
    say: Callable[[str], None] = print,
) -> Results:
    """Measures studies of the articles' claims.

    What is measured in ``out`` already stays there, but for the same studies on the same devices: a page may be made
    study by study. A study that was interrupted there goes on where it was, if it is the same code.

    Args:
        names: of studies, see ``jaxnn bench``; ``"all"`` for all.
        devices: kinds, such as ``("cpu", "gpu")``; None: all that there are.
        quick: small sizes and few rounds: minutes for all of them.
        out: the folder that gets ``results.json``, ``results.md``, ``results.html`` and pictures; None: nothing is
            written.
        data_dir: where the data sets lie; None: where they always do.
        prices: dollars an hour by kind of device, ``{"cpu": 0.12, "gpu": 2.5}``; of others the study ``cost`` has its
            own, with their dates.
        say: gets a line for each step.

    Returns:
        What was measured, by study.

    Raises:
        ConfigError: no such study, a device that is not there, or a price that is none.
        RecordError: ``out`` has results of another definition, or cannot be written.
    """
    studies = _chosen(names)
    prices = _checked_prices(prices or {})
    folder = None if out is None else Path(out)
    # As in a run: page faults of large arrays would be counted as computing. Before JAX starts its threads.
    share_heap()
    found = first_devices(devices)
    mine = {device_name(device) for device in found.values()}
    page = Page(STUDIES, folder, _already_there(folder, studies, quick, mine))
    if folder is not None:
        make_room(folder)
    results: Results = {}
    for study in studies:
        say(f"{study.name}: {study.title}")
        settings = study.quick if quick else study.full
        given = Bench(found, settings, None if data_dir is None else Path(data_dir), prices)
        # What a study took is returned before the next.
        with keeping_freed_memory():
            results = {**results, study.name: _measure(study, given, quick, page, say)}
        page.put(study, results[study.name])
    if folder is not None:
        say(f"bench: {folder / 'results.md'}")
    return results


def _measure(study: Study, bench: Bench, quick: bool, page: Page, say: Callable[[str], None]) -> Measured:
    """What is measured of a study; the page keeps it as it grows, since a study may take hours."""
    columns = {kind: describe_column(device) for kind, device in bench.devices.items()}
    definition = study.definition(bench.settings)

    def measured(rows: Mapping[str, Rows]) -> Measured:
        return Measured(definition, quick, {column.label: Part(column, rows[kind]) for kind, column in columns.items()})

    old = page.results.get(study.name)
    return measured(
        run_study(
            study,
            bench,
            say=lambda line: say(f"{study.name}: {line}"),
            keep=lambda rows: page.keep(study, measured(rows)),
            before=_measured_before(old, definition, columns) if old is not None and study.goes_on else None,
        )
    )


def _measured_before(old: Measured, definition: Mapping[str, Any], columns: Mapping[str, Column]) -> dict[str, Rows]:
    """By kind of device, the rows of a study that was interrupted, if the same code was measuring the same."""
    if old.definition != definition:
        return {}
    return {
        kind: part.rows
        for kind, column in columns.items()
        if (part := old.parts.get(column.label)) and not part.whole and part.column.runs_the_same(column)
    }


def _chosen(names: Sequence[str] | str) -> list[Study]:
    wanted = [names] if isinstance(names, str) else list(names)
    if wanted == ["all"]:
        return list(STUDIES)
    if not wanted:
        raise ConfigError("no study is named: give names, or all.")
    return [find_study(name) for name in wanted]


def _checked_prices(prices: Mapping[str, float]) -> Mapping[str, float]:
    for kind, dollars in prices.items():
        if kind not in PLATFORMS:
            raise ConfigError(f"prices has {kind!r}, and there is no such kind of device: {suggest(kind, PLATFORMS)}.")
        if isinstance(dollars, bool) or not isinstance(dollars, int | float) or not 0 < dollars < math.inf:
            raise ConfigError(f"prices[{kind!r}] is {dollars!r}, and must be dollars an hour, more than 0.")
    return prices


def _already_there(folder: Path | None, studies: Sequence[Study], quick: bool, mine: Set[str]) -> Results:
    """What a page has before; checked now, so that nothing is measured in vain. ``mine`` are the devices here."""
    if folder is None or not (folder / FILE).exists():
        return {}
    before = read_results(folder)
    for study in studies:
        if (old := before.get(study.name)) is not None and set(old.parts) - mine:
            definition = study.definition(study.quick if quick else study.full)
            check_alike(study.name, (str(folder), old), ("what was asked for", Measured(definition, quick, {})))
    return before


def merge(sources: Sequence[str | Path], out: str | Path) -> Results:
    """One page of several machines' results.

    Args:
        sources: folders or ``results.json`` files.
        out: the folder of the page.

    Raises:
        ConfigError: fewer than two sources.
        RecordError: a source cannot be read, the same study was defined differently, or measured twice on a device.
    """
    if len(sources) < 2:
        raise ConfigError("merge needs the results of two machines or more: give their folders.")
    results = merge_results([(str(source), read_results(Path(source))) for source in sources])
    write_page(results, Path(out), STUDIES, changed=STUDIES)
    return results
