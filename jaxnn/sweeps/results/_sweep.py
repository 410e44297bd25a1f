"""The result of a sweep: its members, groups, tables, plots, and single members as runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxnn.observe import Table, html_table, text_table
from jaxnn.record import metrics_of
from jaxnn.run import Run, format_rate
from jaxnn.sweeps.results._outcomes import (
    SEED,
    At,
    Axis,
    Member,
    Outcomes,
    count_by_status,
    show,
    show_point,
    show_value,
)
from jaxnn.sweeps.results._summary import LEFT_OUT, GroupRow, Groups, grouped, spread_of
from jaxnn.sweeps.search import with_fields
from jaxnn.types import ConfigError, Experiment, RecordError, suggest

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from matplotlib.figure import Figure

# An axis with more values is described by its ends.
FEW_VALUES = 6
# So many different errors are shown, each with its first member.
MOST_ERRORS = 3


class RunOpener(Protocol):
    """Opens a member of a recorded sweep as a run; whoever stores the sweep's states supplies it."""

    def __call__(self, sweep: Sweep, member: Member, experiment: Experiment[Any]) -> Run:
        """Returns the run of ``member``; ``experiment`` has the member's config.

        Raises:
            RecordError: the sweep's record holds no state of the member.
        """
        ...


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Sweep(Outcomes):
    """A sweep that finished, was interrupted, or still runs.

    Attributes:
        members: in the order of their numbers.
        axes: the fields that were swept, in the order they were given.
        lines: the lines of ``metrics.jsonl``: one mapping per member and report, with ``member``, ``step`` and metrics.
        monitor: the metric that ranks evaluations and members, such as ``test_loss``.
        higher_is_better: whether more of it is better.
        status: ``planned``, ``running``, ``finished`` or ``interrupted``.
        dir: the directory of its record, or None.
        summary: ``member_steps_per_second``, ``seconds``, ``num_compilations``; empty while it runs.
        experiment: what was swept, or None if it was read without.
        run_opener: opens members as runs from the sweep's record; None: only members with run directories open.
    """

    status: str
    dir: Path | None
    summary: Mapping[str, Any]
    experiment: Experiment[Any] | None = None
    run_opener: RunOpener | None = None

    def group(self, by: str | Sequence[str] | None = None, metric: str | None = None, at: At = "final") -> Groups:
        """Returns mean, standard deviation and 95 % interval of each metric over members that share some fields.

        Only members that finished or stopped early are averaged; the others are counted.

        Args:
            by: names of config fields; default: all that were swept but the seed.
            metric: one metric; default: all.
            at: their ``final`` values, or those of the ``best`` evaluation.

        Raises:
            ConfigError: an unknown field or metric.
        """
        names = (by,) if isinstance(by, str) else tuple(by or ())
        if by is None:
            names = tuple(axis.name for axis in self.axes if axis.name != SEED)
        known = self.members[0].fields if self.members else names
        for name in names:
            if name not in known:
                raise ConfigError(f"the config has no field {name!r} to group by: {suggest(name, known)}.")
        metrics = [self.check_metric(metric, at)] if metric else self.metric_names(at)
        scores = {name: self.scores(name, at) for name in metrics}
        rows = []
        for point, positions in grouped(self.members, names):
            members = [self.members[position] for position in positions]
            counts = Counter(member.status for member in members)
            unfinished = sum(member.cut_short for member in members) - counts["pruned"]
            left_out = {name: counts[name] for name in LEFT_OUT[:3]} | {"unfinished": unfinished}
            spreads = {name: spread_of(values[positions]) for name, values in scores.items()}
            rows.append(GroupRow(point, tuple(member.index for member in members), left_out, spreads))
        return Groups(tuple(rows), names, {name: self.more_is_better(name) for name in metrics})

    def frame(self) -> pandas.DataFrame:
        """Returns a pandas table with a row per member: number, config, status, step, final and ``best_`` metrics.

        If any member failed it has a column ``error`` too.

        Raises:
            ConfigError: pandas is not installed.
        """
        rows = []
        for member in self.members:
            row = {"member": member.index, **member.fields, "status": member.status, "step": member.step}
            row |= metrics_of(member.final) | {f"best_{name}": value for name, value in member.best.items()}
            rows.append(row | ({"error": member.error} if any(one.error for one in self.members) else {}))
        return _pandas().DataFrame(rows)

    def curves_frame(self) -> pandas.DataFrame:
        """Returns a pandas table with a row per member and report: its point, the step and the metrics.

        Raises:
            ConfigError: pandas is not installed.
        """
        points = {member.index: dict(member.point) for member in self.members}
        lines = (line for line in self.lines if line["member"] in points)
        return _pandas().DataFrame([{"member": line["member"], **points[line["member"]], **line} for line in lines])

    def plot(self, metric: str | None = None) -> Figure:
        """Returns a matplotlib figure of the curves and the metric against each axis; default: the monitored metric.

        Raises:
            ConfigError: an unknown metric.
        """
        from jaxnn.sweeps.results._sweep_figure import draw_sweep

        return draw_sweep(self, metric)

    def run(self, member: int | Member) -> Run:
        """Returns one member as a run: its state, ``predict``, ``evaluate``. It is loaded, not trained further.

        Args:
            member: its number, or itself.

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
        if self.dir is None or self.run_opener is None:
            point = show_point(found.point) or "the same config"
            raise RecordError(f"the sweep has no record to open member {index} from: run it alone with {point}.")
        if not found.complete:
            raise ConfigError(
                f"member {index} is {found.status}, and loading it would train it on: export it with "
                "jn.sweep(experiment, resume=…, member_runs=True), and resume its run directory with jn.fit."
            )
        experiment = dataclasses.replace(self.experiment, config=with_fields(self.experiment.config, found.point))
        return self.run_opener(self, found, experiment)

    def table(self, metric: str | None = None, at: At = "final", limit: int = 20) -> Table:
        """Returns the members best first: their points, status, step and metrics, and errors if any failed.

        Complete members are before those that were cut short, and these before those that diverged or failed.

        Args:
            metric: by which; default: the monitored one.
            at: their ``final`` metrics, or those of the ``best`` evaluation, whose step is ``best step``.
            limit: number of members at most.

        Raises:
            ConfigError: an unknown metric.
        """
        names, members = self.metric_names(at), list(self.members)
        if metric is not None or self.monitor in names:
            members = self.ranked(metric, at)
            names = tuple(sorted(names, key=lambda name: name != (metric or self.monitor)))
        errors = any(member.error for member in members[:limit])
        rows = []
        for member in members[:limit]:
            fields, measured = member.fields, member.metrics(at)
            step = member.step if at == "final" else member.best.get("step", "–")
            row = [str(member.index), *(show_value(fields.get(axis.name)) for axis in self.axes), member.status]
            row += [str(step), *(show(measured[name]) if name in measured else "–" for name in names)]
            rows.append(row + ([_first_line(member.error)] if errors else []))
        header = ["member", *(axis.name for axis in self.axes), "status", "step" if at == "final" else "best step"]
        more = len(members) - len(rows)
        return Table([*header, *names, *["error"] * errors], rows, [f"… and {more} more"] if more else [])

    def __repr__(self) -> str:
        return text_table(self._facts())

    def _repr_html_(self) -> str:
        return html_table(self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        """The summary as (what, value)."""
        rows = [(self.status, f"sweep of {len(self.members)}: {count_by_status(self.members)}")]
        rows += [(axis.name, _describe_axis(axis)) for axis in self.axes]
        if rate := self.summary.get("member_steps_per_second"):
            rows.append(("throughput", f"{format_rate(rate)} member steps/s"))
        if (seconds := self.summary.get("seconds")) is not None:
            compiled = self.summary.get("num_compilations")
            programs = f", {compiled} program{'' if compiled == 1 else 's'} compiled" if compiled is not None else ""
            rows.append(("time", f"{seconds:.2f} s{programs}"))
        try:
            best = self.best()
            metrics = ", ".join(f"{name} {show(value)}" for name, value in metrics_of(best.final).items())
            rows.append((best_label(best), f"{best}: {metrics}"))
        except ConfigError:
            rows.append(("best", f"no member has a result in {self.monitor}"))
        failed: dict[str, list[Member]] = {}
        for member in self.members:
            if member.error:
                failed.setdefault(_first_line(member.error), []).append(member)
        for error, members in list(failed.items())[:MOST_ERRORS]:
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            rows.append(("failed", f"{members[0]}{more}: {error}"))
        if len(failed) > MOST_ERRORS:
            rows.append(("failed", f"with {len(failed) - MOST_ERRORS} more errors, which the table shows"))
        return [*rows, ("record", str(self.dir or "none"))]


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("a data frame needs pandas, which is not installed: pip install pandas") from error
    return pandas


def best_label(best: Member) -> str:
    """Returns the label of the best member's final metrics."""
    return "best at the end" if best.complete else "best so far"


def _first_line(error: str | None) -> str:
    return (error or "").strip().partition("\n")[0]


def _describe_axis(axis: Axis) -> str:
    if len(axis.values) <= FEW_VALUES:
        return ", ".join(map(show_value, axis.values))
    nominal = axis.scale == "nominal"
    ends = (axis.values[0], axis.values[-1]) if nominal else (min(axis.values), max(axis.values))
    scale = "" if nominal else f" ({axis.scale})"
    return f"{len(axis.values)} values, {show_value(ends[0])} … {show_value(ends[1])}{scale}"
