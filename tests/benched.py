"""Studies in tests: measured quickly, through the harness's front door, and rows made by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxnn.bench import Bench, Case, Plain, Row, Rows, Study, bench, measure_group


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
