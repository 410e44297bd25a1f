"""Importance of the swept fields: how much of a metric's variation over the members each of them explains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxnn import parallel, trees
from jaxnn._statistics import mean_interval
from jaxnn._text import Table
from jaxnn.search import Axis
from jaxnn.sweeps._members import LOST, SEED, point_key
from jaxnn.types import ConfigError, warn

if TYPE_CHECKING:
    from jaxnn.sweeps._sweep import Sweep

FOLDS = 5
LEAST_MEMBERS = 2 * FOLDS  # without them there is an error; below these, a warning:
FEW_MEMBERS, FEW_PER_FIELD = 30, 10
DECADE = 10.0  # the ratio of losses from which their logarithms are explained, and drawn


class Share(NamedTuple):
    """A share of a metric's variation, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        return f"{100 * self.value:z.0f} % ({100 * self.low:z.0f} to {100 * self.high:z.0f})"


@dataclasses.dataclass(frozen=True, repr=False)
class Importance:
    """How much of a metric's variation the swept fields explain; what `Sweep.importance` returns.

    Attributes:
        metric: whose variation is explained.
        fields: the share that each field explains, the largest first.
        total: the share that all fields together explain of members that were held out, R².
        members: the numbers of the members that count.
        step: at which their values were compared; None: their last values.
        logarithmic: whether the logarithm of the metric was explained.
        warnings: reasons to doubt the shares.
    """

    metric: str
    fields: Mapping[str, Share]
    total: Share
    members: tuple[int, ...]
    step: int | None
    logarithmic: bool
    warnings: tuple[str, ...]

    def table(self) -> Table:
        """Returns a row per field with its share, its 95 % interval, and R²."""
        rows = [[name, *_cells(share)] for name, share in self.fields.items()]
        where = "their last values" if self.step is None else f"their values after {self.step} steps"
        what = f"log {self.metric}" if self.logarithmic else self.metric
        note = f"Shares of the variation of {what} over {len(self.members)} members, by {where}."
        return Table(["field", "explains", "95 % interval"], [*rows, ["all (R²)", *_cells(self.total)]], [note])

    def __repr__(self) -> str:
        return "\n".join([repr(self.table()), *(f"Warning: {text}" for text in self.warnings)])

    def _repr_html_(self) -> str:
        table = self.table()
        return table._replace(notes=[*table.notes, *self.warnings])._repr_html_()


def _cells(share: Share) -> list[str]:
    return [f"{100 * share.value:z.1f} %", f"{100 * share.low:z.0f} to {100 * share.high:z.0f}"]


def field_importance(sweep: Sweep, metric: str | None = None, step: int | None = None) -> Importance:
    """Explains the values of ``metric`` by the swept fields, without a warning, as `Sweep.importance`."""
    metric = sweep.check_metric(metric)
    positions, values, step = _compared(sweep, metric, step)
    found = [sweep.members[position].fields for position in positions]
    columns: dict[str, np.ndarray] = {}
    categorical = []
    for axis in (*sweep.settings, *(axis for axis in sweep.axes if axis.name == SEED)):
        column, is_category = _column(axis, [fields.get(axis.name) for fields in found])
        count = len(np.unique(column))
        # A seed that few members share explains nothing that others could confirm.
        if count > 1 and (axis.name != SEED or 2 * count <= len(column)):
            categorical += [len(columns)] * is_category
            columns[axis.name] = column
    if not columns:
        raise ConfigError("no field has several values among the members with a result: sweep one to explain it.")
    if len(values) < LEAST_MEMBERS:
        raise ConfigError(f"importance needs {LEAST_MEMBERS} members with {metric}, and there are {len(values)}.")
    if values.min() == values.max():
        raise ConfigError(f"{metric} is {values[0]:.4g} of all {len(values)} members: there is nothing to explain.")
    logarithmic = is_wide(values, sweep.direction(metric) == "max")
    # Its tables are small, for which a CPU is the faster device.
    with parallel.computing_on("cpu"):
        explained = trees.permutation_importances(
            np.stack([*columns.values()], axis=1),
            np.log(values) if logarithmic else values,
            categorical=categorical,
            folds=FOLDS,
        )
    shares = {name: _share(part) for name, part in zip(columns, explained.parts, strict=True)}
    total, few = _share(explained.total), max(FEW_MEMBERS, FEW_PER_FIELD * len(columns))
    warnings = []
    if len(values) < few:
        what = f"{len(columns)} field{'s' * (len(columns) > 1)}"
        warnings.append(f"{len(values)} members are few: the importance of {what} needs {few}.")
    if not total.low > 0:
        warnings.append(f"the fields may explain nothing of {metric}: R² is {total}, so the shares may be chance.")
    ordered = dict(sorted(shares.items(), key=lambda one: -one[1].value))
    numbers = tuple(sweep.members[position].index for position in positions)
    return Importance(metric, ordered, total, numbers, step, logarithmic, tuple(warnings))


def warned(importance: Importance) -> Importance:
    """Returns ``importance``, after its warnings."""
    for text in importance.warnings:
        warn(text)
    return importance


def is_wide(values: np.ndarray, more_is_better: bool) -> bool:
    """Whether ``values`` are of a loss, positive, and span more than a decade."""
    return not more_is_better and len(values) > 0 and bool(0 < DECADE * values.min() < values.max())


def _share(fits: np.ndarray) -> Share:
    """The mean of ``fits``, and its interval by the corrected resampled t-test of Nadeau and Bengio (2003).

    The fits have rows in common: the variance of their mean is not 1 / n of theirs, but 1 / n + 1 / (folds - 1).
    """
    low, high = mean_interval(fits)
    mean, half = float(fits.mean()), (high - low) / 2 * math.sqrt(1 + len(fits) / (FOLDS - 1))
    return Share(mean, mean - half, max(mean, min(1.0, mean + half)))


def _column(axis: Axis, values: Sequence[object]) -> tuple[np.ndarray, bool]:
    """The values as numbers, whose order alone matters to trees; else the numbers of categories, and True."""
    if axis.name != SEED and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        most = np.finfo(float).max
        return np.array(values, float).clip(-most, most), False
    numbers: dict[str, int] = {}
    return np.array([float(numbers.setdefault(point_key({"": one}), len(numbers))) for one in values]), True


def _compared(sweep: Sweep, metric: str, step: int | None) -> tuple[np.ndarray, np.ndarray, int | None]:
    """The positions of the members that are compared, their values, and the step; None: at their ends."""
    if step is None and not any(member.cut_short for member in sweep.members):
        values = sweep.scores(metric)
    else:
        steps, found = sweep.curves(metric)
        found = np.where(np.isfinite(found), found, np.nan)
        found[[member.status in LOST for member in sweep.members]] = np.nan
        if "lanes_in_use" in sweep.summary:  # of a search: copies, which start late, owe their values to their parents
            found[np.isnan(found[:, 0])] = np.nan
        counts = np.isfinite(found).sum(axis=0)
        if step is None:
            known = int(np.isfinite(found).any(axis=1).sum())
            at = int(np.flatnonzero(counts >= max(known / 2, min(known, LEAST_MEMBERS)))[-1])
        elif step in steps:
            at = int(np.flatnonzero(steps == step)[0])
        else:
            others = ", ".join(str(one) for one in steps[counts >= LEAST_MEMBERS][-8:])
            raise ConfigError(f"importance: no member reported {metric} after {step} steps: choose one of {others}.")
        step, values = int(steps[at]), found[:, at]
    positions = np.flatnonzero(np.isfinite(values))
    return positions, values[positions], step
