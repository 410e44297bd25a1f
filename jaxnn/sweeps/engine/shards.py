"""Where the parts of a sweep lie that several processes train: each in a directory of its own in that of the sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxnn.record import SHARDS, SWEEP_FILE, is_sweep
from jaxnn.sweeps.engine.plan import SweepPlan
from jaxnn.sweeps.engine.resuming import check_same, read_before
from jaxnn.sweeps.options import SweepOptions, parse_shard
from jaxnn.types import ConfigError

FOLDER = "shards"


def located(options: SweepOptions) -> SweepOptions:
    """The options of a shard with a directory of its own in that of the sweep; it is resumed if it is there.

    Raises:
        ConfigError: no directory is given that the shards could share, or it holds a sweep that was divided otherwise.
    """
    if options.shard is None or options.plan_only or not options.record:
        return options
    shared = options.resume or options.run_dir
    if shared is None:
        raise ConfigError("the shards of a sweep share a directory: give all of them the same run_dir.")
    if options.resume is not None and (shared / SWEEP_FILE).is_file():
        # The directory of the shard itself; that of a whole sweep is refused with the options.
        return options
    part, whole = parse_shard(options.shard)
    _check_division(shared, whole)
    own = shared / FOLDER / f"{part}-of-{whole}"
    if options.resume is not None and is_sweep(own):
        return dataclasses.replace(options, run_dir=None, resume=own)
    return dataclasses.replace(options, run_dir=own, resume=None)


def check_siblings(plan: SweepPlan) -> None:
    """Confirms that a new shard is one of the sweep that the shards beside it are of.

    Raises:
        ConfigError: they have another config or other points.
    """
    own = plan.options.run_dir
    if plan.options.shard is None or own is None:
        return
    shared = own.parent.parent
    for folder in shard_folders(shared):
        check_same(plan, read_before(folder), shared)
        return


def shard_folders(path: Path) -> Iterator[Path]:
    """The directories of the parts of the sweep in ``path`` that were begun, by name."""
    return (file.parent for file in sorted(path.glob(SHARDS)))


def _check_division(shared: Path, whole: int) -> None:
    """A sweep divided in two ways would train members twice."""
    if (shared / SWEEP_FILE).is_file():
        raise ConfigError(f"{shared} holds a sweep that was not divided into shards: choose another run_dir.")
    for folder in shard_folders(shared):
        if not folder.name.endswith(f"-of-{whole}"):
            raise ConfigError(
                f"{shared} holds the shard {folder.name.replace('-of-', '/')}, so the sweep is not divided into "
                f"{whole}: go on with as many shards as before, or choose another run_dir."
            )
