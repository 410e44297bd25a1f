"""Compares the columns of one page: each GPU with each CPU, and the size from which one is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from articles.studies.study_rows import distinct, measured, without_overhead
from harness import Bench, Case, Plain, Rows, format_ratio


def cases_by_size(bench: Bench, names: Iterable[str], make: Callable[..., Case]) -> Iterator[list[Case]]:
    """Yields for each size ``make(settings, name, size, kind, device)`` on all devices; on a CPU up to its largest."""
    settings = bench.settings
    for size in settings.sizes:
        yield [
            make(settings, name, size, kind, device)
            for kind, device in bench.devices.items()
            for name in names
            if kind != "cpu" or size <= settings.largest_on_cpu
        ]


def is_cpu(label: str) -> bool:
    """Returns whether a column belongs to a CPU."""
    return label.startswith("CPU")


def cpus_with_gpus(labels: Iterable[str]) -> list[tuple[str, str]]:
    """Returns all pairs of a CPU and a GPU, by the labels of their columns."""
    labels = list(labels)
    gpus = [label for label in labels if label.startswith("GPU")]
    return [(cpu, gpu) for cpu in labels if is_cpu(cpu) for gpu in gpus]


def speedups(columns: Mapping[str, Rows], **what: Plain) -> list[tuple[str, str, str]]:
    """Returns ``(cpu, gpu, "28×")``, the speed of each GPU relative to each CPU, if both timed the case.

    Times that are mostly overhead are not compared, see `overheads`.
    """
    found = []
    for cpu, gpu in cpus_with_gpus(columns):
        sound = [without_overhead(label, {"": columns[label].one(**what)}, columns[label])[0] for label in (cpu, gpu)]
        # Rates, not times: the length of a call may differ.
        slow, fast = (rows[""].rate if rows else None for rows in sound)
        if slow is not None and fast is not None:
            found.append((cpu, gpu, format_ratio(fast.median / slow.median)))
    return found


def overheads(columns: Mapping[str, Rows], **what: Plain) -> list[str]:
    """Returns a sentence for each column whose time of the case is mostly overhead."""
    name = " ".join(map(str, what.values()))
    found = [without_overhead(label, {name: rows.one(**what)}, rows)[1] for label, rows in columns.items()]
    return [sentence for sentences in found for sentence in sentences]


def shared_sizes(rows: Rows, others: Rows, across: str) -> list[Any]:
    """Returns the values of ``across`` that were timed in both, ascending."""
    mine, theirs = (set[Any](distinct(measured(some), across)) for some in (rows, others))
    return sorted(mine & theirs)


def faster_from(rows: Rows, others: Rows, across: str) -> Any | None:
    """Returns the smallest size from which ``rows`` are faster than ``others``; None if they are slower at the largest.

    Args:
        rows: a row for each size.
        others: a row for each size.
        across: the name of the size in a case; only sizes that were timed in both count.
    """
    found = None
    for size in reversed(shared_sizes(rows, others, across)):
        mine, theirs = (measured(some).one(**{across: size}).time for some in (rows, others))
        if mine is None or theirs is None or mine.median >= theirs.median:
            break
        found = size
    return found
