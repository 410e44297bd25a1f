"""A19: the memory bandwidth of a device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from articles.studies.study_devices import cases_by_size, cpus_with_gpus
from articles.studies.study_pictures import DASHES, draw_lines, panels
from articles.studies.study_rows import GROWING, OVERHEAD, best_rate, measured, rate_finding, without_overhead
from harness import Bench, Case, Finding, Quantity, Row, Rows, Study, format_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of a vector in bytes."""

    sizes: tuple[int, ...] = tuple(2**power for power in range(12, 31, 2))
    largest_on_cpu: int = 2**28
    rounds: int = 5
    seconds: float = 0.2
    grow_until: float = 0.002


QUICK = Settings((2**12, 2**18, 2**26), 2**26, rounds=3, seconds=0.02)


class Operation(NamedTuple):
    """An operation on a vector.

    Attributes:
        function: takes a float32 vector.
        passes: vectors read and written: 2 if the result is a vector too.
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
    """Returns a call that applies ``operation`` to a vector of ``size`` bytes on ``device``."""
    with jax.default_device(device):
        vector = jnp.full(size // 4, FACTOR, jnp.float32)
    if operation.passes == 1:
        reduce = jax.jit(operation.function)
        return lambda: reduce(vector)
    # Page faults of newly allocated memory would cost a CPU more than writing the result.
    into = jax.jit(lambda _, vector: operation.function(vector), donate_argnums=0, keep_unused=True)
    result = jax.jit(jnp.zeros_like)(vector)

    def call() -> Any:
        nonlocal result
        result = into(result, vector)
        return result

    return call


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    return cases_by_size(bench, OPERATIONS, _case)


def _case(settings: Settings, name: str, size: int, kind: str, device: jax.Device) -> Case:
    operation = OPERATIONS[name]
    return Case(
        kind,
        {"operation": name, "size": size},
        functools.partial(make_call, operation, size, device),
        operation.passes * size,
        "B",
        queued=True,
        num_bytes=operation.passes * size,
        larger=functools.partial(_case, settings, name, 4 * size, kind, device),
    )


def _at_largest(rows: Rows) -> Row | None:
    """Returns the row of the largest vector that was timed."""
    return max(measured(rows), key=lambda row: row.work, default=None)


def _findings(rows: Rows) -> list[Finding]:
    peak = best_rate(rows)
    if peak is None:
        return []
    found = [rate_finding("A19", "peak over all operations and sizes", rows)]
    for name in OPERATIONS:
        if (last := _at_largest(rows.where(operation=name))) is not None and last.rate is not None:
            size: Any = last.what["size"]
            note = f"{size / 2**20:g} MiB, {last.rate.median / peak.median:.0%} of the peak"
            if hidden := rows.mostly_overhead(last, "size"):
                note += f"; {OVERHEAD}"
            found.append(Finding("A19", f"{name}, largest vector", last.rate, note=note, comparable=not hidden))
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    sentences, rates = [], dict[str, dict[str, Quantity]]()
    for label, rows in columns.items():
        largest = {name: _at_largest(rows.where(operation=name)) for name in OPERATIONS}
        sound, hidden = without_overhead(label, largest, rows)
        sentences += hidden
        rates[label] = {name: row.rate for name, row in sound.items() if row.rate is not None}
    for cpu, gpu in cpus_with_gpus(columns):
        ours, theirs = rates[cpu], rates[gpu]
        ratios = [
            f"{name} {format_ratio(theirs[name].median / ours[name].median)}"
            for name in OPERATIONS
            if name in ours and name in theirs
        ]
        if ratios:
            sentences.append(f"Memory bandwidth of {gpu} relative to {cpu}, largest vectors: {', '.join(ratios)}.")
    return sentences


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    (axes,) = panels(figure, ["memory bandwidth"])
    draw_lines(axes, columns, across="size", lines="operation")
    for rows, dashes in zip(columns.values(), itertools.cycle(DASHES), strict=False):
        if (peak := best_rate(rows)) is not None:
            axes.axhline(peak.median, c="black", ls=dashes, lw=0.8)
    axes.set_xlabel("vector size, bytes")
    axes.set_ylabel("bytes/s, read and written")


STUDY = Study(
    name="bandwidth",
    claims=("A19",),
    title="A GPU has its own memory, built for large blocks: what is the bandwidth of each device?",
    method=(
        "Copying, scaling and summing a float32 vector on the device. Bytes are those read and written: twice the "
        "vector for copy and scale, once for the sum. Results are written to memory that is already allocated. Calls"
        " and the wait for their results are timed, compilation and transfers are not. "
        f"{GROWING} "
        "The peak is the best rate over all sizes: small vectors fit into caches, only the largest show the memory "
        "itself. Black lines are peaks."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
