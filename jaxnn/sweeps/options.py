"""Sweep options: how the members of a sweep are run. They never change the numbers beyond rounding, but for `order`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from jaxnn.loop import RunOptions, check_choice, check_count, check_devices, resolve_cadences
from jaxnn.parallel import find_strategy, parse_mesh
from jaxnn.types import ConfigError

LEAST = {"width": 1, "num_workers": 1}
CHOICES = {"order": ("member", "shared"), "engine": ("local", "ray")}
# What a sweep has in common with a run, and hands on to it.
SHARED = (
    "run_dir",
    "resume",
    "record",
    "steps_per_call",
    "report_every",
    "eval_every",
    "eval_batch_size",
    "checkpoint_every",
    "monitor",
    "monitor_mode",
    "patience",
    "resident",
    "device",
    "progress",
    "allocator",
    "stall_after",
)


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """How to run a sweep; flags of every script's ``sweep`` and keyword arguments of ``jn.sweep``."""

    run_dir: Path | None = None
    """Directory of this sweep's record; default runs/NAME/sweep-TIME-ID."""
    resume: Path | None = None
    """Continue the sweep in this directory; members that are over are not run again."""
    record: bool = True
    """Write a record (sweep.json, members.jsonl, metrics.jsonl, checkpoints, a run directory a member)."""
    plan_only: bool = False
    """Say how the members would be grouped and how fast each width is, and train nothing."""
    width: int | None = None
    """Members trained side by side on a device; default: the fastest of a few that are measured."""
    device: Literal["cpu", "gpu", "tpu"] | None = None
    """The kind of device to compute on; default: JAX's, a GPU where there is one."""
    devices: int | Literal["all"] | None = None
    """How many devices to spread members over; default: all."""
    strategy: Any = "auto"
    """How each member is distributed: auto: on one device; data: its batches split over all; fsdp: its state too."""
    mesh: str | None = None
    """Devices along named axes, such as members=2,data=4: two at a time, the batches of each split over four."""
    order: Literal["member", "shared"] = "member"
    """Whether each member sees the data in the order of its own seed, as alone, or all in that of the first."""
    member_runs: bool = True
    """Leave each member a run directory, with a checkpoint that jn.fit can resume."""
    shard: str | None = None
    """Run only part I of N of the members, written I/N, counted from 1: one a job of an array."""
    engine: Literal["local", "ray"] = "local"
    """Where members are run: in this process, or on a Ray cluster."""
    num_workers: int | None = None
    """Ray workers, a device each; default: as many as the cluster has devices."""
    steps_per_call: int | None = None
    """Training steps compiled into one call; default: chosen by measuring."""
    report_every: int | None = None
    """Steps between reports; default: about fifty reports a run."""
    eval_every: int | None = None
    """Steps between evaluations on held-out data; default: ten a run. 0: only at the end."""
    eval_batch_size: int | None = None
    """Examples per evaluation batch; default: twice the training batch size."""
    checkpoint_every: int | None = None
    """Steps between checkpoints of the sweep; default: at evaluations a minute apart. 0: none but at the end."""
    monitor: str = "loss"
    """The held-out metric that says which member and which evaluation is best, and when to stop early."""
    monitor_mode: Literal["auto", "min", "max"] = "auto"
    """Whether less or more of it is better; auto: less of a loss or an error, more of anything else."""
    patience: int | None = None
    """Stop a member early after this many evaluations without improvement; default: never."""
    resident: bool | None = None
    """Keep the whole training set on the device; default: if it fits."""
    progress: Literal["auto", "bar", "plain", "none"] = "auto"
    """How to show progress; auto: a bar on a terminal or in a notebook, plain lines elsewhere."""
    allocator: Literal["auto", "keep", "default"] = "auto"
    """Whether glibc keeps freed memory for the next call; auto: where a call on a CPU frees 32 MiB or more."""
    stall_after: float = 300.0
    """Say what is waited for when nothing got done for so many seconds; 0: never."""

    def __post_init__(self) -> None:
        # A run's own options check themselves, and turn words into paths.
        run = RunOptions(**{name: getattr(self, name) for name in SHARED})
        for name in ("run_dir", "resume"):
            object.__setattr__(self, name, getattr(run, name))
        for name, least in LEAST.items():
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least)
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_devices(self.devices)
        if (strategy := find_strategy(self.strategy)).axis_name is not None:
            raise ConfigError(f"strategy {strategy.name} is for single runs: choose data or fsdp for a sweep.")
        if self.mesh is not None:
            parse_mesh(self.mesh)
        if self.shard is not None:
            parse_shard(self.shard)

    def run_options(self, num_steps: int) -> RunOptions:
        """The options of a member of ``num_steps``, with its cadences decided."""
        return resolve_cadences(RunOptions(**{name: getattr(self, name) for name in SHARED}), num_steps)

    def explicit(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the monitored metric is better."""
        return RunOptions(monitor=self.monitor, monitor_mode=self.monitor_mode).higher_is_better


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` is ``(2, 8)``: the second of eight.

    Raises:
        ConfigError: it is no such pair, or there is no such part.
    """
    part, _, whole = text.partition("/")
    if not (part.isdecimal() and whole.isdecimal() and 1 <= int(part) <= int(whole)):
        raise ConfigError(f"shard is {text!r}, and must be I/N with I from 1 to N, as in 2/8: the second of eight.")
    return int(part), int(whole)
