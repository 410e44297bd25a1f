"""A study: cases to measure, the timer that measures them, their figures, and which of these a table shows."""

from __future__ import annotations

import dataclasses
import importlib
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax

from jaxnn.record import jsonable
from jaxnn.types import ConfigError, JaxnnError, suggest

type Plain = bool | int | float | str | None
"""A JSON value without parts."""

_MOST_ROUNDS = 50
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
_TIMES = ((120.0, 60.0, " min"), (1.0, 1.0, " s"), (1e-3, 1e-3, " ms"), (1e-6, 1e-6, " µs"), (0.0, 1e-9, " ns"))


class Quantity(NamedTuple):
    """A figure over rounds: median, minimum, maximum, and a unit such as ``elements/s``; empty for a ratio."""

    median: float
    low: float
    high: float
    unit: str

    def scaled(self, factor: float, unit: str) -> Quantity:
        """The figure times ``factor``, in another ``unit``."""
        return Quantity(factor * self.median, factor * self.low, factor * self.high, unit)

    def __str__(self) -> str:
        """``1.23 G elements/s (1.1–1.3)``: three digits, a fitting prefix, and the spread if there is any."""
        if self.unit == "s":
            scale, unit = next((scale, unit) for least, scale, unit in _TIMES if self.median >= least)
        elif self.unit:
            scale, prefix = next((scale or 1.0, prefix) for scale, prefix in _PREFIXES if abs(self.median) >= scale)
            unit = f" {prefix}{' ' if prefix and not self.unit.startswith(('FLOP', 'B/')) else ''}{self.unit}"
        else:
            scale, unit = 1.0, ""
        middle, low, high = (_digits(value / scale) for value in self[:3])
        return f"{middle}{unit}" + (f" ({low}–{high})" if low != high else "")


class Row(NamedTuple):
    """Measurements of one case, which ``what`` identifies.

    ``seconds`` of one call, one value per round; ``work`` of one call in a ``unit`` such as ``elements``; ``observed``
    figures that are not times, such as an error; ``missing``: why the case was not measured, empty if it was.
    """

    what: Mapping[str, Plain]
    seconds: tuple[float, ...] = ()
    work: float = 1.0
    unit: str = "call"
    observed: Mapping[str, Plain] = {}
    missing: str = ""

    @property
    def time(self) -> Quantity | None:
        """Seconds of one call; None if it was not timed."""
        return quantity(self.seconds, "s")

    @property
    def rate(self) -> Quantity | None:
        """``work`` per second; None if it was not timed."""
        return quantity([self.work / seconds for seconds in self.seconds], f"{self.unit}/s")


class Rows(tuple[Row, ...]):
    """The rows of one study on one device."""

    def where(self, **what: Plain) -> Rows:
        """The rows that match, in order."""
        return Rows(row for row in self if what.items() <= row.what.items())

    def one(self, **what: Plain) -> Row:
        """The first row that matches, or a row that was not measured."""
        return next(iter(self.where(**what)), Row(what, missing="not measured"))


def quantity(values: Sequence[float], unit: str) -> Quantity | None:
    """The figure of several rounds; None for no rounds."""
    return Quantity(median(values), min(values), max(values), unit) if values else None


def ratios(values: Sequence[float], base: Sequence[float]) -> Quantity:
    """``values`` over ``base``, round by round: both from one call of `interleaved`, of at least one round."""
    found = [value / other for value, other in zip(values, base, strict=True)]
    return Quantity(median(found), min(found), max(found), "")


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free confidence interval of a median, from order statistics (`scipy.stats.quantile_test`).

    With fewer values than the confidence needs (6 for 95 %) it is the range of the values.
    """
    from scipy.stats import quantile_test  # type: ignore[import-untyped]

    low, high = quantile_test(values, p=0.5).confidence_interval(confidence)
    return (low if low == low else min(values)), (high if high == high else max(values))  # NaN: too few values


def format_ratio(ratio: float) -> str:
    """``28×``, ``0.31×``."""
    return f"{_digits(ratio)}×"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent if possible."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"


class NotMeasured(JaxnnError):
    """A case cannot be measured here; the message says why. It becomes a row without figures, never an error."""


class Bench(NamedTuple):
    """Input of a study's cases: devices by kind (``cpu``, ``gpu``), the first of each, and the study's settings."""

    devices: Mapping[str, jax.Device]
    settings: Any


class Case(NamedTuple):
    """One thing to measure on one device, a key of `Bench.devices`; work of the host itself belongs to ``cpu``.

    ``what`` identifies the case within its study, ``{"operation": "relu", "size": 1000}``. ``begin`` puts arrays on
    the device, compiles, and returns the call to be timed, which waits for its own result; it and the first call,
    which is not timed, may raise `NotMeasured`. One call does an amount of ``work`` in a ``unit`` such as ``elements``;
    ``begin`` may return ``(call, work, figures)`` too. ``observe`` returns figures that are not times, such as errors.
    """

    device: str
    what: Mapping[str, Plain]
    begin: Callable[[], Any] | None = None
    work: float = 1.0
    unit: str = "call"
    observe: Callable[[], Mapping[str, Plain]] | None = None


class Finding(NamedTuple):
    """One cell of the table: a figure of one device, None if it was not measured there.

    It belongs to a ``claim`` such as ``A1``, with the published figure of the ``article``; ``what`` was measured is
    named equally for every device. The ``note`` says why there is no figure, or what is special about it. Figures of
    two devices are divided by each other if they are ``comparable``.
    """

    claim: str
    what: str
    quantity: Quantity | None
    article: str = ""
    note: str = ""
    comparable: bool = True

    def text(self, reference: Quantity | None = None) -> str:
        """The figure, its speed relative to the reference if both are speeds, and the note."""
        figure = self.quantity
        if figure is None:
            return self.note or "not measured"
        text = str(figure)
        speed = figure.unit == "s" or figure.unit.endswith("/s")
        if speed and self.comparable and reference is not None and reference.unit == figure.unit:
            pair = (figure.median, reference.median)[:: -1 if figure.unit == "s" else 1]
            text += f", {format_ratio(pair[0] / pair[1])}" if all(pair) else ""
        return f"{text}; {self.note}" if self.note else text


@dataclasses.dataclass(frozen=True)
class Study:
    """Something to measure on one or more devices.

    Attributes:
        title: the question, in one line; the ``method`` says what is timed, and what the times include.
        full: settings, a frozen dataclass of plain values with ``rounds`` and ``seconds``, optionally ``precision``
            (see `interleaved`); ``quick`` ones are for a run of a few minutes at most.
        cases: the cases, in groups; a group is prepared together, timed in alternation, and its memory freed.
        findings: the rows of the table, from the figures of one device.
        draw: draws all columns, ``{label: rows}``, into an empty figure of Matplotlib.
        conclude: statements that need the figures of several devices.
        claims: the published claims it is about, such as ``("A1", "A3")``.
    """

    name: str
    title: str
    method: str
    full: Any
    quick: Any
    cases: Callable[[Bench], Iterable[Sequence[Case]]]
    findings: Callable[[Rows], Sequence[Finding]]
    draw: Callable[[Mapping[str, Rows], Any], None]
    conclude: Callable[[Mapping[str, Rows]], Sequence[str]] = lambda _: ()
    claims: tuple[str, ...] = ()

    def definition(self, settings: Any) -> dict[str, Any]:
        """What must be equal for figures to be comparable, as JSON values."""
        return {"study": self.name, **jsonable(dataclasses.asdict(settings))}


def interleaved[Key](
    measures: Mapping[Key, Callable[[], float]],
    *,
    rounds: int = 5,
    precision: float | None = None,
) -> dict[Key, tuple[float, ...]]:
    """Measures all contenders once per round, starting with a different one each round; returns figures by contender.

    A temporary disturbance of the machine then affects all of them, and ratios within a round stay comparable.

    Args:
        measures: by contender, a function that measures once and returns the figure, such as `per_call`.
        rounds: number of rounds, or the least number with ``precision``.
        precision: stop once the 95 % interval of every contender's median is within this share of the median on either
            side, or after 50 rounds; None: after ``rounds``.
    """

    def precise(values: list[float]) -> bool:
        (low, high), middle = median_interval(values), median(values)
        return max(high - middle, middle - low) <= (precision or 0.0) * abs(middle)

    figures: dict[Key, list[float]] = {key: [] for key in measures}
    order = list(measures)
    for count in range(rounds if precision is None else max(rounds, _MOST_ROUNDS)):
        if count >= rounds and all(map(precise, figures.values())):
            break
        start = count % max(1, len(order))
        for key in [*order[start:], *order[:start]]:
            figures[key].append(measures[key]())
    return {key: tuple(values) for key, values in figures.items()}


def per_call(call: Callable[[], object], seconds: float) -> Callable[[], float]:
    """A measure for `interleaved`: the mean seconds of one of the calls that take about ``seconds`` together.

    ``call`` waits for its own result, and ran once before, so that compilation is not timed. At least one call is
    timed; their number is fixed by the first measurement, from the fastest of up to five calls.
    """
    count = 0

    def timed(number: int) -> float:
        started = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - started) / number

    def measure() -> float:
        nonlocal count
        if not count:
            estimates = [timed(1)]
            while len(estimates) < 5 and sum(estimates) < seconds:
                estimates.append(timed(1))
            count = max(1, round(seconds / min(estimates)))
        return timed(count)

    return measure


def measure_group(group: Sequence[Case], settings: Any) -> list[Row]:
    """Prepares the cases of a group, times them in alternation, and returns one row each.

    `NotMeasured`, a JaxnnError, and a RuntimeError or MemoryError of XLA become a row with the reason.
    """

    def start(case: Case) -> tuple[Callable[[], object], float, Mapping[str, Plain]] | None:
        if case.begin is None:
            return None
        made = case.begin()
        call, work, observed = made if isinstance(made, tuple) else (made, case.work, {})
        call()  # compiles, and touches all memory
        return call, work, observed

    started = [_attempt(start, case) for case in group]
    measures = {index: per_call(made[0], settings.seconds) for index, (made, _) in enumerate(started) if made}
    precision = getattr(settings, "precision", None)
    timed, broken = _attempt(lambda: interleaved(measures, rounds=settings.rounds, precision=precision))
    rows = []
    for index, (case, (prepared, missing)) in enumerate(zip(group, started, strict=True)):
        _, work, observed = prepared or (None, case.work, {})
        missing = missing or (broken if prepared else "")
        if case.observe is not None and not missing:
            more, missing = _attempt(case.observe)
            observed = {**observed, **(more or {})}
        rows.append(Row(dict(case.what), (timed or {}).get(index, ()), work, case.unit, observed, missing))
    return rows


def _attempt[**P, T](action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T | None, str]:
    """The result of ``action``, or why there is none here: a study continues without a case."""
    try:
        return action(*args, **kwargs), ""
    except JaxnnError as error:
        return None, str(error)
    # XLA's errors for memory that is short, or a type that this device does not support.
    except (RuntimeError, MemoryError) as error:
        return None, f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"


def find_studies() -> dict[str, Study]:
    """The studies of the checkout in the working directory, else of the one jaxnn is imported from, by claim."""
    folders = (root / "experiments/articles/studies" for root in (Path.cwd(), Path(__file__).parents[2]))
    if (folder := next(filter(Path.is_dir, folders), None)) is None:
        return {}
    if (scripts := str(folder.parents[1])) not in sys.path:  # studies import the scripts of their networks
        sys.path.append(scripts)
    names = (path.stem for path in folder.glob("*.py") if not path.stem.startswith("study_"))
    found = [importlib.import_module(f"articles.studies.{name}").STUDY for name in sorted(names)]
    return {study.name: study for study in sorted(found, key=lambda study: int(study.claims[0].strip("A")))}


def load_study(name: str, known: Mapping[str, Study]) -> Study:
    """A study by name, or the ``STUDY`` of a Python file by its path; raises ConfigError if there is none."""
    if name in known:
        return known[name]
    path = Path(name).resolve()
    if not name.endswith(".py") or not path.is_file():
        raise ConfigError(f"no study {name!r}: {suggest(name, known)}; or give the path of a file with a STUDY.")
    study = runpy.run_path(str(path)).get("STUDY")
    if not isinstance(study, Study):
        raise ConfigError(f"{path} defines no STUDY: assign a jaxnn.bench.Study to that name.")
    return study
