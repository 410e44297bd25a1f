"""What a sweep leaves: its members, and what can be asked of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxnn.loop import Run, aligned, fit, format_rate
from jaxnn.record import metrics_of
from jaxnn.sweeps.design.members import with_fields
from jaxnn.sweeps.results.member_table import first_line, member_table
from jaxnn.sweeps.results.outcomes import At, Outcomes, count_by_status
from jaxnn.sweeps.results.outcomes import Axis as Axis
from jaxnn.sweeps.results.outcomes import Member as Member
from jaxnn.sweeps.results.selecting import select_members
from jaxnn.sweeps.results.summaries import Groups as Groups
from jaxnn.sweeps.results.summaries import data_frame, group_members
from jaxnn.sweeps.results.tables import Table, html_table, show, show_point, show_value
from jaxnn.types import ConfigError, Experiment, RecordError

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from matplotlib.figure import Figure

# An axis with more values is told by its ends.
FEW_VALUES = 6
# So many reasons of failures are told, each with its first member.
MOST_REASONS = 3


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Sweep(Outcomes):
    """A sweep that finished, was interrupted, or still runs.

    Attributes:
        members: in the order of their numbers.
        axes: the fields that were swept, in the order they were given.
        lines: what ``metrics.jsonl`` holds: a mapping a member and report, with ``member``, ``step`` and the metrics.
        monitor: the metric that says which evaluation is best, such as ``test_loss``.
        higher_is_better: whether more of it is better.
        status: ``planned``, ``running``, ``finished`` or ``interrupted``.
        dir: the directory of its record, or None.
        summary: ``member_steps_per_second``, ``seconds``, ``num_compilations``; empty while it runs.
        experiment: what was swept, or None where it was read without.
    """

    status: str
    dir: Path | None
    summary: Mapping[str, Any]
    experiment: Experiment[Any] | None = None

    def select(self, **fields: Any) -> Sweep:
        """The members whose config fields are as given, as a sweep.

        Args:
            **fields: for a config field its value, several in a list, or a function that is true of it, as in
                ``select(learning_rate=1e-3, seed=range(4), dropout=lambda rate: rate < 0.5)``; nested fields by
                dotted names, ``select(**{"model.dropout": 0.1})``.

        Raises:
            ConfigError: an unknown field, or no member left.
        """
        members = tuple(select_members(self.members, fields))
        numbers = {member.index for member in members}
        lines = tuple(line for line in self.lines if line["member"] in numbers)
        axes = tuple(_narrowed(axis, members) for axis in self.axes)
        return dataclasses.replace(self, members=members, lines=lines, axes=axes)

    def group(self, by: str | Sequence[str] | None = None, metric: str | None = None, at: At = "final") -> Groups:
        """Mean, standard deviation and 95 % interval of each metric over members that share some fields.

        Only members that came to their end have a part in them; the others are counted.

        Args:
            by: names of config fields; default: all that were swept but the seed.
            metric: one metric; default: all.
            at: their ``final`` values, or those of the ``best`` evaluation.

        Raises:
            ConfigError: an unknown field or metric.
        """
        return group_members(self, by, metric, at)

    def frame(self) -> pandas.DataFrame:
        """A pandas table, a row a member: its number, config, status, step, final metrics, and ``best_`` ones.

        Where any failed there is ``error`` too.

        Raises:
            ConfigError: pandas is not installed.
        """
        errors = any(member.error for member in self.members)
        told = ({"error": member.error} if errors else {} for member in self.members)
        return data_frame([_flat_member(member) | error for member, error in zip(self.members, told, strict=True)])

    def curves_frame(self) -> pandas.DataFrame:
        """A pandas table, a row a member and report: its point, the step and what was measured.

        Raises:
            ConfigError: pandas is not installed.
        """
        points = {member.index: dict(member.point) for member in self.members}
        lines = (line for line in self.lines if line["member"] in points)
        return data_frame([{"member": line["member"], **points[line["member"]], **line} for line in lines])

    def plot(self, metric: str | None = None) -> Figure:
        """Curves and the metric against each axis, as a matplotlib figure; default: of the monitored metric.

        Raises:
            ConfigError: an unknown metric.
        """
        from jaxnn.sweeps.pictures.figure import draw_sweep

        return draw_sweep(self, metric)

    def run(self, member: int | Member) -> Run:
        """One member as a run of its own: its state, ``predict``, ``evaluate``.

        It is loaded, not trained any further.

        Args:
            member: its number, or itself.

        Raises:
            ConfigError: the sweep was read without its experiment, has no such member, or the member did not come to
                its end.
            RecordError: the member has no run directory.
        """
        member = self._member(member)
        if self.experiment is None:
            raise ConfigError("the sweep was read without its experiment: open it with open_sweep(path, experiment).")
        if member.dir is None or not member.dir.is_dir():
            raise RecordError(
                f"member {member.index} has no run directory: sweep again with the options record and member_runs on, "
                f"or run it alone with {show_point(member.point) or 'the same config'}."
            )
        if not member.complete:
            raise ConfigError(
                f"member {member.index} is {member.status}, and loading it would train it on: do so with "
                f"jn.fit(experiment.replace(…), resume={str(member.dir)!r})."
            )
        experiment = dataclasses.replace(self.experiment, config=with_fields(self.experiment.config, member.point))
        return fit(experiment, resume=member.dir, progress="none")

    def table(self, metric: str | None = None, at: At = "final", limit: int = 20) -> Table:
        """The members best first: their points, status, step and metrics, and where any failed, why.

        Those that came to their end are before those that were cut short, and these before those that were lost.

        Args:
            metric: by which; default: the monitored one.
            at: their ``final`` metrics, or those of the ``best`` evaluation, whose step ``best step`` is.
            limit: so many members at most.

        Raises:
            ConfigError: an unknown metric.
        """
        names = self.metric_names(at)
        if metric is None and self.monitor not in names:
            return member_table(self.members, self.axes, names, at, limit)
        metric = self.check_metric(metric, at)
        names = tuple(sorted(names, key=lambda name: name != metric))
        return member_table(self.ranked(metric, at), self.axes, names, at, limit)

    def __repr__(self) -> str:
        return "\n".join(aligned(self._facts()))

    def _repr_html_(self) -> str:
        return html_table([], self._facts())

    def _member(self, member: int | Member) -> Member:
        index = member.index if isinstance(member, Member) else member
        found = [each for each in self.members if each.index == index]
        if not found:
            numbers = f"0 to {self.members[-1].index}" if self.members else "none"
            raise ConfigError(f"there is no member {index!r}: their numbers are {numbers}.")
        return found[0]

    def _facts(self) -> list[tuple[str, str]]:
        """The summary as (what, value)."""
        rows = [(self.status, f"sweep of {len(self.members)}: {count_by_status(self.members)}")]
        rows += [(axis.name, _told(axis)) for axis in self.axes]
        if rate := self.summary.get("member_steps_per_second"):
            rows.append(("throughput", f"{format_rate(rate)} member steps/s"))
        if (seconds := self.summary.get("seconds")) is not None:
            rows.append(("time", f"{seconds:.2f} s" + _told_programs(self.summary.get("num_compilations"))))
        try:
            best = self.best()
            rows.append((best_label(best), f"{_named(best)}: {_told_metrics(best.final)}"))
        except ConfigError:
            rows.append(("best", f"no member has a result in {self.monitor}"))
        return [*rows, *_told_failures(self.members), ("record", str(self.dir or "none"))]


def best_label(best: Member) -> str:
    """What the best member is called, whose final metrics are told."""
    return "best at the end" if best.complete else "best so far"


def _named(member: Member) -> str:
    point = show_point(member.point)
    return f"member {member.index}" + (f" ({point})" if point else "")


def _told_failures(members: Sequence[Member]) -> list[tuple[str, str]]:
    """Why members failed, a row a reason, of many the first ones."""
    failed: dict[str, list[Member]] = {}
    for member in members:
        if member.error:
            failed.setdefault(first_line(member.error), []).append(member)
    rows = []
    for reason, alike in list(failed.items())[:MOST_REASONS]:
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        rows.append(("failed", f"{_named(alike[0])}{more}: {reason}"))
    more_reasons = len(failed) - MOST_REASONS
    return rows + ([("failed", f"for {more_reasons} more reasons, which the table tells")] if more_reasons > 0 else [])


def _told_programs(compiled: int | None) -> str:
    return f", {compiled} program{'' if compiled == 1 else 's'} compiled" if compiled is not None else ""


def _told_metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {show(value)}" for name, value in metrics_of(metrics).items())


def _told(axis: Axis) -> str:
    if len(axis.values) <= FEW_VALUES:
        return ", ".join(map(show_value, axis.values))
    if axis.scale == "nominal":
        return f"{len(axis.values)} values, {show_value(axis.values[0])} … {show_value(axis.values[-1])}"
    return f"{len(axis.values)} values, {show_value(min(axis.values))} … {show_value(max(axis.values))} ({axis.scale})"


def _narrowed(axis: Axis, members: Sequence[Member]) -> Axis:
    left = [member.fields[axis.name] for member in members]
    return dataclasses.replace(axis, values=tuple(value for value in axis.values if value in left))


def _flat_member(member: Member) -> dict[str, Any]:
    best = {f"best_{name}": value for name, value in member.best.items()}
    return {
        "member": member.index,
        **member.fields,
        "status": member.status,
        "step": member.step,
        **metrics_of(member.final),
        **best,
    }
