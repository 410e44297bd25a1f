"""The result of a sweep: its members, their metrics, groups, tables, plots, and single members as runs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxnn._json import metrics_of
from jaxnn._text import Table, autopsy_command, format_rate, format_split, short_path, text_table
from jaxnn.run import Run, open_run
from jaxnn.search import Axis, Points, Searcher
from jaxnn.sweeps import _members
from jaxnn.sweeps._backtest import BackTest, backtest
from jaxnn.sweeps._importance import Importance, field_importance, warned
from jaxnn.sweeps._members import LOST, SEED, GroupRow, Groups, Member, count_by_status, show, show_field, show_point
from jaxnn.sweeps._restored import evaluate_members, predict_members, sums_by_example
from jaxnn.tasks import check_direction, direction_of
from jaxnn.types import ConfigError, Direction, Experiment, RecordError, suggest

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from jaxnn.sweeps._comparison import Comparisons
    from jaxnn.sweeps._confirmation import Confirmation
    from jaxnn.sweeps._plan import SweepOptions

FEW_VALUES = 6  # an axis with more values is described by its ends
MOST_ERRORS = 3  # the most frequent ones are shown; the table shows all


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Sweep:
    """A sweep that finished, was interrupted, or still runs.

    >>> swept.status, len(swept.members), [axis.name for axis in swept.axes]
    ('finished', 4, ['learning_rate', 'seed'])

    Attributes:
        members: in the order of their numbers.
        axes: the fields that were swept, in the order they were given.
        lines: the lines of ``metrics.jsonl``: one mapping per member and report, with ``member``, ``step`` and metrics.
        monitor: the metric that ranks evaluations and members, such as ``test_loss``.
        higher_is_better: whether more of it is better.
        directions: ``"min"`` or ``"max"`` for other metrics, as the task states it.
        status: ``planned``, ``running``, ``finished`` or ``interrupted``.
        dir: the directory of its record, or None.
        summary: ``member_steps_per_second``, ``seconds`` by what took them, ``num_compilations``; empty while it runs.
        experiment: what was swept, or None if it was read without.
        name: the option ``name``, or None.
    """

    members: tuple[Member, ...]
    axes: tuple[Axis, ...]
    lines: tuple[Mapping[str, Any], ...]
    monitor: str
    higher_is_better: bool
    directions: Mapping[str, Direction] = dataclasses.field(default_factory=dict)
    status: str = "finished"
    dir: Path | None = None
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experiment: Experiment[Any] | None = None
    name: str | None = None
    # Results do not know how members are trained: the package sets it.
    _confirmed: ClassVar[Callable[..., Confirmation]]
    _compared: ClassVar[Callable[..., Comparisons]]

    @property
    def settings(self) -> tuple[Axis, ...]:
        """The axes with more than one value except the seed, and except fields that the names of members decide."""
        return tuple(axis for axis in self._free_axes if len(axis.values) > 1)

    @property
    def _free_axes(self) -> tuple[Axis, ...]:
        axes = tuple(axis for axis in self.axes if axis.name != SEED)
        has_field = any(Points.NAME in member.config for member in self.members)
        if has_field or Points.NAME not in [axis.name for axis in axes]:
            return axes

        def decided(field: str) -> bool:
            of: dict[str, Any] = {}
            values = [(member.point[Points.NAME], member.point[field]) for member in self.members]
            return all(of.setdefault(name, value) == value for name, value in values)

        return tuple(axis for axis in axes if axis.name == Points.NAME or not decided(axis.name))

    @property
    def lost(self) -> tuple[Member, ...]:
        """The members that diverged or failed."""
        return tuple(member for member in self.members if member.status in LOST)

    def direction(self, metric: str) -> Direction | None:
        """Whether less or more of ``metric`` is better: by the sweep's options if it is monitored; None: not known."""
        if metric == self.monitor:
            return "max" if self.higher_is_better else "min"
        # Its first word is a split, also one of `others`, whose names have no underscore.
        return self.directions.get(metric) or direction_of(metric.partition("_")[2], self.directions)

    def metric_names(self) -> tuple[str, ...]:
        """The metrics that any member has, the monitored one first."""
        names = dict.fromkeys(name for member in self.members for name in member.final)
        return tuple(sorted(names, key=lambda name: name != self.monitor))

    def check_metric(self, metric: str | None) -> str:
        """Returns ``metric``, or the monitored one for None; a ConfigError if no member has it."""
        metric, known = metric or self.monitor, self.metric_names()
        if metric not in known:
            split = self.monitor.partition("_")[0]
            meant = f"{split}_{metric.removeprefix('test_')}"
            hint = f"the sweep was evaluated on {split}: {meant!r}" if meant in known else suggest(metric, known)
            hint = "all diverged or failed" if len(self.lost) == len(self.members) else hint
            raise ConfigError(f"no member has a metric {metric!r}: {hint}.")
        return metric

    def values(self, metric: str) -> np.ndarray:
        """Returns the last value of a metric for every member, ``[members]``; NaN if it has none.

        >>> swept.values("test_accuracy").round(2)
        array([...])
        """
        self.check_metric(metric)
        return np.array([member.final.get(metric, np.nan) for member in self.members], float)

    def scores(self, metric: str) -> np.ndarray:
        """Returns the finite `values` of the complete members, ``[members]``, and NaN for all others."""
        values, complete = self.values(metric), [member.complete for member in self.members]
        return np.where(np.isfinite(values) & np.array(complete, bool), values, np.nan)

    def ranked(self, metric: str | None = None, direction: Direction | None = None) -> list[Member]:
        """Returns the complete members, best first, then those that were cut short, best first, then the others.

        ``direction`` is ``"min"`` or ``"max"``; None: what is known of the metric, a ConfigError if it is nothing.
        """
        metric = self.check_metric(metric)
        sign = -1 if check_direction(metric, direction or self.direction(metric), "direction") == "max" else 1

        def rank(member: Member) -> tuple[int, float]:
            value = member.final.get(metric, math.nan)
            if member.status in LOST or not math.isfinite(value):
                return 2, 0.0
            return int(member.cut_short), sign * value

        return sorted(self.members, key=rank)

    def best(self, metric: str | None = None, direction: Direction | None = None) -> Member:
        """Returns the member with the best last value of ``metric``, by default the monitored one.

        A member that diverged or failed, or whose value is not finite, is never the best; one that was cut short only
        if no member is complete. Among many seeds the best is also the luckiest: `confirm` says how sure it is.
        ``direction``, ``"min"`` or ``"max"``, is needed for a metric that is neither stated nor common. ConfigError
        without it, if the metric is unknown, or no member has a result in it.

        >>> swept.best("test_accuracy")  # by the highest final test_accuracy
        Member(index=..., point={'learning_rate': ..., 'seed': ...}, ...)
        """
        metric = self.check_metric(metric)
        best = self.ranked(metric, direction)[0]
        if best.status in LOST or not math.isfinite(best.final.get(metric, math.nan)):
            counts = count_by_status(self.members)
            raise ConfigError(f"no member has a result in {metric!r} ({counts}): name another metric.")
        return best

    def confirm(
        self, seeds: int = 5, metric: str | None = None, options: SweepOptions | None = None, **changes: Any
    ) -> Confirmation:
        """Trains the best point again with ``seeds`` that the sweep did not use, and says whether it is really better.

        The best of many values is also the luckiest. The runner-up and the experiment's own config are trained with the
        same fresh seeds, and `compare` judges the best against both, seed by seed. Points are ranked by their means
        over the seeds of the sweep. The fresh members are a sweep of their own, recorded beside this one; a second call
        reads them from there. Without a record it trains them again. A member that `jaxnn.search.pbt` copied had other
        values before: its point is trained from the start.

        >>> sweep.confirm()  # doctest: +SKIP
        point      learning_rate  by the sweep  5 fresh seeds                         best against it
        best       0.0123         0.0812        0.0914 ± 0.0041 (0.0863 to 0.0965)    –
        runner-up  0.0207         0.0815        0.0929 ± 0.0052 (0.0864 to 0.0994)    not separable, better by 0.0015
        config     0.001          –             0.1203 ± 0.0030 (0.1166 to 0.1240)    better, -0.0289 (-0.034 to -0.024)

        Args:
            seeds: number of fresh seeds, at least 2.
            metric: by which points are ranked and compared; default: the monitored one.
            options: how to run the fresh members; default: what decides results is as recorded.
            **changes: single options, such as ``progress="none"``.

        Raises:
            ConfigError: the sweep was read without its experiment, its best member is not complete, it had a stopping
                rule that is not given, or as `best`.
            TrainingError: training with fresh seeds was interrupted.
        """
        return self._confirmed(self, seeds, metric, options, changes)

    def compare(self, *by: str, metric: str | None = None) -> Comparisons:
        """Compares each group by the fields ``by``, default all settings, with the best one, paired by seeds.

        Intervals hold all at once with 95 %, corrected for all pairs of groups, since the best is seen in the results.
        ConfigError if there is one group only, or as `jaxnn.compare`.
        """
        return self._compared(self, by, metric)

    def curves(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns a metric against the step.

        These are the steps ``[reports]`` at which any member measured it, and the values ``[members, reports]``, NaN
        for a member without one. ConfigError if it was never measured.

        >>> steps, losses = swept.curves("test_loss")
        >>> losses.shape == (4, len(steps))
        True
        """
        known = {name for line in self.lines for name in metrics_of(line)}
        if metric not in known:
            raise ConfigError(f"no report has a metric {metric!r}: {suggest(metric, known)}.")
        found = {(line["member"], line["step"]): line[metric] for line in self.lines if metric in line}
        steps = sorted({step for _, step in found})
        values = [[found.get((member.index, step), np.nan) for step in steps] for member in self.members]
        return np.array(steps), np.array(values, float)

    def select(self, **fields: Any) -> Sweep:
        """Returns the members whose config fields are as given, as a sweep.

        A field is given by its value, several in a list, set or range, or a function that is true of it; nested fields
        by dotted names, ``select(**{"model.dropout": 0.1})``. ConfigError if a field is unknown, or no member is left.

        >>> len(swept.select(learning_rate=0.1, seed=lambda seed: seed < 1).members)
        1
        """
        members = self.members
        for name, wanted in fields.items():
            known = members[0].fields if members else {}
            if name not in known:
                raise ConfigError(f"the config has no field {name!r} to select by: {suggest(name, known)}.")
            test = _members.selection(wanted, [member.fields[name] for member in members])
            left = tuple(member for member in members if test(member.fields[name]))
            if not left:
                present = ", ".join(dict.fromkeys(repr(member.fields[name]) for member in members))
                asked = "as asked" if callable(wanted) else f"= {wanted!r}"
                raise ConfigError(f"no member has {name} {asked}: there are {present}.")
            members = left
        numbers = {member.index for member in members}
        axes = []
        for axis in self.axes:
            there = [member.fields[axis.name] for member in members]
            axes.append(dataclasses.replace(axis, values=tuple(value for value in axis.values if value in there)))
        lines = tuple(line for line in self.lines if line["member"] in numbers)
        return dataclasses.replace(self, members=members, lines=lines, axes=tuple(axes))

    @property
    def has_repeats(self) -> bool:
        """Whether members share all that was swept, but the seed."""
        names = [axis.name for axis in self._free_axes]
        return len(_members.grouped(self.members, names)) < len(self.members)

    def group(self, by: str | Sequence[str] | None = None, metric: str | None = None) -> Groups:
        """Returns mean, standard deviation and 95 % interval over seeds of each metric, for members that share fields.

        Settings that vary within a group are averaged for each seed, as they are not independent. Only members that
        finished or stopped early are averaged; the others are counted. ConfigError if a field or metric is unknown.

        >>> swept.group(metric="test_accuracy")
        learning_rate  n  test_accuracy
        0.1            2  ...

        Args:
            by: names of config fields; default: all that were swept but the seed.
            metric: one metric; default: all.
        """
        by = [axis.name for axis in self._free_axes] if by is None else by
        names = (by,) if isinstance(by, str) else tuple(by)
        known = self.members[0].fields if self.members else names
        for name in names:
            if name not in known:
                raise ConfigError(f"the config has no field {name!r} to group by: {suggest(name, known)}.")
        metrics = [self.check_metric(metric)] if metric else self.metric_names()
        scores = {name: self.scores(name) for name in metrics}
        rows = []
        for point, positions in _members.grouped(self.members, names):
            members = [self.members[position] for position in positions]
            left_out = Counter(member.status for member in members if not member.complete)
            means = {name: _members.seed_means(members, values[positions]) for name, values in scores.items()}
            spreads = {name: _members.spread_of(values) for name, (values, _) in means.items()}
            most = max((count for _, count in means.values()), default=0)
            complete = [position for position in positions if self.members[position].complete]
            without = {name: int((~np.isfinite(values[complete])).sum()) for name, values in scores.items()}
            numbers = tuple(member.index for member in members)
            rows.append(GroupRow(point, numbers, left_out, spreads, most, without))
        return Groups(tuple(rows), names, {name: self.direction(name) for name in metrics})

    def frame(self, *, curves: bool = False) -> pandas.DataFrame:
        """Returns a pandas table with a row per member: number, config, status, step, final and ``best_`` metrics.

        If any member failed it has a column ``error`` too. With ``curves`` it has a row per member and report instead:
        number, point, step and metrics. ConfigError if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("a data frame needs pandas, which is not installed: pip install pandas") from error
        if curves:
            points = {member.index: {"member": member.index, **member.point} for member in self.members}
            reports = [line for line in self.lines if line["member"] in points]
            return pandas.DataFrame([points[line["member"]] | dict(line) for line in reports])
        rows = []
        for member in self.members:
            row = {"member": member.index, **member.fields, "status": member.status, "step": member.step}
            row |= {**member.final} | {f"best_{name}": value for name, value in member.best.items()}
            rows.append(row | ({"error": member.error} if any(one.error for one in self.members) else {}))
        return pandas.DataFrame(rows)

    def plot(self, metric: str | None = None) -> Figure:
        """Returns a matplotlib figure of the curves and the metric against each axis; default: the monitored metric.

        Means are over members that differ in their seed only. Members that diverged or failed are not part of them and
        are marked with a cross; members that were cut short neither, and are rings at their last value. Of two fields
        or more and 30 members or more, the last panel shows the `importance` of the fields.
        """
        from jaxnn.sweeps._sweep_figure import draw_sweep

        return draw_sweep(self, metric)

    def importance(self, metric: str | None = None, *, step: int | None = None) -> Importance:
        """Returns how much of the variation of ``metric`` over members each swept field explains, with intervals.

        Boosted trees predict members that were held out, and a field's share is what is lost if its values are
        exchanged among these (`jaxnn.trees.permutation_importances`). Shares of fields that interact overlap. If a loss
        spans more than a factor of ten, its logarithm is explained. Members that diverged or failed do not count, nor
        do copies that a searcher made. A warning says if there are fewer than 30 members, or ten for each field, or if
        R² may be 0.

        >>> sweep.importance("test_loss")  # doctest: +SKIP
        field          explains  95 % interval
        learning_rate  71.3 %    58 to 84
        dropout        8.2 %     3 to 13
        all (R²)       80.1 %    74 to 86

        Args:
            metric: default: the monitored one.
            step: at which members are compared. Default: at their ends; if some were cut short, at the last step that
                at least half of them, and ten, reached. The few that a searcher promoted further are alike in the
                fields that decided this, so that these fields would seem unimportant among them.

        Raises:
            ConfigError: there are fewer than ten members to compare, they are equal, or there is no such metric or
                step.
        """
        return warned(field_importance(self, metric, step))

    def run(self, member: int | Member) -> Run:
        """Returns one member, or that of a number, as a run: its state, ``predict``, ``evaluate``.

        It is loaded from the record, and not trained further.

        Raises:
            ConfigError: the sweep was read without its experiment, has no such member, or one that neither finished nor
                stopped early.
            RecordError: the sweep has no record, or the record holds no state of the member.
        """
        index = member.index if isinstance(member, Member) else member
        found = next((each for each in self.members if each.index == index), None)
        if found is None:
            numbers = f"0 to {self.members[-1].index}" if self.members else "none"
            raise ConfigError(f"there is no member {index!r}: their numbers are {numbers}.")
        if self.experiment is None:
            raise ConfigError("the sweep was read without its experiment: open it with open_sweep(path, experiment).")
        if self.dir is None:
            point = show_point(found.point) or "the same config"
            raise RecordError(f"the sweep has no record to open member {index} from: run it alone with {point}.")
        if not found.complete:
            hint = f"jn.fit(experiment, resume={str(self.dir)!r}, member={index}) continues it"
            if found.step == 0:  # it has no state
                hint = found.error or "resume the sweep to train it"
            raise ConfigError(f"member {index} is {found.status}, so it is not a complete run: {hint}.")
        return open_run(self.dir, self.experiment, member=index)

    def predict(self, inputs: Any, *, batch_size: int = 512, devices: int | None = None) -> Any:
        """Returns the outputs of all members, ``[members, examples, ...]``, for ``inputs [examples, ...]``.

        Members of a group are computed together, from the record, without the data, and are sharded over ``devices``;
        None: over all. The rows of members that neither finished nor stopped early are NaN. Arguments and errors are
        those of `Run.predict` and `Sweep.run`.

        >>> outputs = swept.predict(images)  # doctest: +SKIP
        >>> outputs.shape, outputs.mean(axis=0).shape  # doctest: +SKIP
        ((4, 32, 10), (32, 10))
        """
        return predict_members(self, inputs, batch_size, devices)

    def evaluate(self, split: str = "test", *, devices: int | None = None) -> dict[str, np.ndarray]:
        """Returns exact metrics ``[members]`` over a split, which is loaded; devices and NaN as in `predict`.

        Raises:
            ConfigError: the data have no such split, or as `Sweep.run`.
            RecordError: the data are not those that the sweep was trained on, or as `Sweep.run`.
        """
        return evaluate_members(self, split, devices)

    def example_sums(self, split: str = "test") -> list[dict[str, np.ndarray]]:
        """Returns what `Task.evaluate` makes of each example alone, ``[examples, ...]`` by name, for each member.

        ``accuracy`` is then 1 for an example that is right. Errors and NaN are as in `evaluate`.
        """
        return sums_by_example(self, split)

    def backtest(
        self,
        searchers: Mapping[str, Callable[[Points], Searcher]] | None = None,
        metric: str | None = None,
        *,
        orders: int = 20,
        lanes: int | None = None,
        key: int = 0,
    ) -> BackTest:
        """Returns what searchers would have spent and found on the members of this sweep, without training.

        The recorded curves of members that finished or diverged are searched in random orders, in the windows and lanes
        of a search: a search of these points in one of these orders spends the same, up to rounding. ConfigError if
        fewer than two members have a curve.

        >>> swept.backtest({"asha": jn.search.asha, "halving": jn.search.halving}, orders=5)
        searcher  steps spent  found the best  regret in test_loss
        ...

        Args:
            searchers: by name, functions of points in an order, as ``lambda points: jn.search.asha(points, eta=2)``;
                default: `jn.search.halving`, `asha`, `patience` and `extrapolated`.
            metric: by which members are compared; default: the monitored one.
            orders: their number; intervals are over them.
            lanes: members in training at once; default: as a search has, 64 or all.
            key: determines the orders: permutations of ``numpy.random.default_rng(key)``, one after another.
        """
        return backtest(self, searchers, metric, orders, lanes, key)

    def table(self, metric: str | None = None, limit: int = 20) -> Table:
        """Returns at most ``limit`` members, best by ``metric`` first: points, status, step and metrics, and errors.

        They are in the order of their numbers if it is not known whether less or more of it is better.
        Complete members are before those that were cut short, and these before those that diverged or failed. The
        default is the monitored metric.

        >>> swept.table("test_accuracy", limit=2)
        member  learning_rate  seed  status    step  test_accuracy  ...
        """
        first = self.check_metric(metric) if metric else self.monitor
        names = sorted(self.metric_names(), key=lambda name: name != first)
        ranks = first in names and self.direction(first) is not None
        members = self.ranked(first) if ranks else self.members
        errors = any(member.error for member in members[:limit])
        rows = []
        for member in members[:limit]:
            fields, measured = member.fields, member.final
            row = [str(member.index), *(show_field(fields.get(axis.name)) for axis in self.axes), member.status]
            row += [str(member.step), *(show(measured[name]) if name in measured else "–" for name in names)]
            rows.append(row + ([member.error or ""] if errors else []))
        header = ["member", *(axis.name for axis in self.axes), "status", "step"]
        more = len(members) - len(rows)
        return Table([*header, *names, *["error"] * errors], rows, [f"… and {more} more"] if more else [])

    def __repr__(self) -> str:
        return text_table(self.rows())

    def _repr_html_(self) -> str:
        return Table(None, self.rows())._repr_html_()

    def rows(self) -> list[tuple[str, str]]:
        """Returns the summary as rows of name and value."""
        rows = [(self.status, f"sweep of {len(self.members)}: {count_by_status(self.members)}")]
        for axis in self.axes:
            values = ", ".join(map(show_field, axis.values))
            if len(axis.values) > FEW_VALUES:
                ends = " … ".join(map(show_field, (axis.values[0], axis.values[-1])))
                values = f"{len(axis.values)} values, {ends}" + ("" if axis.scale == "nominal" else f" ({axis.scale})")
            rows.append((axis.name, values))
        if rate := self.summary.get("member_steps_per_second"):
            rows.append(("throughput", f"{format_rate(rate)} member steps/s"))
        if (used := self.summary.get("lanes_in_use")) is not None:
            rows.append(("lanes", f"{used:.0%} of those computed were in use"))
        if seconds := self.summary.get("seconds"):
            compiled = self.summary.get("num_compilations", 0)
            split, programs = format_split(seconds), f"{compiled} program{'s' * (compiled != 1)}"
            rows.append(("time", f"{sum(seconds.values()):.2f} s ({split}), {programs} compiled"))
        try:
            best = self.best()
            metrics = ", ".join(f"{name} {show(value)}" for name, value in best.final.items())
            rule = f"{'highest' if self.higher_is_better else 'lowest'} final {self.monitor}"
            rule += ", chosen on test" * self.monitor.startswith("test_")
            rows.append(("best" if best.complete else "best so far", f"{best}, by the {rule}: {metrics}"))
        except ConfigError:
            rows.append(("best", f"no member has a result in {self.monitor}"))
        diverged = [member for member in self.members if member.status == "diverged"]
        rows += [("diverged", str(member)) for member in diverged[:MOST_ERRORS]]
        rows += [("cause", autopsy_command(self.dir, member.index)) for member in diverged[:1] if self.dir is not None]
        errors = Counter(member.error for member in self.members if member.error)
        rows += [("failed", f"{count} with: {error}") for error, count in errors.most_common(MOST_ERRORS)]
        return [*rows, ("record", short_path(self.dir) if self.dir else "none")]
