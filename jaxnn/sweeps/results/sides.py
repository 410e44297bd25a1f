"""What may be compared, all as members: a sweep, a run, the directory of either, or a list of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxnn.loop import Run, RunOptions
from jaxnn.record import config_json, final_metrics, is_sweep, metrics_of, read_metrics, read_run
from jaxnn.sweeps.results.outcomes import Member, Outcomes
from jaxnn.sweeps.results.reading import open_sweep
from jaxnn.sweeps.results.sweep import Sweep
from jaxnn.sweeps.results.tables import show_point, show_value
from jaxnn.types import ConfigError

type Source = Sweep | Run | str | Path
type Comparable = Source | Sequence[Source]


class Side(NamedTuple):
    """One of the two that are compared.

    Attributes:
        name: ``A`` or ``B``.
        outcomes: its members; a run is one.
        dirs: the directories of those of its parts that have one.
    """

    name: str
    outcomes: Outcomes
    dirs: tuple[Path, ...]


def side_of(name: str, given: Comparable) -> Side:
    """``given`` as the side ``name``; the metric it monitors is that of its first part.

    Raises:
        ConfigError: it is nothing that can be compared, or an empty list.
        RecordError: a path holds neither run nor sweep.
    """
    sources = list(given) if isinstance(given, list | tuple) else [given]
    if not sources:
        raise ConfigError(f"side {name} is an empty list: give at least one sweep or run.")
    parts = [_outcomes(name, source) for source in sources]
    members = tuple(member for part in parts for member in part.members)
    paths = (source.dir if isinstance(source, Sweep | Run) else Path(str(source)) for source in sources)
    dirs = tuple(path for path in paths if path is not None)
    return Side(name, Outcomes(members, (), (), parts[0].monitor, parts[0].higher_is_better), dirs)


def varying_fields(members: Sequence[Member]) -> set[str]:
    """The config fields that are not the same for all ``members``."""
    fields = [member.fields for member in members]
    return {name for name in fields[0] if len({repr(each.get(name)) for each in fields}) > 1} if fields else set()


def told_sides(a: Side, b: Side) -> tuple[str, str]:
    """What each side is: where it lies, and its constant fields in which the other differs."""
    fields_a, fields_b = _constant(a.outcomes.members), _constant(b.outcomes.members)
    # By how they are shown: a record has lists where memory has tuples.
    common = [name for name in fields_a if name in fields_b]
    differing = [name for name in common if show_value(fields_a[name]) != show_value(fields_b[name])]
    return _told(a, {n: fields_a[n] for n in differing}), _told(b, {n: fields_b[n] for n in differing})


def _constant(members: Sequence[Member]) -> dict[str, Any]:
    varying = varying_fields(members)
    return {name: value for name, value in members[0].fields.items() if name not in varying} if members else {}


def _told(side: Side, differing: Mapping[str, Any]) -> str:
    more = f" and {len(side.dirs) - 1} more" if len(side.dirs) > 1 else ""
    where = f"{side.dirs[0]}{more}" if side.dirs else ""
    return "  ".join(filter(None, [where, show_point(differing)]))


def _outcomes(name: str, source: Any) -> Outcomes:
    if isinstance(source, Outcomes):
        return source
    if isinstance(source, Run):
        return _of_run(source)
    if isinstance(source, str | Path):
        path = Path(source)
        return open_sweep(path) if is_sweep(path) else _of_record(path)
    raise ConfigError(f"side {name} is {source!r}: give a sweep, a run, the path of either, or a list of these.")


def _of_run(run: Run) -> Outcomes:
    names = list(run.metrics)
    rows = zip(*(run.metrics[name] for name in names), strict=True)
    # In memory a report that did not measure a metric has NaN there; what it did measure as NaN is lost likewise.
    lines = [{name: value for name, value in zip(names, row, strict=True) if not np.isnan(value)} for row in rows]
    config = config_json(run.experiment.config)
    return _one_member(config, run.summary.status, lines, run.monitor, more=run.higher_is_better)


def _of_record(path: Path) -> Outcomes:
    facts, lines = read_run(path), read_metrics(path)
    options = RunOptions(monitor=facts["options"]["monitor"], monitor_mode=facts["options"]["monitor_mode"])
    measured = {name for line in lines for name in metrics_of(line)}
    held_out = "validation" if any(name.startswith("validation_") for name in measured) else "test"
    monitor = f"{held_out}_{options.monitor}"
    return _one_member(facts["config"], facts["status"], lines, monitor, more=options.higher_is_better)


def _one_member(
    config: Mapping[str, Any], status: str, lines: Sequence[Mapping[str, Any]], monitor: str, *, more: bool
) -> Outcomes:
    evaluated = [line for line in lines if not np.isnan(line.get(monitor, np.nan))]
    best = min(evaluated, key=lambda line: -line[monitor] if more else line[monitor], default={})
    step = int(lines[-1]["step"]) if lines else 0
    return Outcomes((Member(0, {}, config, status, step, final_metrics(lines), best),), (), (), monitor, more)
