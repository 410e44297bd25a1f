"""Sweep options: those of a run, and how its members are arranged. They never change numbers beyond rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from jaxnn.engine import RunOptions, check_choice, check_count
from jaxnn.parallel import find_strategy
from jaxnn.types import ConfigError

if TYPE_CHECKING:
    type ExecutorOption = str | Callable[..., Any]
else:  # what a command line can give
    ExecutorOption = str


@dataclasses.dataclass(frozen=True)
class SweepOptions(RunOptions):
    """How to run a sweep; flags of every script's ``sweep`` and keyword arguments of ``jn.sweep``."""

    plan_only: bool = False
    """Show how the members would be grouped and how fast each vmap size is; train nothing."""
    vmap_size: int | None = None
    """Members under one vmap on a device; default: the faster of one or two that are measured."""
    order: Literal["member", "shared"] = "member"
    """Whether each member sees the data in the order of its own seed, as alone, or all in that of the first."""
    member_runs: bool = False
    """Export each member as a run directory too, with a checkpoint that jn.fit can resume."""
    shard: str | None = None
    """Run only part I of N of the members, written I/N, counted from 1: one per job of an array."""
    executor: ExecutorOption = "local"
    """local: in this process; ray: as shards on a Ray cluster; or a function of experiment, points and options."""
    num_workers: int | None = None
    """Number of shards that Ray runs at once; default: one per device of the cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vmap_size", "num_workers"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        check_choice("order", self.order, ("member", "shared"))
        if not callable(self.executor):
            check_choice("executor", self.executor, ("local", "ray"))
        if find_strategy(self.strategy).axis_name is not None:
            raise ConfigError(
                f"strategy {find_strategy(self.strategy).name} maps its program over devices, which a sweep does with "
                "members: choose auto, data or fsdp."
            )
        if self.shard is not None:
            parse_shard(self.shard)


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` is ``(2, 8)``: the second of eight."""
    part, _, whole = text.partition("/")
    if not (part.isdecimal() and whole.isdecimal() and 1 <= int(part) <= int(whole)):
        raise ConfigError(f"shard is {text!r}, and must be I/N with I from 1 to N, as in 2/8: the second of eight.")
    return int(part), int(whole)
