"""A19: a device's own memory; how many bytes a second it gives and takes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from articles.studies.study_devices import cpus_with_gpus
from articles.studies.study_pictures import DASHES, draw_lines, panels
from articles.studies.study_rows import best_rate

from jaxnn.bench import Bench, Case, Finding, Plain, Quantity, Rows, Study, format_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of a vector in bytes."""

    sizes: tuple[int, ...] = tuple(2**power for power in range(12, 31, 2))
    largest_on_cpu: int = 2**28
    rounds: int = 5
    seconds: float = 0.2


QUICK = Settings((2**12, 2**18, 2**26), 2**26, rounds=3, seconds=0.02)


class Operation(NamedTuple):
    """What is done to a vector.

    Attributes:
        function: of the vector; float32, as it is.
        passes: how many vectors are read and written: 2 if the result is one too.
    """

    function: Callable[[jax.Array], jax.Array]
    passes: int


FACTOR = 1.5
OPERATIONS: Mapping[str, Operation] = {
    "copy": Operation(jnp.copy, 2),
    "scale": Operation(lambda vector: FACTOR * vector, 2),
    "sum": Operation(jnp.sum, 1),
}


def make_call(operation: Operation, size: int, device: jax.Device) -> Callable[[], Any]:
    """A call that applies ``operation`` to a vector of ``size`` bytes on ``device``; each uses up the result before."""
    vector = jax.device_put(np.random.default_rng(0).random(size // 4, np.float32), device)
    if operation.passes == 1:
        reduce = jax.jit(operation.function)
        return lambda: jax.block_until_ready(reduce(vector))
    # New memory for each result would cost a CPU more, in page faults, than filling it.
    into = jax.jit(lambda _, vector: operation.function(vector), donate_argnums=0, keep_unused=True)
    result = jax.jit(jnp.zeros_like)(vector)

    def call() -> Any:
        nonlocal result
        result = jax.block_until_ready(into(result, vector))
        return result

    return call


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for size in settings.sizes:
        group = []
        for kind, device in bench.devices.items():
            if kind == "cpu" and size > settings.largest_on_cpu:
                continue
            for name, operation in OPERATIONS.items():
                what: dict[str, Plain] = {"operation": name, "size": size}
                begin = functools.partial(make_call, operation, size, device)
                group.append(Case(kind, what, begin, operation.passes * size, "B"))
        yield group


def _at_largest(rows: Rows) -> tuple[Any, Quantity] | None:
    """The largest vector that was timed, and the rate of it."""
    found = [(row.what["size"], row.rate) for row in rows if row.rate is not None]
    return max(found, key=lambda pair: float(pair[0] or 0), default=None)


def _findings(rows: Rows) -> list[Finding]:
    peak = best_rate(rows)
    if peak is None:
        return []
    found = [Finding("A19", "peak: the best of all", peak)]
    for name in OPERATIONS:
        if (last := _at_largest(rows.where(operation=name))) is not None:
            size, rate = last
            note = f"{size / 2**20:g} MiB, {rate.median / peak.median:.0%} of the peak"
            found.append(Finding("A19", f"{name} of the largest vector", rate, note=note))
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    told = []
    for cpu, gpu in cpus_with_gpus(columns):
        pairs = {
            name: [_at_largest(columns[label].where(operation=name)) for label in (cpu, gpu)] for name in OPERATIONS
        }
        ratios = [
            f"{name} {format_ratio(theirs[1].median / ours[1].median)}"
            for name, (ours, theirs) in pairs.items()
            if ours is not None and theirs is not None
        ]
        if ratios:
            told.append(f"Bytes a second of {gpu} over those of {cpu}, of the largest vectors: {', '.join(ratios)}.")
    return told


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    (axes,) = panels(figure, ["memory, bytes a second"])
    draw_lines(axes, columns, across="size", lines="operation")
    for rows, dashes in zip(columns.values(), itertools.cycle(DASHES), strict=False):
        if (peak := best_rate(rows)) is not None:
            axes.axhline(peak.median, c="black", ls=dashes, lw=0.8)
    axes.set_xlabel("bytes of the vector")
    axes.set_ylabel("bytes a second, read and written")


STUDY = Study(
    name="bandwidth",
    claims=("A19",),
    title="A GPU has memory of its own, where large blocks move at once: how many bytes a second does each move?",
    method=(
        "Copying a float32 vector, scaling it and summing it, on the device where it lies. Bytes are those read and "
        "written: twice the vector for copy and scale, once for the sum. Results go to memory that is there already. "
        "The call and the wait are counted, compilation and transfers are not. The peak is the best that was measured, "
        "of all sizes: small vectors fit into caches, only the largest show the memory itself. Black lines are peaks."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
