"""The Ray engine: the members of a sweep cut into tasks, each trained by a worker with a device of its own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from jaxnn.loop import interruptible, open_display
from jaxnn.record import check_vacant, create_run_dir, open_record
from jaxnn.sweeps.engine.local import draw, new_sweep_dir
from jaxnn.sweeps.engine.plan import check_alone
from jaxnn.sweeps.engine.resuming import continued_options, read_before
from jaxnn.sweeps.engine.store import Store, origin_of
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.ray.cluster import Cluster, open_cluster
from jaxnn.sweeps.ray.driver import Driver
from jaxnn.sweeps.ray.tasks import plan_tasks
from jaxnn.sweeps.ray.worker import Planned, Sent, jax_settings, plan_there, train_there
from jaxnn.sweeps.results import Sweep, open_sweep
from jaxnn.sweeps.search import Halving, Points
from jaxnn.types import ConfigError, Experiment


def sweep_on_ray(experiment: Experiment[Any], points: Points | Halving, options: SweepOptions) -> Sweep:
    """Trains the members of a sweep on Ray's workers; SIGINT and SIGTERM end it, saved and ready to resume.

    A task whose worker is lost goes on with another one from its last checkpoint.

    Args:
        experiment: what is run.
        points: those of all members.
        options: how to run them.

    Raises:
        ConfigError, DataError, RecordError: the sweep cannot start; nothing was written.
    """
    _check_options(options)
    check_alone(points, options)
    before = None if options.resume is None else read_before(options.resume)
    if before is not None:
        options = continued_options(options, before)
    elif options.run_dir is not None:
        check_vacant(options.run_dir)
    # Ray sets handlers of its own when it starts, so that ours come after.
    with open_cluster(options.num_workers, options.device) as cluster, interruptible() as interruption:
        sent = cluster.put(Sent(experiment, points, options, origin_of(experiment), jax_settings()))
        planned: Planned = cluster.ask(plan_there, sent, before)
        for text in planned.warnings:
            warnings.warn(text, stacklevel=3)
        with interruption.finishing("the current windows"), _opened(options, planned, cluster) as driver:
            tasks = plan_tasks(driver.path, planned.groups, cluster.num_workers)
            driver.introduce(tasks)
            calls = {task: (sent, task.numbers, task.folder) for task in tasks}
            for task, outcome in cluster.work(train_there, calls, interruption, driver.look):
                driver.settle(task, outcome)
        return _closed(driver, experiment)


def _check_options(options: SweepOptions) -> None:
    """Raises ConfigError for an option that has no meaning for workers."""
    if not options.record:
        raise ConfigError("engine='ray' gathers the members from their records: leave record at its default.")
    if options.devices not in (None, 1):
        raise ConfigError(f"devices is {options.devices}, and a Ray worker has one: say num_workers instead.")
    if options.shard is not None or options.plan_only:
        name = "plan_only" if options.plan_only else "shard"
        raise ConfigError(f"{name} is for the members of one process, and engine is 'ray': leave one of them out.")


@contextlib.contextmanager
def _opened(options: SweepOptions, planned: Planned, cluster: Cluster) -> Iterator[Driver]:
    """The sweep's directory, held and kept true by this process."""
    path = options.resume or create_run_dir(options.run_dir or new_sweep_dir(planned.facts["name"]))
    lines = "none" if options.progress == "none" else "plain"
    with open_record(path.resolve()) as record, open_display(lines, 0) as words:
        driver = Driver(record.path, Store(record, planned.facts), planned.members, cluster, words)
        # What workers have is told by the parts of each.
        driver.store.describe(status="running", devices=str(cluster))
        driver.tell_members()
        try:
            yield driver
        finally:
            driver.finish()


def _closed(driver: Driver, experiment: Experiment[Any]) -> Sweep:
    """The sweep as it ended, drawn and told of."""
    found = open_sweep(driver.path, experiment)
    draw(found)
    for line in str(found).splitlines():
        driver.words.say(f"  {line}")
    if found.status == "interrupted":
        driver.words.say(f"  to go on: --engine ray --resume {driver.path}")
    return found
