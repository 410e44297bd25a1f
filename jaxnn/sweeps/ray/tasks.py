"""What the workers of a sweep are given to do: its members cut into tasks, each with a directory of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxnn.sweeps.engine.resuming import read_before
from jaxnn.sweeps.engine.shards import FOLDER, shard_folders
from jaxnn.sweeps.results import ENDED, open_sweep


class RayTask(NamedTuple):
    """Members that a worker trains together.

    Attributes:
        numbers: who they are.
        folder: where their part of the record lies.
    """

    numbers: tuple[int, ...]
    folder: Path


def plan_tasks(path: Path, groups: Sequence[Sequence[int]], num_workers: int) -> list[RayTask]:
    """What is left to do of the sweep in ``path``, longest first: the tasks that were begun, and the rest cut anew."""
    begun = {folder: tuple(read_before(folder)["numbers"]) for folder in shard_folders(path)}
    left = [RayTask(numbers, folder) for folder, numbers in begun.items() if not _is_over(folder, numbers)]
    known = {number for numbers in begun.values() for number in numbers}
    rest = [[number for number in group if number not in known] for group in groups]
    last = max((int(folder.name.rpartition("-")[2]) for folder in begun), default=0)
    for place, numbers in enumerate(cut(rest, num_workers), last + 1):
        left.append(RayTask(tuple(numbers), path / FOLDER / f"task-{place:03d}"))
    return sorted(left, key=lambda task: -len(task.numbers))


def cut(groups: Sequence[Sequence[int]], num_workers: int) -> Iterator[Sequence[int]]:
    """Parts of groups, as large as they can be with one for every worker, and none above a worker's share."""
    total = sum(map(len, groups))
    if total == 0:
        return
    size = -(-total // num_workers)
    while sum(-(-len(group) // size) for group in groups) < min(num_workers, total):
        size -= 1
    for group in groups:
        count = -(-len(group) // size)
        ends = [len(group) * part // count for part in range(count + 1)] if count else []
        for first, last in zip(ends, ends[1:], strict=False):
            yield group[first:last]


def _is_over(folder: Path, numbers: Sequence[int]) -> bool:
    part = open_sweep(folder)
    over = [member.index for member in part.members if member.status in ENDED]
    return part.status == "finished" and sorted(over) == sorted(numbers)
