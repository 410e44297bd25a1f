"""Helpers for tests of benchmarks: a small study, its rows without the page, rows and results made by hand."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import jax
from harness import Bench, Case, Finding, Machine, Measured, Part, Results, Rows, Study, measure

CPU, GPU = "CPU, Chip, 2 cores", "GPU, H100"


@dataclasses.dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = (10, 1000)
    rounds: int = 3
    seconds: float = 0.001
    precision: float | None = None
    grow_until: float = 0.0


def sum_cases(bench: Bench) -> Iterator[Sequence[Case]]:
    for size in bench.settings.sizes:
        yield [Case(kind, {"size": size}, lambda size=size: lambda: sum(range(size)), size) for kind in bench.devices]


def study(cases: Callable[[Bench], Any] = sum_cases, name: str = "sums") -> Study:
    return Study(
        name=name,
        title="How long?",
        method="All of it.",
        full=Settings(),
        quick=Settings((10,)),
        cases=cases,
        findings=lambda rows: [Finding("A0", f"sum of {row.what['size']}", row.time, "fast") for row in rows],
        draw=lambda columns, figure: None,
        claims=("A0",),
    )


def interrupted(bench: Bench) -> Iterator[Sequence[Case]]:
    """The first group of `sum_cases`, then a case that raises KeyboardInterrupt."""
    yield from (next(sum_cases(bench)), [Case("cpu", {}, Mock(side_effect=KeyboardInterrupt))])


def measured_rows(study: Study, context: Bench) -> dict[str, Rows]:
    pairs = [(case.device, row) for group in measure(study, context) for case, row in group]
    return {device: Rows(row for owner, row in pairs if owner == device) for device in context.devices}


def on_cpu(settings: Any = Settings()) -> Bench:  # noqa: B008
    return Bench({"cpu": jax.devices()[0]}, settings)


def two_devices(settings: Any) -> Bench:
    """A CPU, and a second one in place of a GPU."""
    cpu, other, *_ = jax.devices()
    return Bench({"cpu": cpu, "gpu": other}, settings)


def results_of(study: Study, settings: Any, columns: dict[str, Rows], **machine: Any) -> Results:
    """Results with a column for each label."""
    fields: dict[str, Any] = {"versions": {"jax": "0.12"}, "commit": "abc", "date": "2026-11-21", **machine}
    definition = study.definition(settings)
    parts = {label: Part(Machine(label, **fields), definition, rows) for label, rows in columns.items()}
    return {study.name: Measured(parts)}
