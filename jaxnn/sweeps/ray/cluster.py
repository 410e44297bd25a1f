"""Ray, as far as a sweep needs it: a cluster that is there or started here, and workers with a device each."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxnn.loop import Interruption
from jaxnn.sweeps.search import reason
from jaxnn.types import ConfigError

# A worker that is lost this often was not lost by accident.
MAX_RETRIES = 3
SECONDS_BETWEEN_LOOKS = 0.5
# Ray counts cores and keeps nobody from using more: so many threads does XLA start. None of it opens a GPU.
ONE_CORE = {"JAX_PLATFORMS": "cpu", "NPROC": "1"}


class Outcome(NamedTuple):
    """How a call on a worker ended.

    Attributes:
        value: what it returned; None if it did not.
        error: why it failed, as a sentence; None too where it was cancelled.
    """

    value: Any
    error: str | None = None


class Cluster(NamedTuple):
    """Workers.

    Attributes:
        ray: the module.
        has_gpus: whether a worker has a GPU, or a core where the cluster has no GPUs.
        num_workers: how many at a time.
    """

    ray: Any
    has_gpus: bool
    num_workers: int

    def __str__(self) -> str:
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        return f"{workers} with a {'GPU' if self.has_gpus else 'core'} each"

    def put(self, value: Any) -> Any:
        """A reference to ``value`` that calls can be given in its place.

        Raises:
            ConfigError: it cannot travel.
        """
        try:
            return self.ray.put(value)
        except TypeError as error:
            raise ConfigError(
                f"the experiment cannot be sent to Ray's workers ({reason(error)}): make what cannot travel, such as "
                "open files and locks, inside data, task or optimizer."
            ) from None

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function`` returns in a process with a core and no GPU; its exception if it raises one."""
        remote = self.ray.remote(function).options(num_cpus=1, runtime_env={"env_vars": ONE_CORE})
        try:
            return self.ray.get(remote.remote(*arguments))
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def work(
        self,
        function: Callable[..., Any],
        calls: Mapping[Any, Sequence[Any]],
        interruption: Interruption,
        look: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Any, Outcome]]:
        """Calls ``function`` on the workers, in order; yields each call's key when it ends, and how.

        A call whose worker was lost is made again. After an interruption no more are made, and those under way are
        interrupted as by SIGINT and waited for.

        Args:
            function: what is called.
            calls: its arguments, by key.
            interruption: asked while calls are waited for.
            look: called every now and then meanwhile.
        """
        remote, waiting, running = self._on_a_device(function), list(calls), dict[Any, Any]()
        cancelled = False
        try:
            while running or (waiting and interruption.signum is None):
                while waiting and len(running) < self.num_workers and interruption.signum is None:
                    key = waiting.pop(0)
                    running[remote.remote(*calls[key])] = key
                if interruption.signum is not None and not cancelled:
                    cancelled = True
                    self._cancel(running)
                ended, _ = self.ray.wait(list(running), timeout=SECONDS_BETWEEN_LOOKS)
                look()
                for call in ended:
                    yield running.pop(call), self._outcome(call)
        finally:
            self._cancel(running)

    def _on_a_device(self, function: Callable[..., Any]) -> Any:
        if self.has_gpus:
            # A process keeps the GPU it opened; its next call may be given another.
            return self.ray.remote(num_gpus=1, max_retries=MAX_RETRIES, max_calls=1)(function)
        remote = self.ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(function)
        return remote.options(runtime_env={"env_vars": ONE_CORE})

    def _cancel(self, calls: Mapping[Any, Any]) -> None:
        for call in calls:
            self.ray.cancel(call)

    def _outcome(self, call: Any) -> Outcome:
        errors = self.ray.exceptions
        try:
            return Outcome(self.ray.get(call))
        except errors.TaskCancelledError:
            return Outcome(None)
        except errors.RayTaskError as error:
            # What a worker raises when it is interrupted outside of training; there is nothing to save then.
            return Outcome(None, None if isinstance(error.cause, KeyboardInterrupt) else reason(error.cause))
        except errors.RayError as error:
            return Outcome(None, f"its worker was lost {MAX_RETRIES + 1} times: {reason(error)}")


@contextlib.contextmanager
def open_cluster(num_workers: int | None, device: str | None = None) -> Iterator[Cluster]:
    """The cluster that Ray is connected to, else the one it finds, else one on this machine that ends with the block.

    Args:
        num_workers: how many at a time; default: as many as there are GPUs, or cores where there are none.
        device: the kind that each worker computes on, ``cpu`` or ``gpu``; None: a GPU where there are any.

    Raises:
        ConfigError: Ray is not installed, its cluster cannot be reached, or it has no such device.
    """
    ray = _import_ray()
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            _start(ray, num_workers)
            stack.callback(ray.shutdown)
        resources = ray.cluster_resources()
        num_gpus, num_cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        if device == "cpu":
            num_gpus = 0
        elif device is not None and (device != "gpu" or num_gpus == 0):
            raise ConfigError(
                f"device is {device!r}, and Ray's cluster has {num_gpus} GPUs and {num_cores} cores for its workers: "
                "choose what it has, or leave device out."
            )
        yield Cluster(ray, num_gpus > 0, num_workers or num_gpus or max(1, num_cores))


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError("engine is 'ray', which needs Ray: pip install -e '.[ray]'") from None


def _start(ray: Any, num_workers: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    with _same_sigterm(), warnings.catch_warnings():
        # Ray forks to execute another program at once, which JAX's threads do not mind.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        try:
            try:
                ray.init(num_cpus=num_workers, **quiet)
            except ValueError:
                # A cluster was found, and what it has is not for us to say.
                ray.init(**quiet)
        except ConnectionError as error:
            raise ConfigError(
                f"Ray's cluster cannot be used ({reason(error)}): start it, or unset RAY_ADDRESS and end what "
                "`ray start` left on this machine."
            ) from None


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Puts back the handler of SIGTERM, which Ray replaces by one that ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
