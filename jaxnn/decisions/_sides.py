"""The two sides of a decision: what identifies them, and the values of their members, trained or already recorded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxnn import engine
from jaxnn._fields import with_changes
from jaxnn._fingerprints import text_fingerprint
from jaxnn._json import config_json, json_line
from jaxnn.record import RECORD_FILE, RecordReader
from jaxnn.search import Points, grid
from jaxnn.sweeps import Member, Sweep, SweepOptions, open_sweep, sweep
from jaxnn.types import ConfigError, Experiment, suggest


def check_metric(metric: str | None, programs: engine.Programs) -> None:
    """Raises ConfigError unless members will report ``metric``, or it is None."""
    known = [f"{split}_{name}" for split in programs.splits.evaluated for name in programs.derived]
    known += [f"train_{name}" for name in programs.metrics]
    if metric is not None and metric not in known:
        raise ConfigError(f"members will have no metric {metric!r}: {suggest(metric, known)}.")


SEEDS = re.compile(r"seeds-(\d{1,10})-(\d{1,10})")


@dataclasses.dataclass
class Side:
    """One of two experiments, and the members that were trained of it, by seed."""

    experiment: Experiment[Any]
    options: SweepOptions  # of its sweeps
    parent: Path  # the folder of all sides
    metric: str | None  # that its members have to report
    members: dict[int, Member] = dataclasses.field(default_factory=dict)
    sweep: Sweep | None = None  # the last one, which knows the metrics
    seconds: float = 0.0  # of training now
    trained: int = 0  # members, now
    looked: set[Path] = dataclasses.field(default_factory=set)  # at these records

    def __post_init__(self) -> None:
        self.key = self._key()
        self.folder = self.parent / f"side-{self.key[:12]}"

    def _key(self) -> str:
        """A digest of the config but for the seed, of data and programs, and of the options that decide results."""
        experiment = self.experiment.replace(seed=0)
        programs = engine.programs_of(experiment, engine.load_data(experiment))
        check_metric(self.metric, programs)
        self.prints, self.shapes = programs.fingerprint(), jax.tree.map(lambda one: one.shape, programs.shapes.params)
        config = {name: value for name, value in config_json(experiment.config).items() if name != "seed"}
        config = json.loads(json_line(config), parse_int=float)  # a rate of 0 is one of 0.0
        options = SweepOptions.deciding(self.options.recorded())
        return text_fingerprint(json_line({"config": config, "fingerprint": self.prints, "options": options}))

    def _records(self, seeds: Sequence[int]) -> list[Path]:
        """The recorded sweeps that started some of the ``seeds``."""
        found = [(path, SEEDS.fullmatch(path.name)) for path in sorted(self.folder.glob("seeds-*"))]
        wanted = {*seeds}
        return [
            path
            for path, name in found
            if name is not None
            and not wanted.isdisjoint(range(int(name[1]), int(name[2]) + 1))
            and (path / RECORD_FILE).is_file()
        ]

    def missing(self, seeds: Sequence[int]) -> list[int]:
        """Returns the ``seeds`` without a member that ended; reads the records that have some of them."""
        for path in self._records(seeds):
            if path not in self.looked:
                self.looked.add(path)
                self._take(open_sweep(path, self.experiment))
        return [seed for seed in seeds if seed not in self.members]

    def train(self, seeds: Sequence[int]) -> bool:
        """Trains the missing members of ``seeds``, and those cut short to their end; False if it was interrupted."""
        for path in self._records(self.missing(seeds)):
            if not self._trained(None, resume=path):
                return False
        while missing := self.missing(seeds):
            # The first ones that follow on each other.
            block = [seed for seed, place in zip(missing, itertools.count(missing[0])) if seed == place]  # noqa: B905
            path = self.folder / f"seeds-{block[0]}-{block[-1]}"
            if not self._trained(grid(seed=block), run_dir=path):
                return False
        return True

    def _trained(self, points: Points | None, **where: Path) -> bool:
        started, before, options = time.monotonic(), len(self.members), self.options
        if points is not None and (records := sorted(self.looked)):
            # As the first members, which chose by trials: another size would round differently.
            group = RecordReader(records[0]).facts["groups"][0]
            known = {"vmap_size": (group.get("vmap") or {}).get("size"), "steps_per_call": group.get("steps_per_call")}
            given = options.explicit()
            options = with_changes(options, {name: size for name, size in known.items() if size and name not in given})
        found = sweep(self.experiment, points, with_changes(options, where))
        self.looked |= {*where.values()}
        self._take(found)
        self.seconds += time.monotonic() - started
        self.trained += len(self.members) - before
        return found.status == "finished"

    def _take(self, found: Sweep) -> None:
        self.sweep = found
        ended = [member for member in found.members if not member.cut_short]
        self.members |= {member.fields["seed"]: member for member in ended}
