"""A4: how long an answer takes, and how many a second there are: larger batches buy the one with the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from articles.studies.study_devices import cpus_with_gpus, faster_from
from articles.studies.study_pictures import draw_lines, panels
from articles.studies.study_rows import best_rate, fastest, measured
from flax import linen

from jaxnn.bench import Bench, Case, Finding, Plain, Row, Rows, Study, format_ratio, quantity
from jaxnn.models import CNN, MLP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Settings:
    """Batches in examples; a CPU's memory and patience limit those of the CNN."""

    batches: tuple[int, ...] = tuple(2**power for power in range(14))
    largest_cnn_on_cpu: int = 1024
    rounds: int = 5
    seconds: float = 0.2


QUICK = Settings((1, 8, 64, 512), 64, rounds=3, seconds=0.02)


class Network(NamedTuple):
    """What answers.

    Attributes:
        model: untrained, which takes as long.
        shape: of an example.
    """

    model: linen.Module
    shape: tuple[int, ...]


NETWORKS: Mapping[str, Network] = {
    "MLP": Network(MLP((512, 512, 10)), (784,)),
    "CNN": Network(CNN(10), (28, 28, 1)),
}


@functools.cache
def make_parameters(name: str) -> Any:
    """Those of a network, on the host; compiled once for all batches."""
    model, shape = NETWORKS[name]
    return jax.device_get(jax.jit(model.init)(jax.random.key(0), np.zeros((1, *shape), np.float32)))


def make_call(name: str, batch: int, device: jax.Device) -> Callable[[], Any]:
    """A call that gives the logits ``[batch, 10]`` of examples that lie on ``device``, of one of `NETWORKS`."""
    model, shape = NETWORKS[name]
    examples = np.random.default_rng(0).random((batch, *shape), np.float32)
    there = jax.device_put((make_parameters(name), examples), device)
    with jax.default_device(device):  # layers choose how they compute by it
        forward = jax.jit(model.apply).lower(*there).compile()
    return lambda: jax.block_until_ready(forward(*there))


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for name in NETWORKS:
        for batch in settings.batches:
            what: dict[str, Plain] = {"network": name, "batch": batch}
            yield [
                Case(kind, what, functools.partial(make_call, name, batch, device), batch, "examples")
                for kind, device in bench.devices.items()
                if kind != "cpu" or name != "CNN" or batch <= settings.largest_cnn_on_cpu
            ]


def knee(rows: Rows) -> Row | None:
    """The row of the smallest batch that reaches half of the best throughput; None where nothing was measured."""
    best = best_rate(rows)
    reaching = [row for row in rows if row.rate is not None and best and row.rate.median >= best.median / 2]
    return min(reaching, key=_batch, default=None)


def _batch(row: Row) -> int:
    batch: Any = row.what["batch"]
    return int(batch)


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for name in NETWORKS:
        those = measured(rows.where(network=name))
        best = fastest(those)
        bend = knee(those)
        if best is None or bend is None:
            continue
        found += [
            Finding("A4", f"{name}, latency of one example", those.one(batch=1).time),
            Finding("A4", f"{name}, best throughput", best.rate, note=f"batch {_batch(best)}"),
            Finding(
                "A4",
                f"{name}, latency at its best throughput",
                best.time,
                note=f"batch {_batch(best)}",
                comparable=False,
            ),
            Finding(
                "A4",
                f"{name}, knee: the batch of half of the best throughput",
                quantity([_batch(bend)], ""),
            ),
        ]
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    """What a batch costs on each device, and what a GPU buys and costs."""
    told = [_traded(name, label, rows.where(network=name)) for label, rows in columns.items() for name in NETWORKS]
    for cpu, gpu in cpus_with_gpus(columns):
        told += [_bought(name, cpu, columns[cpu], gpu, columns[gpu]) for name in NETWORKS]
    return [sentence for sentence in told if sentence]


def _traded(name: str, label: str, rows: Rows) -> str:
    one, bend = rows.one(batch=1), knee(rows)
    if bend is None or not (one.time and one.rate and bend.time and bend.rate):
        return ""
    if bend == one:
        return f"{label}, {name}: one example at a time already gives half as many a second as any batch."
    more, longer = bend.rate.median / one.rate.median, bend.time.median / one.time.median
    return (
        f"{label}, {name}: a batch of {_batch(bend)} takes {format_ratio(longer)} as long as one example, and gives "
        f"{format_ratio(more)} as many a second."
    )


def _bought(name: str, cpu: str, on_cpu: Rows, gpu: str, on_gpu: Rows) -> str:
    slow, fast = on_cpu.where(network=name), on_gpu.where(network=name)
    times, rates = (slow.one(batch=1).time, fast.one(batch=1).time), (best_rate(slow), best_rate(fast))
    if not (times[0] and times[1] and rates[0] and rates[1]):
        return ""
    start = faster_from(fast, slow, "batch")
    since = "at no batch that both ran" if start is None else f"from a batch of {start} on"
    return (
        f"{name} on {gpu} against {cpu}: one example takes {format_ratio(times[1].median / times[0].median)} as long, "
        f"its best batch gives {format_ratio(rates[1].median / rates[0].median)} as many a second as the CPU's; "
        f"its answer to the same batch comes sooner {since}."
    )


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    latency, throughput = panels(figure, ("latency", "throughput, and its knee"))
    draw_lines(latency, columns, across="batch", lines="network", quantity=lambda row: row.time)
    latency.set_ylabel("seconds until the answer")
    draw_lines(throughput, columns, across="batch", lines="network")
    throughput.set_ylabel("examples a second")
    for axes in (latency, throughput):
        axes.set_xlabel("batch")
    for rows in columns.values():
        for name in NETWORKS:
            _mark(throughput, knee(rows.where(network=name)))


def _mark(axes: Axes, row: Row | None) -> None:
    """A ring around the knee."""
    if row is not None and row.rate is not None:
        axes.plot(_batch(row), row.rate.median, "o", ms=10, mfc="none", mec="black", zorder=3)


STUDY = Study(
    name="latency",
    claims=("A4",),
    title="A batch makes each answer wait for the others: how long does it take, and how many a second are there?",
    method=(
        "The forward pass of an MLP (784, 512, 512, 10) and of a CNN (28×28×1; 3×3 convolutions of 32 and 64 channels, "
        "each with pooling; dense 128, 10), in float32 as JAX computes it by default, which some GPUs round to tf32. "
        "Latency is one call and the wait for its logits; throughput is the examples of a batch over that time, with "
        "nothing queued behind it. Examples and parameters lie on the device: transfers and compilation are not "
        "counted. The knee is the smallest batch that reaches half of the best throughput."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
