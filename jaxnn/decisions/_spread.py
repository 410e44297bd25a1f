"""``jn.spread``: how much of a metric's variance comes from each use of random numbers, and from the test set."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxnn import engine
from jaxnn._fields import PURPOSES, check_config, seed_for, with_changes
from jaxnn._text import Table, short_path
from jaxnn.decisions._deviations import Deviation, VarianceSource, jackknife, rounded
from jaxnn.decisions._sides import check_metric
from jaxnn.search import zip as zip_values
from jaxnn.sweeps import Sweep, SweepOptions, sweep
from jaxnn.tasks import derived_metrics
from jaxnn.types import ConfigError, DataError, Experiment, RecordError, TrainingError, check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE = "whole"
WHOLE_RUNS = "whole runs"
MOST_STATES = 4  # whose examples are evaluated one by one
MOST_SHARE = 9.99  # that is shown: of few members the ends of intervals may be far
SAME = 1e-3  # the relative difference of a metric by single examples from one by batches
SHARED_ORDER = "order='shared' gives all members one order"


@dataclasses.dataclass(frozen=True, repr=False)
class VarianceReport:
    """What makes a metric vary: the result of `spread`.

    Attributes:
        metric: whose variance is explained.
        sources: by ``"init"``, ``"order"``, ``"step"``, and ``"whole"`` for members in which all of these vary.
        test: the sampling of the evaluated split: the standard error of the metric over its examples.
        num_examples: the number of these; 0 if it is not known.
        total: the deviation of one run on another test set of this size: whole runs and test set.
        mean: the mean of the metric over whole runs.
        left_out: members that do not count, by their status.
        sweep: the population that was trained.
    """

    metric: str
    sources: Mapping[str, VarianceSource]
    test: VarianceSource
    num_examples: int
    total: Deviation
    mean: float
    left_out: Mapping[str, int]
    sweep: Sweep

    @property
    def rounded(self) -> str:
        """The mean with the digits that mean something: their last unit is near the `total` deviation."""
        return rounded(self.mean, self.total.value)

    def rows(self) -> list[VarianceSource]:
        """Returns all sources in the order they are shown, the total last if the test set's part is known."""
        rows = [*self.sources.values()]
        if self.num_examples:
            total = (1.0, math.nan, math.nan)
            rows += [self.test, VarianceSource("one run, test set included", (), self.total, total)]
        return rows

    def table(self) -> Table:
        """Returns a row per source with standard deviation, 95 % interval and share of the variance."""
        header = ["source", "standard deviation", "95 % interval", "share of the variance"]
        notes = [f"{one.name}: {one.note}." for one in (*self.sources.values(), self.test) if one.note]
        notes.append(
            f"One run's {self.metric} means something to ± {self.total.value:.2g}"
            + (": " if self.num_examples else ", on this test set: ")
            + f"{self.rounded} (mean {self.mean:.6g})."
        )
        parts = sum(self.sources[purpose].share[0] for purpose in PURPOSES if purpose in self.sources)
        if parts > 1.5 * self.sources[WHOLE].share[0]:
            notes.append(
                "The sources add up to more than whole runs: each alone sends training another way, or it is chance."
            )
        if self.left_out:
            counts = ", ".join(f"{count} {status}" for status, count in self.left_out.items())
            notes.append(f"Left out: {counts}.")
        return Table(header, [_cells(one) for one in self.rows()], notes)

    def plot(self) -> Figure:
        """Returns a matplotlib figure: the metric of each member by source, and the standard deviations."""
        from jaxnn.decisions._spread_figure import draw_spread

        title = f"What makes {self.metric} vary: {self.rounded} ± {self.total.value:.2g}"
        return draw_spread(self.rows(), self.metric, self.mean, title)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _cells(source: VarianceSource) -> list[str]:
    deviation, (low, high), (share, least, most) = source.deviation.value, source.deviation.interval, source.share
    known = "–" if math.isnan(deviation) else f"{deviation:.2g}"
    interval = "–" if math.isnan(low) else f"{low:.2g} to {high:.2g}"
    part = "–" if math.isnan(share) else f"{_percent(share)} %"
    part += "" if math.isnan(least) else f" ({_percent(least)} to {_percent(most)})"
    return [source.name, known, interval, part]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share < MOST_SHARE else f">{100 * MOST_SHARE:.0f}"


def spread(
    experiment: Experiment[Any],
    metric: str | None = None,
    num: int = 16,
    options: SweepOptions | None = None,
    **changes: Any,
) -> VarianceReport:
    """Trains one population and returns how much of a metric's variance comes from which random numbers.

    Of ``4 * num`` members, all of one program, ``num`` differ in their initial parameters alone, ``num`` in the order
    of the data, ``num`` in the random numbers of steps (dropout, augmentation, sampling), and ``num`` in all three:
    whole runs (Bouthillier et al. 2021, "Accounting for Variance in Machine Learning Benchmarks"). The members are
    those of a sweep over the config fields ``init_seed``, ``order_seed`` and ``step_seed``, see `Experiment`; each
    whole run is that of ``seed`` as its solo run. Fixed seeds are those of the config, and no two groups share a varied
    one. What ``data`` or ``task`` make of ``config.seed`` themselves is fixed too.

    The test set is a source too: on other examples the metric would differ by the standard error of its mean, which
    the jackknife finds over examples of whole runs, at most four. It takes examples for independent, which windows of
    one text are not quite. Intervals of standard deviations are by chi-square:
    exact for normally distributed values, too narrow for heavy tails, such as those of runs that rarely fail. Shares
    are of the variance of one run on another test set, whole runs plus test set; their intervals are fiducial
    (Weerahandi 1993). Sources overlap in training that is chaotic: then their shares exceed the share of whole runs.

    >>> jn.spread(experiment, "test_accuracy", num=4, record=False, progress="none")
    source                       standard deviation  95 % interval  share of the variance
    initial parameters           0...
    order of the data            0...
    dropout and augmentation     0                   –              0 %
    whole runs                   0...
    test set (360 examples)      0...
    one run, test set included   0...                               100 %
    dropout and augmentation: test_accuracy is equal in all 4 members, as if nothing used these random numbers.
    One run's test_accuracy means something to ± 0...: 0... (mean 0...).

    Args:
        experiment: what is trained.
        metric: whose variance is explained, such as ``"test_accuracy"``; default: the monitored one.
        num: members of each of the four groups, at least 2; of 16 the interval of a deviation is 0.74 to 1.55 of it.
        options: how to run the sweep. With ``order="shared"`` the order of the data does not vary.
        **changes: single sweep options, such as ``progress="none"``. With ``record=False`` nothing is kept.

    Raises:
        ConfigError: an unknown metric, before anything is trained; fewer than two whole runs have a result; a plan or
            a shard; or as `sweep`.
        TrainingError: it was interrupted; ``resume`` with the directory of its record continues it.
    """
    options = with_changes(options or SweepOptions(), changes, experiment.config)
    check_int("spread: num", num, least=2)
    if options.plan_only or options.shard is not None:
        raise ConfigError("spread needs all members: leave plan_only and shard at their defaults.")
    check_config(experiment.config)
    check_metric(metric, engine.programs_of(experiment, engine.load_data(experiment), resident=False))
    seeded = _with_seeds(experiment)
    purposes = [purpose for purpose in PURPOSES if purpose != "order" or options.order != "shared"]
    points = _points(seeded.config, purposes, num)
    with tempfile.TemporaryDirectory(prefix="jaxnn-spread-") as folder:
        kept = options.record or options.resume is not None
        if not kept:  # states are restored from a record
            options = with_changes(options, {"record": True, "run_dir": Path(folder) / "sweep"})
        swept = sweep(seeded, zip_values(**points), options)
        if swept.status != "finished":
            where = f": resume={short_path(swept.dir)!r} continues it" if kept and swept.dir is not None else ""
            raise TrainingError(f"training for spread was interrupted{where}.")
        report = _reported(swept, swept.check_metric(metric), purposes, num)
        return report if kept else dataclasses.replace(report, sweep=dataclasses.replace(swept, dir=None))


def _with_seeds(experiment: Experiment[Any]) -> Experiment[Any]:
    """The experiment with a config that has a seed for each purpose, of the values that decide now."""
    config, kind = experiment.config, type(experiment.config)
    names = [f"{purpose}_seed" for purpose in PURPOSES]
    known = {field.name for field in dataclasses.fields(config)}
    if lacking := [name for name in names if name not in known]:
        made = dataclasses.make_dataclass(
            kind.__name__,
            [(name, int | None, None) for name in lacking],
            bases=(kind,),
            frozen=kind.__dataclass_params__.frozen,
            module=kind.__module__,
        )
        config = made(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init})
    seeds = {f"{purpose}_seed": int(seed_for(config, purpose)) for purpose in PURPOSES}
    return dataclasses.replace(experiment, config=dataclasses.replace(config, **seeds))


def _points(config: Any, purposes: Sequence[str], num: int) -> dict[str, list[int]]:
    """The seeds of all members, by field: a group for each purpose, and one in which all vary."""
    first = 1 + max(int(seed_for(config, purpose)) for purpose in PURPOSES)
    points = {f"{purpose}_seed": list[int]() for purpose in purposes}
    for number, group in enumerate((WHOLE, *purposes)):
        fresh = [(first + number * num + index) % 2**32 for index in range(num)]
        for purpose in purposes:
            fixed = [int(seed_for(config, purpose))] * num
            points[f"{purpose}_seed"] += fresh if group in (WHOLE, purpose) else fixed
    return points


def _reported(swept: Sweep, metric: str, purposes: Sequence[str], num: int) -> VarianceReport:
    """The report of a sweep of `_points`."""
    scores, groups = swept.scores(metric), (WHOLE, *purposes)
    found = {group: scores[place * num : (place + 1) * num] for place, group in enumerate(groups)}
    found = {group: values[np.isfinite(values)] for group, values in found.items()}
    if len(found[WHOLE]) < 2:
        raise ConfigError(f"{len(found[WHOLE])} of {num} whole runs have a result in {metric}: spread needs two.")
    sources = {}
    for stream, purpose in enumerate((*PURPOSES, WHOLE)):
        name, values = PURPOSES.get(purpose, WHOLE_RUNS), found.get(purpose, np.zeros(0))
        note = ""
        if purpose not in found:
            note = SHARED_ORDER
        elif len(values) < 2:
            note = f"{len(values)} of {num} members have a result"
        elif np.ptp(values) == 0:
            note = f"{metric} is equal in all {len(values)} members, as if nothing used these random numbers"
        sources[purpose] = VarianceSource(name, (*map(float, values),), Deviation.of_values(values, stream), note=note)
    test, num_examples = _test_set(swept, metric, num, stream=len(sources))
    whole = sources[WHOLE].deviation
    total = Deviation.together(whole, test.deviation) if num_examples else whole
    shared = {name: dataclasses.replace(one, share=one.deviation.share_of(total)) for name, one in sources.items()}
    test = dataclasses.replace(test, share=test.deviation.share_of(total))
    left_out = Counter(
        "without a result" if member.complete else member.status
        for member, score in zip(swept.members, scores, strict=True)
        if math.isnan(score)
    )
    mean = float(found[WHOLE].mean())
    return VarianceReport(metric, shared, test, num_examples, total, mean, left_out, swept)


def _test_set(swept: Sweep, metric: str, num: int, stream: int) -> tuple[VarianceSource, int]:
    """The sampling of the split that ``metric`` is of, by whole runs, and its number of examples; 0 if not known."""
    split, _, name = metric.partition("_")
    try:
        influence = np.stack([*_influences(swept, metric, split, name, num)])
    except (ConfigError, RecordError, DataError) as error:
        unknown = Deviation(math.nan, (math.nan, math.nan), np.zeros(0))
        return VarianceSource(f"{split} set", (), unknown, note=f"not known, {str(error).rstrip('.')}"), 0
    count = influence.shape[1]
    deviation = Deviation.of_mean(influence, stream)
    note = "" if deviation.value > 0 else "all examples are alike, so its sampling is not known"
    return VarianceSource(f"{split} set ({count:,} examples)", (), deviation, note=note), count


def _influences(swept: Sweep, metric: str, split: str, name: str, num: int) -> Iterator[np.ndarray]:
    """Yields the influence ``[examples]`` of each example on ``metric``, of some whole runs; ConfigError if unknown."""
    assert swept.experiment is not None
    task = swept.experiment.task(swept.experiment.config)
    if split == "train":
        raise ConfigError("a training metric is a mean over steps, not over a set of examples")
    if name in task.metrics:
        raise ConfigError(f"{name} is a function of all targets and outputs together, not of means over examples")
    whole = [member for member in swept.members[:num] if member.complete and math.isfinite(member.final[metric])]
    some = dataclasses.replace(swept, members=tuple(whole[:MOST_STATES]))

    def derived(means: dict[str, Any]) -> float:
        return derived_metrics(task, means)[name]

    for member, sums in zip(some.members, some.example_sums(split), strict=True):
        if len(sums["count"]) < 2:
            raise ConfigError("one example has no deviation")
        value, influence = jackknife(sums, derived)
        recorded, error = member.final[metric], math.sqrt(float((influence**2).sum()))
        # Losses that are sampled have other random numbers here.
        if not abs(value - recorded) <= max(SAME * abs(recorded), error / 2):
            raise ConfigError(
                f"the examples one by one give {value:.4g}, and {recorded:.4g} together: it is no mean over the split"
            )
        yield influence
