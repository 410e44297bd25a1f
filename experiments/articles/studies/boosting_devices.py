"""A14: how much faster do boosted trees grow on several devices?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from articles.studies.study_collectives import Collective, Link
from articles.studies.study_rows import measured
from articles.studies.study_scaling import Settings, describe, make_study, predict, scaled_rows
from harness import Finding, Quantity, Row, Rows, quantity

import jaxnn as jn

ARTICLE = "4 GPUs 23.2×"
NUM_GPUS = 4
# A direction of the fourth generation of NVLink, half of the 900 GB/s in the data sheet of NVIDIA's H100; the latency
# is assumed.
NVLINK = Link(5e-6, 1 / 450e9)


@dataclasses.dataclass(frozen=True)
class TableSettings(Settings):
    """Settings of boosting: ``steps`` trees per call; the batches are all rows of random tables of ``columns``."""

    batch_size: int = 393_216
    batch_per_device: int = 49_152
    predict: tuple[int, ...] = (16, 64)
    columns: int = 28
    max_depth: int = 6
    seconds: float = 1.0


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    batch_size: int
    num_steps: int
    seed: int = 0


def boosted_table(settings: Any) -> jn.Experiment[TreeConfig]:
    """Returns a boosting of two classes on a random table, of the shape of the HIGGS data set by default."""

    def data(config: TreeConfig) -> jn.Splits:
        most = max(len(jax.local_devices(backend=kind)) for kind in {"cpu", jax.default_backend()})
        count = max(settings.batch_size, most * settings.batch_per_device)
        random = np.random.default_rng(0)
        numbers = random.normal(size=(count, settings.columns)).astype(np.float32)
        signal = numbers[:, 0] + numbers[:, 1] * numbers[:, 2] + random.normal(size=count)
        return jn.data.binned((numbers, (signal > 0).astype(np.int32)), name="random table")

    def booster(config: TreeConfig) -> jn.trees.Boosting:
        objective = jn.trees.cross_entropy(2)
        return jn.trees.boosting(objective, num_trees=config.num_steps, max_depth=settings.max_depth)

    return jn.trees.experiment(TreeConfig(settings.batch_size, settings.steps), data, booster)


def check_equal(rows: Rows) -> int:
    """Returns the number of devices up to which all trees of strong scaling are bit for bit those of one device.

    Raises:
        ArithmeticError: they are not.
    """
    found = {int(row.what["devices"] or 1): row.observed["trained"] for row in _strong(rows)}
    if different := [count for count, digest in found.items() if digest != found[min(found)]]:
        raise ArithmeticError(f"trees grown on {different} devices differ from those of {min(found)}.")
    return max(found, default=0)


def time_per_tree(row: Row) -> Quantity | None:
    """Returns the seconds of a tree on all devices together."""
    trees = row.work / (int(row.what["devices"] or 1) * int(row.what["rows"] or 1))
    return None if row.time is None else row.time.scaled(1 / trees, "s")


def reductions(rows: Rows) -> Collective | None:
    """Returns the all-reduces of a tree on several devices, as XLA compiled them; None if none were measured."""
    observed = next((row.observed for row in _strong(rows) if "all-reduce runs" in row.observed), None)
    if observed is None:
        return None
    runs, num_bytes = (float(observed[f"all-reduce {name}"] or 0) for name in ("runs", "num_bytes"))
    return Collective("all-reduce", runs, num_bytes)


def _strong(rows: Rows) -> list[Row]:
    return [row for row in measured(rows.where(batch="shared", alone=False)) if "trained" in row.observed]


def _findings(rows: Rows) -> list[Finding]:
    check_equal(rows)
    found = []
    for row in scaled_rows(rows):
        what, notes = describe(rows, row)
        article = ARTICLE if what == f"{NUM_GPUS} devices, strong scaling" else ""
        found.append(Finding("A14", f"a tree, {what}", time_per_tree(row), article, notes))
    if (reduced := reductions(rows)) is not None:
        over_nvlink = quantity([NVLINK.seconds([reduced], NUM_GPUS)], "s")
        found += [
            Finding(
                "A14", "all-reduced", quantity([reduced.num_bytes], "B/tree"), note=f"{reduced.runs:g} all-reduces"
            ),
            Finding(
                "A14",
                "all-reduces of a tree over NVLink, 4 GPUs, predicted",
                over_nvlink,
                note=str(NVLINK),
                comparable=False,
            ),
        ]
    return found


def _of_a_column(rows: Rows) -> Iterator[str]:
    most, reduced = check_equal(rows), reductions(rows)
    if most < 2 or reduced is None:
        return
    yield f"all trees on up to {most} devices are those of one device, bit for bit."
    counts = sorted({int(row.what["devices"] or 1) for row in scaled_rows(rows)} - {1})
    alone = _strong(rows)[0].time
    if rows.mostly_overhead(_strong(rows)[0], "rows"):
        return
    speed = {count: predict(rows, count, NVLINK) for count in counts}
    listed = ", ".join(f"{count}: {alone.median / one:.2f}" for count, one in speed.items() if alone and one)
    if listed:
        yield (
            "predicted speed-up with strong scaling of devices as fast as this one, joined by NVLink "
            f"({NVLINK}, the latency assumed), by number of devices: {listed}."
        )


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    own = [f"{label}: {sentence}" for label, rows in columns.items() for sentence in _of_a_column(rows)]
    return [*SCALING.conclude(columns), *own]


SCALING = make_study(
    boosted_table,
    name="boosting_devices",
    full=TableSettings(),
    quick=TableSettings(24_576, 3_072, (), messages=2, rounds=3, seconds=0.1),
    claims=("A14",),
)
STUDY = dataclasses.replace(
    SCALING,
    title="How much faster do boosted trees grow on several devices?",
    method=(
        "Trees of depth 6 on a random table of 28 columns with 255 bins, whose rows are sharded over 1, 2, 4 … devices "
        "of a kind: the same rows for all (strong scaling), or as many on each device (weak scaling). Each device sums "
        "the histograms of its rows as integers; one all-reduce per level adds them, and every device finds the same "
        "splits. Data are on the devices; compilation is not timed. Efficiency is relative to one device in the same "
        "round; the share in collectives is the part of a tree's time that is missing when every device boosts its own "
        "rows alone. The study fails if trees on several devices are not those of one device, to the last bit."
    ),
    findings=_findings,
    conclude=_conclude,
)
