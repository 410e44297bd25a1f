"""Studies in tests: quickly run through the whole bench, and rows made up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxnn.bench import bench
from jaxnn.bench.rows import Plain, Row, Rows
from jaxnn.bench.study import Bench, Case, Study


def page_of(study: Study, settings: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page of a quick run with these settings, by the way that users go; its picture is there."""
    alone = (dataclasses.replace(study, quick=settings),)
    monkeypatch.setattr("jaxnn.bench.studies.STUDIES", alone)
    monkeypatch.setattr("jaxnn.bench.measuring.STUDIES", alone)
    bench([study.name], devices=("cpu",), quick=True, out=folder, say=lambda line: None)
    assert (folder / f"{study.name}.png").read_bytes().startswith(b"\x89PNG")
    return (folder / "results.md").read_text()


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
