"""A4: latency and throughput; larger batches trade one for the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from articles.studies.study_devices import cpus_with_gpus, faster_from
from articles.studies.study_pictures import draw_lines, panels
from articles.studies.study_rows import OVERHEAD, best_rate, fastest, measured, rate_finding, without_overhead
from flax import linen
from harness import Bench, Case, Finding, Plain, Row, Rows, Study, format_ratio, quantity

from jaxnn.models import CNN, MLP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Settings:
    """Batch sizes; a CPU runs the CNN up to ``largest_cnn_on_cpu``."""

    batches: tuple[int, ...] = tuple(2**power for power in range(14))
    largest_cnn_on_cpu: int = 1024
    rounds: int = 5
    seconds: float = 0.2
    grow_until: float = 0.002


QUICK = Settings((1, 8, 64, 512), 64, rounds=3, seconds=0.02)
QUEUED = "queued"


class Network(NamedTuple):
    """A network to time.

    Attributes:
        model: untrained, which takes the same time.
        shape: of an example.
        num_bytes: of an example and its activations.
    """

    model: linen.Module
    shape: tuple[int, ...]
    num_bytes: int


NETWORKS: Mapping[str, Network] = {
    "MLP": Network(MLP((512, 512, 10)), (784,), 7_300),
    "CNN": Network(CNN(10), (28, 28, 1), 300_000),
}


@functools.cache
def make_parameters(name: str) -> Any:
    """Returns the parameters of a network on the host."""
    model, shape, _ = NETWORKS[name]
    return jax.device_get(jax.jit(model.init)(jax.random.key(0), np.zeros((1, *shape), np.float32)))


def make_call(name: str, batch: int, device: jax.Device) -> Callable[[], Any]:
    """Returns a call that computes the logits ``[batch, 10]`` of examples on ``device``, with one of `NETWORKS`."""
    model, shape, _ = NETWORKS[name]
    examples = np.random.default_rng(0).random((batch, *shape), np.float32)
    on_device = jax.device_put((make_parameters(name), examples), device)
    with jax.default_device(device):  # layers choose implementations by it
        forward = jax.jit(model.apply).lower(*on_device).compile()
    return lambda: forward(*on_device)


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for name in NETWORKS:
        for batch in settings.batches:
            yield [
                _case(name, batch, kind, device, queued)
                for kind, device in bench.devices.items()
                for queued in ((False,) if kind == "cpu" else (False, True))
                if kind != "cpu" or name != "CNN" or batch <= settings.largest_cnn_on_cpu
            ]


def _case(name: str, batch: int, kind: str, device: jax.Device, queued: bool) -> Case:
    def begin() -> Callable[[], Any]:
        call = make_call(name, batch, device)
        return call if queued else lambda: jax.block_until_ready(call())

    what: dict[str, Plain] = {"network": name, "batch": batch, **({"calls": QUEUED} if queued else {})}
    return Case(
        kind,
        what,
        begin,
        batch,
        "examples",
        queued=queued,
        num_bytes=batch * NETWORKS[name].num_bytes,
        larger=functools.partial(_case, name, 8 * batch, kind, device, queued),
    )


def waited(rows: Rows) -> Rows:
    """Returns the rows whose calls were waited for one by one, which have a latency."""
    return Rows(row for row in rows if row.what.get("calls") != QUEUED)


def knee(rows: Rows) -> Row | None:
    """Returns the row of the smallest batch with half of the best throughput; None if nothing was measured."""
    best = best_rate(rows)
    reaching = [row for row in rows if row.rate is not None and best and row.rate.median >= best.median / 2]
    return min(reaching, key=_batch, default=None)


def _batch(row: Row) -> int:
    batch: Any = row.what["batch"]
    return int(batch)


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for name in NETWORKS:
        those = measured(waited(rows.where(network=name)))
        best, alone = fastest(rows.where(network=name)), fastest(those)
        bend = knee(those)
        if best is None or alone is None or bend is None:
            continue
        found += [
            Finding("A4", f"{name}, latency at batch size 1", those.one(batch=1).time),
            rate_finding(
                "A4", f"{name}, best throughput", rows.where(network=name), "batch", note=f"batch {_batch(best)}"
            ),
            Finding(
                "A4",
                f"{name}, latency at best throughput",
                alone.time,
                note=f"batch {_batch(alone)}",
                comparable=False,
            ),
            Finding(
                "A4",
                f"{name}, knee: smallest batch with half of the best throughput",
                quantity([_batch(bend)], ""),
                note=OVERHEAD if rows.mostly_overhead(alone, "batch") else "",
            ),
        ]
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    """Compares the knee with one example on each device, and each GPU with each CPU."""
    sentences, sound = [], dict[str, dict[str, Row]]()
    for label, rows in columns.items():
        best = {name: fastest(waited(rows.where(network=name))) for name in NETWORKS}
        sound[label], hidden = without_overhead(label, best, rows, "batch")
        sentences += hidden
        sentences += [_compare_knee(name, label, waited(rows.where(network=name))) for name in sound[label]]
    for cpu, gpu in cpus_with_gpus(columns):
        sentences += [
            _compare_devices(name, cpu, columns[cpu], gpu, columns[gpu], name in sound[cpu] and name in sound[gpu])
            for name in NETWORKS
        ]
    return [sentence for sentence in sentences if sentence]


def _compare_knee(name: str, label: str, rows: Rows) -> str:
    one, bend = rows.one(batch=1), knee(rows)
    if bend is None or not (one.time and one.rate and bend.time and bend.rate):
        return ""
    if bend == one:
        return f"{label}, {name}: batch size 1 already reaches half of the best throughput."
    more, longer = bend.rate.median / one.rate.median, bend.time.median / one.time.median
    return (
        f"{label}, {name}: a batch of {_batch(bend)} has {format_ratio(longer)} the latency of one example and "
        f"{format_ratio(more)} its throughput."
    )


def _compare_devices(name: str, cpu: str, on_cpu: Rows, gpu: str, on_gpu: Rows, throughput: bool) -> str:
    """Compares latencies, and ``throughput`` if both times say something about it."""
    slow, fast = (waited(rows.where(network=name)) for rows in (on_cpu, on_gpu))
    times = slow.one(batch=1).time, fast.one(batch=1).time
    rates = [best_rate(rows.where(network=name)) for rows in (on_cpu, on_gpu)]
    if not (times[0] and times[1] and rates[0] and rates[1]):
        return ""
    start = faster_from(fast, slow, "batch")
    since = "at no batch size measured on both" if start is None else f"from batch size {start}"
    compared = f"latency of one example {format_ratio(times[1].median / times[0].median)}"
    if throughput:
        compared += f", best throughput {format_ratio(rates[1].median / rates[0].median)}"
    return f"{name}, {gpu} relative to {cpu}: {compared}; lower latency {since}."


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    latency, throughput = panels(figure, ("latency", "throughput and its knee"))
    columns = {label: waited(rows) for label, rows in columns.items()}
    draw_lines(latency, columns, across="batch", lines="network", quantity=lambda row: row.time)
    latency.set_ylabel("s")
    draw_lines(throughput, columns, across="batch", lines="network")
    throughput.set_ylabel("examples/s")
    for axes in (latency, throughput):
        axes.set_xlabel("batch size")
    for rows in columns.values():
        for name in NETWORKS:
            _mark(throughput, knee(rows.where(network=name)))


def _mark(axes: Axes, row: Row | None) -> None:
    """Marks the knee with a circle."""
    if row is not None and row.rate is not None:
        axes.plot(_batch(row), row.rate.median, "o", ms=10, mfc="none", mec="black", zorder=3)


STUDY = Study(
    name="latency",
    claims=("A4",),
    title="Larger batches trade latency for throughput: what are both, and at which batch size is the knee?",
    method=(
        "The forward pass of an MLP (784, 512, 512, 10) and of a CNN (28×28×1; 3×3 convolutions of 32 and 64 "
        "channels, each with pooling; dense 128, 10), in float32 as JAX computes it by default, which some GPUs "
        "round to tf32. Latency is one call and the wait for its logits; throughput is the batch size over that "
        "time, or on an accelerator over the time of a call in a queue. Its batches grow until a call takes 2 ms or "
        "an eighth of its memory. Examples and parameters are on the device: transfers and compilation are not "
        "timed. The knee is the smallest batch with half of the best throughput."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
