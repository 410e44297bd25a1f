"""Where the members of a sweep are trained: in this process, or on a Ray cluster as shards with a device each."""

import contextlib
import dataclasses
import functools
import importlib
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxnn._compat import needs_extra
from jaxnn._disk import make_room
from jaxnn._fields import with_changes
from jaxnn._provenance import file_name_of, jax_flags
from jaxnn._signals import Interruption, interruptible
from jaxnn.record import Record, RecordReader
from jaxnn.run import Display
from jaxnn.search import Points, Searcher
from jaxnn.sweeps._groups import reason
from jaxnn.sweeps._members import count_by_status
from jaxnn.sweeps._plan import SweepOptions, checked_points, plan_sweep
from jaxnn.sweeps._search_events import FILE
from jaxnn.sweeps._shared_search import RemoteSearch, SharedSearch
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
    if options.budget is not None:
        raise ConfigError("budget is the time of one process: leave it out with executor='ray'.")
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
        count, lanes = _counted(ray, given, settings, one_core)
        path = options.resume or Record.create(
            options.run_dir or new_sweep_dir(options.name or file_name_of(experiment) or "sweep")
        )
        started = [int(folder.name.partition("-of-")[2]) for folder in RecordReader(path).shards]
        num_shards = started[0] if started else min(count, num_workers)
        ends = [lanes * part // num_shards for part in range(num_shards + 1)]
        shards = {f"{part}/{num_shards}": ends[part] - ends[part - 1] for part in range(1, num_shards + 1)}
        keeper = None
        if isinstance(points, Searcher):
            keeper = _keeper(ray, points, path.resolve(), shards, one_core["runtime_env"], is_new=not started)
        # A process keeps the GPU it opened, and the next task may be given another.
        device = {"num_gpus": 1, "max_calls": 1} if gpus else one_core
        train_remotely = ray.remote(max_retries=MAX_RETRIES, **device)(_train_shard)
        with Display.open("none" if options.progress == "none" else "plain") as display:
            workers = f"{num_workers} workers with {'a GPU' if gpus else 'a core'} each"
            display.rows([("ray", workers), ("shards", str(num_shards))])
            origin = origin_of(experiment)
            start = functools.partial(train_remotely.remote, given, settings, origin, path.resolve(), keeper)
            lost = list[str]()
            search = None if keeper is None else _Shared(keeper, start, "GPU" if gpus else "CPU")
            with interruption.finishing("the current windows"):
                tasks = {start(shard): shard for shard in shards}
                for line in _wait(ray, tasks, path, interruption, lost, search):
                    display.say(f"  {line}")
            if lost and not RecordReader(path).shards:
                raise LostError(f"no shard of the sweep in {path} was started: try again, with --resume {path}.")
            results = open_sweep(path, experiment)
            display.say(str(results))
        return results


class _Shared(NamedTuple):
    """A search that workers share: the actor that keeps it, how a shard is started, and what a worker occupies."""

    keeper: Any
    start: Callable[[str], Any]
    resource: str  # ``CPU`` or ``GPU``


def _counted(ray: Any, given: Any, settings: Mapping[str, Any], how: Mapping[str, Any]) -> tuple[int, int]:
    """What `_count_members` returns on a worker of the cluster."""
    try:
        counts: tuple[int, int] = ray.get(ray.remote(_count_members).options(**how).remote(given, settings))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise LostError(f"no worker of Ray's cluster could plan the sweep ({reason(error)}): try again.") from None
    return counts


def _keeper(
    ray: Any, searcher: Searcher, path: Path, lanes: Mapping[str, int], environment: Any, *, is_new: bool
) -> Any:
    """The actor that keeps a search, which Ray starts again if it is lost. Errors of the record are raised here."""
    make_room(path)
    _wait_for_writer(path)
    if is_new:  # no member was trained
        (path / FILE).unlink(missing_ok=True)
    elif not (path / FILE).exists():
        raise ConfigError(f"the sweep in {path} has a list of points, and no searcher: resume it without points.")
    SharedSearch(searcher, path, lanes).close()
    how = {"num_cpus": 0, "max_restarts": MAX_RETRIES, "max_task_retries": MAX_RETRIES, "runtime_env": environment}
    return ray.remote(SharedSearch).options(**how).remote(searcher, path, lanes)


def _ending(ray: Any, task: Any, path: Path) -> tuple[str, bool, bool]:
    """How a task ended: in words, whether it has nothing left to train, and whether its worker was lost."""
    try:
        return "ended", ray.get(task), False
    except ray.exceptions.TaskCancelledError:
        return "ended", False, False
    except ray.exceptions.RayTaskError as error:
        # A worker that is interrupted outside of training has nothing to save.
        ended = isinstance(error.cause, KeyboardInterrupt)
        return ("ended" if ended else f"failed: {reason(error.cause)}"), False, False
    except ray.exceptions.LocalRayletDiedError as error:
        raise _lost(path, reason(error)) from None
    except ray.exceptions.RayError as error:
        return f"failed: its worker was lost {MAX_RETRIES + 1} times: {reason(error)}", False, True


def _wait(
    ray: Any, tasks: dict[Any, str], path: Path, interruption: Interruption, lost: list[str], search: _Shared | None
) -> Iterator[str]:
    """Waits for all tasks; after an interruption, for their current windows. Yields lines to print.

    The shards whose workers were lost are added to ``lost``. LostError if the cluster is.
    """
    line_at, cancelled, failed = time.monotonic() + SECONDS_BETWEEN_LINES, False, False
    answers = _head_answers(ray.get_runtime_context().gcs_address)
    try:
        while tasks:
            if not answers():
                raise _lost(path, "its head does not answer")
            if interruption.signum is not None and not cancelled:
                cancelled = True
                for task in tasks:
                    ray.cancel(task, recursive=False)  # what it asks of a search is to be answered
            if search is not None:
                room = ray.cluster_resources().get(search.resource, 0)
                search.keeper.release.remote(idle=failed or room < len(tasks))
            ended, _ = ray.wait(list(tasks), timeout=0.5)
            for task in ended:
                shard = tasks.pop(task)
                ending, finished, is_lost = _ending(ray, task, path)
                lost += [shard] if is_lost else []
                failed |= ending != "ended"
                if search is not None and not (finished or failed or cancelled):
                    tasks[search.start(shard)] = shard  # it left to make room for a shard that it waited for
                    continue
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
            ray.cancel(task, recursive=False)


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


def _count_members(given: Swept, settings: Mapping[str, Any]) -> tuple[int, int]:
    """The number of members that can be run, and of the lanes of a search, or 0.

    They are found on a CPU, so that the driver need not open a device.
    """
    _set_up(settings)
    experiment, points, options = given
    plan = plan_sweep(experiment, points, dataclasses.replace(options, device="cpu", devices=1))
    return sum(len(group.members) for group in plan.groups), 0 if plan.search is None else plan.num_lanes


def _train_shard(
    given: Swept, settings: Mapping[str, Any], origin: Mapping[str, Any], path: Path, keeper: Any, shard: str
) -> bool:
    """Trains a shard on the one device of this worker; continues what a lost worker left.

    ``keeper`` is the actor of a search. Returns whether nothing is left to train.
    """
    folder = RecordReader(shard_folder(path, shard))
    _wait_for_writer(folder.path)
    _set_up(settings)
    experiment, points, options = given
    found: Any = points
    if isinstance(points, Searcher):
        ray: Any = importlib.import_module("ray")

        def call(name: str, *arguments: Any) -> Any:
            return ray.get(getattr(keeper, name).remote(*arguments))

        found = search = RemoteSearch(points, shard=shard, call=call)
        if not search.begins() or (folder.is_sweep and folder.facts["status"] == "finished"):
            return True
    changes = {"executor": "local", "num_workers": None, "devices": 1, "progress": "none"}
    options = with_changes(options, changes | {"shard": shard, "run_dir": None, "resume": path})
    return sweep_here(experiment, found, with_shard_dir(options), origin).status == "finished"


def _wait_for_writer(path: Path) -> None:
    """Waits until what a killed driver left no longer writes to a directory, or for `SECONDS_TO_WAIT`."""
    until = time.monotonic() + SECONDS_TO_WAIT
    while RecordReader(path).is_locked and time.monotonic() < until:
        time.sleep(0.2)


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
