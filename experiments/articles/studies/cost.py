"""A18: a GPU costs more per hour and finishes sooner; what does a full run cost on each device?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from articles.studies.keras_scripts import SCRIPTS as PUBLISHED
from articles.studies.study_devices import cpus_with_gpus, is_cpu, overheads
from articles.studies.study_pictures import draw_dots, panels
from articles.studies.study_rows import without_overhead
from articles.studies.study_training import network, training_call
from harness import (
    Bench,
    Case,
    Finding,
    NotMeasured,
    Plain,
    Quantity,
    Row,
    Rows,
    Study,
    format_ratio,
)

from jaxnn.data import arrays
from jaxnn.observe import cpu_count
from jaxnn.types import Splits

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Price(NamedTuple):
    """The price of a device.

    Attributes:
        dollars: per hour.
        source: provider and date.
    """

    dollars: float
    source: str


# On demand, Linux, us-east-1, as third parties list them: one virtual CPU; a GPU with its share of the machine.
CORE = Price(0.0513, "Amazon EC2 c7a, on demand, August 2026")
GPUS: Mapping[str, Price] = {
    "H200": Price(7.912, "an eighth of Amazon EC2 p5en.48xlarge, on demand, August 2026"),
    "H100 80GB HBM3": Price(6.88, "an eighth of Amazon EC2 p5.48xlarge, on demand, November 2026"),
    "A100-SXM4-80GB": Price(3.431, "an eighth of Amazon EC2 p4de.24xlarge, on demand, November 2026"),
    "A100-SXM4-40GB": Price(2.745, "an eighth of Amazon EC2 p4d.24xlarge, on demand, November 2026"),
}

# The GPU to compare with if none was measured.
EXAMPLE = "H100 80GB HBM3"

# Max Woolf, "Benchmarking Modern GPUs for Maximum Cloud Cost Efficiency in Deep Learning", 28 November 2017: Google
# Compute Engine, the CPUs preemptible; in the order of `keras_scripts.Published.seconds`.
ARTICLE: Mapping[str, float] = {"K80": 0.4975, "P100": 1.5075, "16 vCPUs": 0.12, "32 vCPUs": 0.24}


@dataclasses.dataclass(frozen=True)
class Settings:
    """``steps`` of each script are timed per call, on random data."""

    scripts: tuple[str, ...] = ("mnist_mlp", "mnist_cnn", "imdb_lstm")
    steps: int | None = None
    rounds: int = 5
    seconds: float = 2.0


QUICK = Settings(steps=4, rounds=2, seconds=0.2)


def _digits() -> Splits:
    """Returns random data in the shape of MNIST's training split."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (60_000, 28, 28, 1), np.uint8)
    return arrays(train=(images, random.integers(0, 10, 60_000, np.int32)), name="random digits")


def _reviews() -> Splits:
    """Returns random data in the shape of IMDb's training split, 100 of 20,000 words each."""
    random = np.random.default_rng(0)
    words = random.integers(1, 20_000, (25_000, 100), np.int32)
    return arrays(train=(words, random.integers(0, 2, 25_000, np.int32)), name="random reviews")


DATA: Mapping[str, Callable[[], Splits]] = {"mnist_mlp": _digits, "mnist_cnn": _digits, "imdb_lstm": _reviews}
EXAMPLES = {"mnist_mlp": 60_000, "mnist_cnn": 60_000, "imdb_lstm": 25_000}


def price_of(kind: str, name: str, cores: int) -> Price:
    """Returns the price of a device.

    Args:
        kind: ``cpu``, ``gpu`` or ``tpu``.
        name: JAX's ``device_kind``.
        cores: number of cores of a CPU.

    Raises:
        NotMeasured: the price is not known.
    """
    if kind == "cpu":
        return Price(cores * CORE.dollars, f"{cores} virtual CPUs of {CORE.source}")
    # Variants of the same chip, such as a PCIe card or a MIG slice, have other prices.
    if (price := GPUS.get(name.removeprefix("NVIDIA "))) is not None:
        return price
    raise NotMeasured(f"no price of {name} is known: add it to GPUS in articles/studies/cost.py")


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for name in settings.scripts:
        # Shared by all devices, and created when the first one starts.
        data = functools.cache(DATA[name])
        yield [
            Case(
                kind,
                {"script": name},
                functools.partial(_begin, name, data, kind, settings.steps),
                unit="run",
                observe=functools.partial(_observe, kind, device),
                queued=True,
            )
            for kind, device in bench.devices.items()
        ]


def _begin(name: str, data: Callable[[], Splits], kind: str, steps: int | None) -> Any:
    experiment = network(name)
    call, steps, _ = training_call(experiment, data(), kind, steps)
    return call, steps / experiment.config.num_steps, {}


def _observe(kind: str, device: jax.Device) -> dict[str, Plain]:
    price = price_of(kind, device.device_kind, cpu_count() or 1)
    own: dict[str, Plain] = {"dollars an hour": price.dollars, "price": price.source}
    if kind != "cpu":
        return own
    # The price of a GPU, to compare with if none is measured.
    other = GPUS[EXAMPLE]
    return {**own, "dollars an hour of a GPU": other.dollars, "price of a GPU": other.source}


def run_time(row: Row) -> Quantity | None:
    """Returns the seconds of a full run."""
    return None if row.time is None else row.time.scaled(1 / row.work, "s")


def run_cost(row: Row) -> Quantity | None:
    """Returns the cents of a full run; None if time or price are not known."""
    seconds, dollars = run_time(row), _dollars(row)
    return seconds.scaled(100 * dollars / 3600, "cents") if seconds is not None and dollars else None


def article_runs(script: str) -> dict[str, tuple[float, float]]:
    """Returns the seconds and cents of a run in the article by device; empty if none are published."""
    seconds = PUBLISHED[script].seconds or ()
    return {
        device: (each, 100 * each * dollars / 3600)
        for (device, dollars), each in zip(ARTICLE.items(), seconds, strict=False)
    }


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for row in rows:
        name = str(row.what["script"])
        runs = {device: run for device, run in article_runs(name).items() if device in ("K80", "16 vCPUs")}
        time = ", ".join(f"{device} {seconds:g} s" for device, (seconds, _) in runs.items())
        cost = ", ".join(f"{device} {cents:.2g} cents" for device, (_, cents) in runs.items())
        price = f"at ${_dollars(row):.3g} per hour" if _dollars(row) else "no price is known"
        config = network(name).config
        epochs = config.batch_size * config.num_steps / EXAMPLES[name]
        run = f"{name}, {epochs:.0f} epochs"
        found += [
            Finding("A18", f"{run}: time", run_time(row), time),
            Finding("A18", f"{run}: cost", run_cost(row), cost, price),
        ]
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    priced = {label: row for label, rows in columns.items() for row in rows if run_cost(row) is not None}
    sentences = [f"{label}: ${_dollars(row):.3g} per hour ({row.observed['price']})." for label, row in priced.items()]
    sentences += _break_even(priced)
    sentences += [sentence for name in DATA for sentence in overheads(columns, script=name)]
    compared = [costs for name in DATA if len(set(map(is_cpu, costs := _costs(columns, name)))) == 2]
    if compared:
        cpu = sum(is_cpu(min(costs, key=lambda label: costs[label].median)) for costs in compared)
        sentences.append(
            f"A CPU is cheapest in {cpu} of {len(compared)} scripts; in the article 16 preemptible vCPUs were cheaper "
            "than a K80 in 5 of 6."
        )
    return sentences


def _break_even(priced: Mapping[str, Row]) -> list[str]:
    """Returns the speedup above which a GPU is cheaper than each CPU; if none was measured, for a typical price."""
    pairs = [(cpu, gpu, _dollars(priced[gpu])) for cpu, gpu in cpus_with_gpus(priced)]
    if not pairs:
        pairs = [
            (cpu, f"a GPU at ${dollars:.3g} per hour ({row.observed['price of a GPU']})", dollars)
            for cpu, row in priced.items()
            if (dollars := _dollars(row, "dollars an hour of a GPU"))
        ]
    return [
        f"To be cheaper than {cpu}, {gpu} must be more than {format_ratio(dollars / _dollars(priced[cpu]))} as fast."
        for cpu, gpu, dollars in pairs
    ]


def _dollars(row: Row, of: str = "dollars an hour") -> float:
    """Returns an observed price; 0.0 if there is none."""
    return float(row.observed.get(of) or 0.0)


def _costs(columns: Mapping[str, Rows], name: str) -> dict[str, Quantity]:
    """Returns the cost of a run of a script, by column."""
    found = {label: without_overhead(label, {name: rows.one(script=name)}, rows)[0] for label, rows in columns.items()}
    return {label: cost for label, rows in found.items() if rows and (cost := run_cost(rows[name])) is not None}


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    time, cost = panels(figure, ("time of a run", "cost of a run"))
    for axes, of_row in ((time, run_time), (cost, run_cost)):
        scripts = {label: [(str(row.what["script"]), of_row(row)) for row in rows] for label, rows in columns.items()}
        draw_dots(axes, scripts)
    time.set_xlabel("seconds")
    cost.set_xlabel("cents")


STUDY = Study(
    name="cost",
    claims=("A18",),
    title="A GPU costs more per hour and finishes sooner: what does a full run cost on each device?",
    method=(
        "The time of a training step of three of Max Woolf's Keras scripts, on random data of the shape of MNIST and "
        "IMDb that are on the device, times the steps of the script's epochs, times the price per hour. Compilation, "
        "reading data and evaluation are not counted; in the article's totals they are. Prices are from a dated table "
        "in the study; each result shows its own and keeps it when results are merged."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
