"""A study: cases, the timer that measures them, their measurements, and the findings that a table shows."""

from __future__ import annotations

import dataclasses
import importlib
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax

from jaxnn._json import jsonable
from jaxnn.types import ConfigError, JaxnnError, suggest

type Plain = bool | int | float | str | None

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
_TIMES = ((120.0, 60.0, " min"), (1.0, 1.0, " s"), (1e-3, 1e-3, " ms"), (1e-6, 1e-6, " µs"), (0.0, 1e-9, " ns"))


class Quantity(NamedTuple):
    """Median, minimum and maximum over rounds, with a unit such as ``elements/s``, empty for a ratio.

    >>> print(harness.Quantity(0.00123, 0.001, 0.002, "s"))
    1.23 ms (1–2)
    """

    median: float
    low: float
    high: float
    unit: str

    def scaled(self, factor: float, unit: str) -> Quantity:
        """Returns the quantity times ``factor``, in another ``unit``."""
        return Quantity(factor * self.median, factor * self.low, factor * self.high, unit)

    def __str__(self) -> str:
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
    are values other than times, such as an error; ``missing`` is why the case was not measured, empty if it was.
    ``overhead`` is the time of an empty compiled call on an accelerator, waited for or queued as this one was, in
    seconds; 0: not measured.

    >>> row = harness.Row({"size": 100}, seconds=(0.5, 0.25, 1.0), work=100, unit="elements")
    >>> print(row.time, row.rate, sep=", ")
    500 ms (250–1,000), 200 elements/s (100–400)
    """

    what: Mapping[str, Plain]
    seconds: tuple[float, ...] = ()
    work: float = 1.0
    unit: str = "call"
    observed: Mapping[str, Plain] = {}
    missing: str = ""
    overhead: float = 0.0

    @property
    def time(self) -> Quantity | None:
        """Seconds of one call; None if the case was not timed."""
        return quantity(self.seconds, "s")

    @property
    def rate(self) -> Quantity | None:
        """``work`` per second; None if the case was not timed."""
        return quantity([self.work / seconds for seconds in self.seconds], f"{self.unit}/s")


class Rows(tuple[Row, ...]):
    """The rows of one study on one device.

    >>> rows = harness.Rows(harness.Row({"size": size}, (0.1 * size,)) for size in (1, 2))
    >>> len(rows.where(size=1)), rows.one(size=2).seconds, rows.one(size=3).missing
    (1, (0.2,), 'not measured')
    """

    def where(self, **what: Plain) -> Rows:
        """Returns the matching rows, in order."""
        return Rows(row for row in self if what.items() <= row.what.items())

    def one(self, **what: Plain) -> Row:
        """Returns the first matching row, or a row that was not measured."""
        return next(iter(self.where(**what)), Row(what, missing="not measured"))

    def mostly_overhead(self, row: Row, across: str) -> bool:
        """Returns whether the overhead of a call takes more than half of the time of ``row``.

        It is at least `Row.overhead`, and at least what a call without work would take: the line through ``row`` and
        the row with the least work among those that differ from it in ``across``, a size, alone.

        >>> times = {10: 70e-6, 1000: 71e-6, 1_000_000: 1e-3}
        >>> rows = harness.Rows(harness.Row({"size": size}, (time,), size) for size, time in times.items())
        >>> [rows.mostly_overhead(row, "size") for row in rows]
        [False, True, False]
        """
        if row.time is None:
            return False
        same = [other for other in self if other.time and {**other.what, across: 0} == {**row.what, across: 0}]
        least = min(same, key=lambda other: other.work, default=row)
        fixed = 0.0
        if least.time is not None and least.work < row.work:
            share = least.work / row.work
            fixed = (least.time.median - share * row.time.median) / (1 - share)
        return max(fixed, row.overhead) > row.time.median / 2


def quantity(values: Sequence[float], unit: str) -> Quantity | None:
    """Returns the median, minimum and maximum of several rounds; None for no rounds.

    >>> str(harness.quantity([0.25, 0.5, 1.0], "s"))
    '500 ms (250–1,000)'
    """
    return Quantity(median(values), min(values), max(values), unit) if values else None


def ratios(values: Sequence[float], base: Sequence[float]) -> Quantity:
    """Returns ``values`` divided by ``base``, round by round; both come from one call of `interleaved`.

    >>> str(harness.ratios([2.0, 6.0], base=[1.0, 2.0]))
    '2.5 (2–3)'
    """
    found = [value / other for value, other in zip(values, base, strict=True)]
    return Quantity(median(found), min(found), max(found), "")


def format_ratio(ratio: float) -> str:
    """Formats a ratio, ``28×`` or ``0.31×``."""
    return f"{_digits(ratio)}×"


def _digits(value: float) -> str:
    """Returns three significant digits, without an exponent if possible."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"


class NotMeasured(JaxnnError):
    """A case cannot be measured here, for the reason in the message; its row has no measurements."""


class Bench(NamedTuple):
    """What a study's cases run on: the first device of each kind (``cpu``, ``gpu``), and the study's settings."""

    devices: Mapping[str, jax.Device]
    settings: Any


class Case(NamedTuple):
    """One computation to time on one device, a key of `Bench.devices`; computations on the host belong to ``cpu``.

    ``what`` identifies the case within its study. ``begin`` puts arrays on the device, compiles, and returns the call
    to time, which waits for its own result, or ``(call, work, observed)``; it and the first call, which is not timed,
    may raise `NotMeasured`. One call does ``work`` in a ``unit`` such as ``elements``. ``observe`` returns values
    other than times, such as errors.

    A ``queued`` call returns its result without waiting: a rate is that of calls in a queue, a latency is that of one
    call. Accelerators queue the calls of a round and wait for the last; a CPU, which would run them side by side, waits
    for each. ``larger`` returns the case of the next larger size, for those after the study's own, and ``num_bytes`` is
    the memory of a case on its device, in bytes: see `measure`.

    >>> case = harness.Case("cpu", {"size": 10}, begin=lambda: lambda: sum(range(10)), work=10, unit="additions")
    """

    device: str
    what: Mapping[str, Plain]
    begin: Callable[[], Any] | None = None
    work: float = 1.0
    unit: str = "call"
    observe: Callable[[], Mapping[str, Plain]] | None = None
    queued: bool = False
    num_bytes: float = 0.0
    larger: Callable[[], Case] | None = None


class Finding(NamedTuple):
    """One cell of the table: a quantity measured on one device, None if it was not measured there.

    It belongs to a ``claim`` such as ``A1``, whose published value is ``article``; ``what`` is the same text for every
    device. The ``note`` explains the quantity or why there is none; the table shows ratios of ``comparable`` ones.

    >>> harness.Finding("A1", "relu", harness.quantity([0.02], "s")).text(reference=harness.quantity([0.5], "s"))
    '20 ms, 25×'
    """

    claim: str
    what: str
    quantity: Quantity | None
    article: str = ""
    note: str = ""
    comparable: bool = True

    def text(self, reference: Quantity | None = None) -> str:
        """Returns the quantity, its speed relative to the reference if both are times or rates, and the note."""
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
    """A benchmark that runs on one or more devices.

    Attributes:
        title: the question, in one line; ``method`` is what is timed, and what the times include.
        full: a dataclass with ``rounds``, ``seconds`` and optionally ``precision`` and ``grow_until``, see `measure`;
            ``quick`` runs in minutes.
        cases: returns groups of cases, each prepared together and timed in alternation.
        findings: returns the rows of the table, from the rows of one device.
        draw: draws all columns, ``{label: rows}``, into an empty Matplotlib figure.
        conclude: returns statements that compare several devices.
        claims: the published claims it tests, such as ``("A1", "A3")``.

    >>> study: harness.Study = harness.find_studies()["matmul"]
    >>> study.definition(study.quick)["sizes"]
    [64, 256, 512]
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
        """Returns what must be equal for measurements to be comparable, as JSON values."""
        return {"study": self.name, **jsonable(dataclasses.asdict(settings))}


def find_studies() -> dict[str, Study]:
    """Returns the studies in ``experiments/articles/studies`` by name.

    >>> sorted(harness.find_studies())
    ['activations', 'bandwidth', 'boosting_devices', ...]
    """
    scripts = Path(__file__).parents[2]
    if str(scripts) not in sys.path:  # studies import the scripts of their networks
        sys.path.append(str(scripts))
    names = (path.stem for path in scripts.glob("articles/studies/*.py") if not path.stem.startswith("study_"))
    found = [importlib.import_module(f"articles.studies.{name}").STUDY for name in sorted(names)]
    return {study.name: study for study in sorted(found, key=lambda study: int(study.claims[0].strip("A")))}


def load_study(name: str, known: Mapping[str, Study]) -> Study:
    """Returns a study by name, or the ``STUDY`` of a Python file; raises ConfigError if there is none."""
    if name in known:
        return known[name]
    if not name.endswith(".py") or not Path(name).is_file():
        raise ConfigError(f"no study {name!r}: {suggest(name, known)}; or pass the path of a file that defines STUDY.")
    sys.path.insert(0, str(Path(name).resolve().parent))  # as for a script
    if not isinstance(study := runpy.run_path(name).get("STUDY"), Study):
        raise ConfigError(f"{name} defines no STUDY: assign a harness.Study to that name.")
    return study
