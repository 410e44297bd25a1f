"""Confirmation of a sweep's best point: it is trained again with fresh seeds, beside the points it should beat."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxnn._fields import with_changes
from jaxnn._json import config_from_json, leaf_fields
from jaxnn._text import Table
from jaxnn.record import RECORD_FILE, RecordReader
from jaxnn.search import Points
from jaxnn.sweeps._comparison import Comparison, compared
from jaxnn.sweeps._executors import sweep as train
from jaxnn.sweeps._members import SEED, GroupRow, Member, point_key, show, show_field
from jaxnn.sweeps._plan import SweepOptions
from jaxnn.sweeps._sweep import Sweep
from jaxnn.types import ConfigError, Experiment, TrainingError, check_int

BEST, RUNNER_UP, CONFIG = "best", "runner-up", "config"


class Candidate(NamedTuple):
    """A point that was trained with fresh seeds."""

    point: Mapping[str, Any]  # its fields without the seed
    member: Member | None  # the best member of the sweep with this point; None of the experiment's own config
    found: float  # its value by the sweep, a mean over seeds if there are several; NaN without a member
    fresh: GroupRow  # its values with fresh seeds

    def show_found(self) -> str:
        """Its value by the sweep as text, with the status of a member that was cut short."""
        if self.member is None:
            return "–"
        return show(self.found) + ("" if self.member.complete else f" ({self.member.status}, step {self.member.step})")


@dataclasses.dataclass(frozen=True, repr=False)
class Confirmation:
    """How sure the best point of a sweep is; what `Sweep.confirm` returns.

    Attributes:
        metric: by which points are compared.
        candidates: ``best``, ``runner-up`` and ``config``, the experiment's own config, as far as these differ.
        comparisons: ``best`` against each of the others, paired by fresh seeds.
        sweep: the members that were trained with fresh seeds.
    """

    metric: str
    candidates: Mapping[str, Candidate]
    comparisons: Mapping[str, Comparison]
    sweep: Sweep

    @property
    def member(self) -> Member:
        """The best member of the best point, as trained by the sweep."""
        member = self.candidates[BEST].member
        assert member is not None
        return member

    def table(self) -> Table:
        """Returns a row per point: its value by the sweep, with fresh seeds, and how the best compares with it."""
        rows = []
        for name, candidate in self.candidates.items():
            fresh = candidate.fresh
            lost = [f"{count} {status}" for status, count in fresh.left_out.items()]
            row = [name, *map(show_field, candidate.point.values()), candidate.show_found()]
            rows.append([*row, ", ".join([fresh.show(self.metric), *lost]), self._verdict(name)])
        seeds = len(self.candidates[BEST].fresh.members)
        header = ["point", *self.candidates[BEST].point, "by the sweep", f"{seeds} fresh seeds", "best against it"]
        chosen = "The best by the sweep was chosen for its value, which flatters it; fresh seeds do not."
        notes = [f"{self.metric}: mean ± standard deviation (95 % interval of the mean). {chosen}"]
        return Table(header, rows, notes)

    def _verdict(self, name: str) -> str:
        found = self.comparisons.get(name)
        if found is None:
            return "–"
        low, high = found.interval
        if found.verdict != "not separable":
            return f"{found.verdict}, {found.difference:+.3g} ({low:+.3g} to {high:+.3g})"
        more = f", about {found.seeds_needed} seeds needed" if found.seeds_needed is not None else ""
        if (direction := self.sweep.direction(self.metric)) is None:
            return f"not separable, {found.difference:+.3g}{more}"
        word = "better" if (found.difference > 0) == (direction == "max") else "worse"
        return f"not separable, {word} by {abs(found.difference):.3g}{more}"

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def confirm_best(
    sweep: Sweep, seeds: int, metric: str | None, options: SweepOptions | None, changes: Mapping[str, Any]
) -> Confirmation:
    """Trains the best points of ``sweep`` with fresh seeds and compares them, as `Sweep.confirm`."""
    check_int("confirm: seeds", seeds, least=2)
    metric = sweep.check_metric(metric)
    best = sweep.best(metric)
    if not best.complete:
        raise ConfigError(f"the best, {best}, is {best.status}: finish the sweep, then confirm its best.")
    experiment, options = _as_recorded(sweep, options or SweepOptions(), changes)
    found = _ranked(sweep, metric, experiment.config)
    used = {experiment.config.seed, *(member.fields[SEED] for member in sweep.members)}
    unused = list(itertools.islice((seed for seed in itertools.count() if seed not in used), seeds))
    points = [{**candidate.point, SEED: seed} for candidate in found.values() for seed in unused]
    fresh = _trained(sweep, experiment, points, options)
    if fresh.status != "finished":
        where = f", which continues {fresh.dir}" if fresh.dir is not None else ""
        raise TrainingError(f"training with fresh seeds was interrupted: confirm again{where}.")
    groups = fresh.group([*found[BEST].point], metric).rows
    parts, candidates = dict[str, Sweep](), dict[str, Candidate]()
    for place, (name, row) in enumerate(zip(found, groups, strict=True)):
        parts[name] = dataclasses.replace(fresh, members=fresh.members[seeds * place : seeds * (place + 1)])
        candidates[name] = found[name]._replace(fresh=row)
    comparisons = {
        name: compared(parts[name], parts[BEST], metric)
        for name in (RUNNER_UP, CONFIG)
        if name in parts and candidates[name].fresh.n and candidates[BEST].fresh.n
    }
    return Confirmation(metric, candidates, comparisons, fresh)


def _ranked(sweep: Sweep, metric: str, config: Any) -> dict[str, Candidate]:
    """The points to train: the best by its mean over seeds, the next, and the one of ``config`` unless it is these."""
    # The names of members are no fields.
    fields = {name for name, _ in leaf_fields(config)}
    names = [axis.name for axis in sweep.axes if axis.name in fields and axis.name != SEED]
    members, seen, found = sweep.ranked(metric), set[int](), list[tuple[Member, float]]()
    for row in sweep.group(names, metric).ranked(metric):
        seen |= {*row.members}
        found.append((next(member for member in members if member.index in row.members), row.spread.mean))
    for member in members:  # then those that were cut short
        value = member.final.get(metric, math.nan)
        if member.index not in seen and member.cut_short and math.isfinite(value):
            found.append((member, value))
    empty = GroupRow({}, (), {}, {})
    candidates = {
        name: Candidate({field: member.fields[field] for field in names}, member, value, empty)
        for name, (member, value) in zip((BEST, RUNNER_UP), found, strict=False)
    }
    own = {name: operator.attrgetter(name)(config) for name in names}
    if point_key(own) not in [point_key(candidate.point) for candidate in candidates.values()]:
        candidates[CONFIG] = Candidate(own, None, math.nan, empty)
    return candidates


def _as_recorded(
    sweep: Sweep, options: SweepOptions, changes: Mapping[str, Any]
) -> tuple[Experiment[Any], SweepOptions]:
    """The experiment and the ``options`` with ``changes``; what decides results is as recorded, unless it is given."""
    experiment = sweep.experiment
    if experiment is None:
        raise ConfigError("the sweep was read without its experiment: open it with open_sweep(path, experiment).")
    if sweep.dir is not None:
        facts = RecordReader(sweep.dir).parts()[0].facts
        experiment = dataclasses.replace(experiment, config=config_from_json(facts["config"], experiment.config))
        recorded, given = facts["options"], {*options.explicit(), *changes}
        if recorded["stop"] is not None and "stop" not in given:
            raise ConfigError(f"the sweep had the stopping rule {recorded['stop']!r}: give confirm the same, stop=….")
        names = {*SweepOptions.marked("decides")} - {"lanes", "stop", *given}
        kept = {name: recorded[name] for name in names}
        if facts.get("search") and kept.get("patience") is not None:  # it counts evaluations, one a window
            kept["eval_every"] = int(sweep.curves(sweep.monitor)[0][0])
        options = with_changes(options, kept)
    return experiment, with_changes(options, changes, experiment.config)


def _trained(
    sweep: Sweep, experiment: Experiment[Any], points: Sequence[Mapping[str, Any]], options: SweepOptions
) -> Sweep:
    """The ``points``, trained beside the record of ``sweep``, or read from there if they were trained before."""
    if sweep.dir is None:
        options = options if options.run_dir is not None else dataclasses.replace(options, record=False)
    elif options.run_dir is None and options.record:
        digest = hashlib.sha256(repr([*map(point_key, points)]).encode()).hexdigest()[:8]
        path = sweep.dir.with_name(f"{sweep.dir.name}-confirm-{digest}")
        where = "resume" if (path / RECORD_FILE).is_file() else "run_dir"
        options = with_changes(options, {where: path})
    scales = {axis.name: axis.scale for axis in sweep.axes if axis.name in points[0]} | {SEED: "nominal"}
    return train(experiment, Points(tuple(points), scales), options)
