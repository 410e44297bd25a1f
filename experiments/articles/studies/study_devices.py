"""Comparing columns of one page: which GPU with which CPU, and from which size one is faster than the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from articles.studies.study_rows import distinct, measured

from jaxnn.bench import Plain, Rows, format_ratio


def is_cpu(label: str) -> bool:
    """Whether a column is a CPU's."""
    return label.startswith("CPU")


def cpus_with_gpus(labels: Iterable[str]) -> list[tuple[str, str]]:
    """Each CPU of a page with each GPU, by the labels of their columns."""
    labels = list(labels)
    gpus = [label for label in labels if label.startswith("GPU")]
    return [(cpu, gpu) for cpu in labels if is_cpu(cpu) for gpu in gpus]


def speedups(columns: Mapping[str, Rows], **what: Plain) -> list[tuple[str, str, str]]:
    """``(cpu, gpu, "28×")``: how many times as fast each GPU is as each CPU, where both timed the case."""
    found = []
    for cpu, gpu in cpus_with_gpus(columns):
        # Not the times: a call may be of another length there.
        slow, fast = (columns[label].one(**what).rate for label in (cpu, gpu))
        if slow is not None and fast is not None:
            found.append((cpu, gpu, format_ratio(fast.median / slow.median)))
    return found


def shared_sizes(rows: Rows, others: Rows, across: str) -> list[Any]:
    """What of ``across`` was timed in both, in rising order."""
    mine, theirs = (set[Any](distinct(measured(some), across)) for some in (rows, others))
    return sorted(mine & theirs)


def faster_from(rows: Rows, others: Rows, across: str) -> Any | None:
    """The least size from which on a call of ``rows`` takes less time than one of ``others``; None: not at the largest.

    Args:
        rows: a row for each size.
        others: likewise.
        across: the case's name of the size; only sizes that were timed in both count.
    """
    found = None
    for size in reversed(shared_sizes(rows, others, across)):
        mine, theirs = (measured(some).one(**{across: size}).time for some in (rows, others))
        if mine is None or theirs is None or mine.median >= theirs.median:
            break
        found = size
    return found
