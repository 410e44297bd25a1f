"""Studies in tests: measured quickly, through the harness's front door, and rows made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxnn.bench import Bench, Case, Finding, Plain, Row, Rows, Study, bench, measure_group


@dataclasses.dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = (10, 1000)
    rounds: int = 3
    seconds: float = 0.001
    precision: float | None = None


def sum_cases(bench: Bench) -> Iterator[Sequence[Case]]:
    for size in bench.settings.sizes:
        yield [Case(kind, {"size": size}, lambda size=size: lambda: sum(range(size)), size) for kind in bench.devices]


def sum_findings(rows: Rows) -> list[Finding]:
    return [Finding("A0", f"sum of {row.what['size']}", row.time, "fast") for row in rows]


def study(cases: Callable[[Bench], Any] = sum_cases, **changes: Any) -> Study:
    fields: dict[str, Any] = {
        "name": "sums",
        "claims": ("A0",),
        "title": "How long?",
        "method": "All of it.",
        "full": Settings(),
        "quick": Settings((10,)),
        "cases": cases,
        "findings": sum_findings,
        "draw": lambda columns, figure: None,
    }
    return Study(**{**fields, **changes})


def interrupted_at(number: int) -> Callable[[Bench], Iterator[Sequence[Case]]]:
    def cases(bench: Bench) -> Iterator[Sequence[Case]]:
        for count, group in enumerate(sum_cases(bench)):
            if count == number:
                raise KeyboardInterrupt
            yield group

    return cases


def page_of(study: Study, settings: Any, folder: Path) -> str:
    """The page of a quick run with these settings; its picture is there."""
    bench(dataclasses.replace(study, quick=settings), devices=("cpu",), quick=True, out=folder, say=lambda line: None)
    assert (folder / f"{study.name}.png").read_bytes().startswith(b"\x89PNG")
    return (folder / "results.md").read_text()


def measured_rows(study: Study, context: Bench) -> dict[str, Rows]:
    """The rows of a study by kind of device."""
    pairs = [
        (case.device, row)
        for group in study.cases(context)
        for case, row in zip(group, measure_group(group, context.settings), strict=True)
    ]
    return {device: Rows(row for owner, row in pairs if owner == device) for device in context.devices}


def two_devices(settings: Any) -> Bench:
    """A CPU, and another that stands for a GPU."""
    cpu, other, *_ = jax.devices()
    return Bench({"cpu": cpu, "gpu": other}, settings)


def cases_of(study: Study, bench: Bench) -> list[Case]:
    return [case for group in study.cases(bench) for case in group]


def row(seconds: float, work: float = 1.0, unit: str = "call", **what: Plain) -> Row:
    return Row(what, (seconds,), work, unit)


def sized(across: str, times: dict[int, float]) -> Rows:
    """A row for each size."""
    return Rows(row(seconds, **{across: size}) for size, seconds in times.items())  # type: ignore[arg-type]
