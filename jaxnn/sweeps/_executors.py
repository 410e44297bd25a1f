"""Where the members of a sweep are trained: in this process, or on a Ray cluster as shards with a device each."""

import contextlib
import dataclasses
import importlib
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxnn._compat import needs_extra
from jaxnn._fields import with_changes
from jaxnn._provenance import file_name_of, jax_flags
from jaxnn._signals import Interruption, interruptible
from jaxnn.record import Record, RecordReader
from jaxnn.run import Display
from jaxnn.search import Points, Searcher
from jaxnn.sweeps._groups import reason
from jaxnn.sweeps._members import count_by_status
from jaxnn.sweeps._plan import SweepOptions, checked_points, plan_sweep
from jaxnn.sweeps._stored import open_sweep
from jaxnn.sweeps._sweep import Sweep
from jaxnn.sweeps._sweep_record import new_sweep_dir, origin_of, recorded_points, shard_folder, with_shard_dir
from jaxnn.sweeps._train_sweep import sweep_here
from jaxnn.types import ConfigError, Experiment, LostError, RecordError

MAX_RETRIES = 3  # a worker that is lost this often was not lost by accident
SECONDS_BETWEEN_LINES = 10.0
SECONDS_TO_WAIT = 60.0  # a driver that was killed leaves workers, which Ray ends within seconds
# Without its head for 60 seconds Ray ends this process from C++, with status 1.
SECONDS_WITHOUT_HEAD, SECONDS_BETWEEN_CALLS = 40.0, 5.0
# Settings of JAX that workers share, besides those that change numbers: what one compiled is there for all.
CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")

type Swept = tuple[Experiment[Any], Points | Searcher, SweepOptions]


def sweep(
    experiment: Experiment[Any],
    points: Points | Searcher | Mapping[str, Mapping[str, Any] | Points] | None = None,
    options: SweepOptions | None = None,
    **changes: Any,
) -> Sweep:
    """Trains a member for every point: those that differ in floats and the seed as one program.

    A member computes what its solo run does, to rounding. SIGINT, SIGTERM and SIGHUP end the sweep after the current
    window, saved and ready to resume. ConfigError, DataError or RecordError if the sweep cannot start; then nothing was
    written. A point or a group that cannot be trained has the status ``failed`` and the reason; the others are trained.

    >>> jn.sweep(experiment, jn.grid(seed=range(8)), patience=3)  # doctest: +SKIP
    finished  sweep of 8: 8 finished ...

    Args:
        experiment: what is run; its config holds the fields that ``points`` do not set.
        points: what `grid`, `zip`, `random` make, or a sum of these; or a searcher, such as `jn.search.asha` makes,
            that proposes them while it trains; default: those of the sweep that is resumed. A dict names members,
            ``{"small": {}, "deep": jn.grid(depth=[9], seed=[0, 1])}``; fields
            that one of them lacks are as in the config.
        options: how to run it.
        **changes: single sweep options, such as ``vmap_size=16`` or ``resume="runs/mnist/sweep-…"``.
    """
    options = with_changes(options or SweepOptions(), changes, experiment.config)
    if points is None:
        if options.resume is None:
            raise ConfigError("a sweep needs points, such as jn.grid(seed=range(4)).")
        _, points = recorded_points(options.resume, experiment)
    points = Points.named(points, experiment.config) if isinstance(points, Mapping) else points
    if options.lanes is not None and isinstance(points, Points):
        points = Searcher.of("sweep", points)
    if options.executor == "ray":
        return _sweep_on_ray(experiment, points, options)
    if callable(options.executor):
        return options.executor(experiment, points, options)  # type: ignore[no-any-return]
    return sweep_here(experiment, points, with_shard_dir(options))


def _sweep_on_ray(experiment: Experiment[Any], points: Points | Searcher, options: SweepOptions) -> Sweep:
    """Trains the shards of a sweep as Ray tasks; signals end it, ready to resume. LostError if the cluster is lost."""
    if not options.record or options.plan_only or options.shard is not None or options.devices not in (None, 1):
        raise ConfigError(
            "executor='ray' gathers the records of shards with a device each: leave record, plan_only, shard and "
            "devices at their defaults, and give num_workers."
        )
    checked_points(experiment, points, dataclasses.replace(options, device="cpu", devices=1))
    if options.resume is None and options.run_dir is not None:
        Record.check_vacant(options.run_dir)
    # Ray sets signal handlers when it starts, so that ours come after.
    with _cluster(options) as (ray, num_workers, gpus), interruptible() as interruption:
        names = (*jax_flags(), *CACHE_SETTINGS)
        settings = {name: getattr(jax.config, name) for name in names if hasattr(jax.config, name)}
        try:
            given = ray.put((experiment, points, options))
        except TypeError as error:
            raise ConfigError(
                f"the experiment cannot be sent to Ray's workers ({reason(error)}): make what cannot be pickled, such "
                "as open files and locks, inside data, task or optimizer."
            ) from None
        # Ray counts cores but keeps no process from using more: XLA starts NPROC threads, and no GPU is opened.
        one_core = {"num_cpus": 1, "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu", "NPROC": "1"}}}
        try:
            count = ray.get(ray.remote(_count_members).options(**one_core).remote(given, settings))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise LostError(f"no worker of Ray's cluster could plan the sweep ({reason(error)}): try again.") from None
        path = options.resume or Record.create(
            options.run_dir or new_sweep_dir(options.name or file_name_of(experiment) or "sweep")
        )
        started = [int(folder.name.partition("-of-")[2]) for folder in RecordReader(path).shards]
        num_shards = started[0] if started else min(count, num_workers)
        # A process keeps the GPU it opened, and the next task may be given another.
        device = {"num_gpus": 1, "max_calls": 1} if gpus else one_core
        train_remotely = ray.remote(max_retries=MAX_RETRIES, **device)(_train_shard)
        with Display.open("none" if options.progress == "none" else "plain") as display:
            workers = f"{num_workers} workers with {'a GPU' if gpus else 'a core'} each"
            display.rows([("ray", workers), ("shards", str(num_shards))])
            shards = (f"{part}/{num_shards}" for part in range(1, num_shards + 1))
            origin = origin_of(experiment)
            tasks = {train_remotely.remote(given, settings, origin, path.resolve(), shard): shard for shard in shards}
            lost = list[str]()
            with interruption.finishing("the current windows"):
                for line in _wait(ray, tasks, path, interruption, lost):
                    display.say(f"  {line}")
            if lost and not RecordReader(path).shards:
                raise LostError(f"no shard of the sweep in {path} was started: try again, with --resume {path}.")
            results = open_sweep(path, experiment)
            display.say(str(results))
        return results


def _wait(ray: Any, tasks: dict[Any, str], path: Path, interruption: Interruption, lost: list[str]) -> Iterator[str]:
    """Waits for all tasks; after an interruption, for their current windows. Yields lines to print.

    The shards whose workers were lost are added to ``lost``. LostError if the cluster is.
    """
    line_at, cancelled = time.monotonic() + SECONDS_BETWEEN_LINES, False
    answers = _head_answers(ray.get_runtime_context().gcs_address)
    try:
        while tasks:
            if not answers():
                raise _lost(path, "its head does not answer")
            if interruption.signum is not None and not cancelled:
                cancelled = True
                for task in tasks:
                    ray.cancel(task)
            ended, _ = ray.wait(list(tasks), timeout=0.5)
            for task in ended:
                shard, ending = tasks.pop(task), "ended"
                try:
                    ray.get(task)
                except ray.exceptions.TaskCancelledError:
                    pass
                except ray.exceptions.RayTaskError as error:
                    # A worker that is interrupted outside of training has nothing to save.
                    if not isinstance(error.cause, KeyboardInterrupt):
                        ending = f"failed: {reason(error.cause)}"
                except ray.exceptions.LocalRayletDiedError as error:
                    raise _lost(path, reason(error)) from None
                except ray.exceptions.RayError as error:
                    lost.append(shard)
                    ending = f"failed: its worker was lost {MAX_RETRIES + 1} times: {reason(error)}"
                yield f"shard {shard} {ending}"
            if time.monotonic() >= line_at:
                line_at = time.monotonic() + SECONDS_BETWEEN_LINES
                # File systems between machines may lack, for a moment, what is being replaced.
                with contextlib.suppress(OSError, RecordError):
                    yield f"{count_by_status(open_sweep(path).members)}; {len(tasks)} shards left"
    except LostError:
        tasks.clear()  # no one could cancel them
        raise
    finally:
        for task in tasks:
            ray.cancel(task)


def _lost(path: Path, why: str) -> LostError:
    return LostError(
        f"Ray's cluster was lost ({why}): what its workers saved is intact; start a cluster, and continue with "
        f"--executor ray --resume {path}."
    )


def _head_answers(address: str) -> Callable[[], bool]:
    """Returns a function that is False once Ray's head at ``address`` has not answered for too long."""
    host, _, port = address.rpartition(":")
    silent_since = None
    next_call = 0.0

    def calls() -> bool:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_BETWEEN_CALLS).close()
        except (OSError, ValueError):
            return False
        return True

    watches = calls()  # a head behind Ray's client cannot be called from here

    def answers() -> bool:
        nonlocal silent_since, next_call
        now = time.monotonic()
        if watches and now >= next_call:
            next_call = now + SECONDS_BETWEEN_CALLS
            silent_since = None if calls() else silent_since or now
        return silent_since is None or now - silent_since < SECONDS_WITHOUT_HEAD

    return answers


def _count_members(given: Swept, settings: Mapping[str, Any]) -> int:
    """The number of members that can be run, found on a CPU, so that the driver need not open a device."""
    _set_up(settings)
    experiment, points, options = given
    plan = plan_sweep(experiment, points, dataclasses.replace(options, device="cpu", devices=1))
    return sum(len(group.members) for group in plan.groups)


def _train_shard(given: Swept, settings: Mapping[str, Any], origin: Mapping[str, Any], path: Path, shard: str) -> None:
    """Trains a shard on the one device of this worker; continues what a lost worker left."""
    until = time.monotonic() + SECONDS_TO_WAIT
    while RecordReader(shard_folder(path, shard)).is_locked and time.monotonic() < until:
        time.sleep(0.2)
    _set_up(settings)
    experiment, points, options = given
    changes = {"executor": "local", "num_workers": None, "devices": 1, "progress": "none"}
    options = with_changes(options, changes | {"shard": shard, "run_dir": None, "resume": path})
    sweep_here(experiment, points, with_shard_dir(options), origin)


def _set_up(settings: Mapping[str, Any]) -> None:
    """Sets JAX as in the process that started the sweep."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in settings.items():
            jax.config.update(name, value)


@contextlib.contextmanager
def _cluster(options: SweepOptions) -> Iterator[tuple[Any, int, bool]]:
    """Ray, connected, found or started here; how many workers run at once, and whether each has a GPU."""
    with needs_extra("ray", "executor='ray'"):
        ray: Any = importlib.import_module("ray")
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            _start(ray, options.num_workers)
            stack.callback(ray.shutdown)
        resources = ray.cluster_resources()
        num_gpus, num_cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        if options.device not in (None, "cpu") and (options.device != "gpu" or num_gpus == 0):
            raise ConfigError(
                f"device is {options.device!r}, and Ray's cluster has {num_gpus} GPUs and {num_cores} cores: choose "
                "what it has, or leave device out."
            )
        gpus = num_gpus > 0 and options.device != "cpu"
        try:
            yield ray, options.num_workers or (num_gpus if gpus else max(1, num_cores)), gpus
        except LostError:
            stack.pop_all()  # Ray's shutdown would wait for the head
            raise


def _start(ray: Any, num_workers: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        # Ray forks to execute another program at once, which JAX's threads do not mind.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        try:
            try:
                ray.init(num_cpus=num_workers, **quiet)
            except ValueError:  # a cluster was found, with the resources it has
                ray.init(**quiet)
        except ConnectionError as error:
            raise ConfigError(
                f"Ray's cluster cannot be used ({reason(error)}): start it, or unset RAY_ADDRESS and end what "
                "`ray start` left on this machine."
            ) from None
        finally:
            # Ray replaces the handler of SIGTERM by one that ends the process.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
