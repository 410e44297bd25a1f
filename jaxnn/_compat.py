"""All that jaxnn uses of private modules of JAX and Orbax, and the hooks of the process that it replaces.

``jax.distributed`` is public, but the client of its coordination service, whose key-value store lets processes agree
without a device, is not; neither is the detection of a cluster apart from the start. Only runs of several processes
import them. Orbax logs errors that it also raises, and has no option against that. `needs_extra` is for libraries that
are installed on demand.
"""

import contextlib
import importlib
import logging
import operator
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from jaxnn.types import ConfigError

# The device that programs are traced for in `tracing_for`, else None. JAX knows it: no trace for another is used again.
TARGET = jax.make_user_context(None)
# Raised by JAX if it cannot open a device; the latter if JAX_PLATFORMS leaves it none.
UNOPENED = (RuntimeError, AssertionError)


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turns a failed import of the libraries of an ``extra`` into a ConfigError with the command that installs them."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'{what} needs {error.name or extra}, which is not installed: pip install "jaxnn[{extra}]".'
        ) from error


def target_device() -> Any:
    """The device for which programs are compiled here: JAX's default device, or the one of `tracing_for`."""
    if TARGET.value is not None:
        return TARGET.value
    device: Any = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def platform() -> str:
    """The platform of the device that programs are compiled for here: ``cpu``, ``gpu`` or ``tpu``."""
    return str(target_device().platform)


def compute_capability() -> float:
    """The compute capability of this device if it is an NVIDIA GPU; otherwise 0."""
    try:
        return float(target_device().compute_capability)
    except (AttributeError, ValueError):  # AMD's are named gfx942, for example
        return 0.0


def coordination_client() -> Any:
    """The client of JAX's coordination service, with a key-value store and barriers; None before it has started."""
    return _private("distributed", "global_state.client")


def detect_cluster(seconds: float) -> tuple[str | None, int | None, int | None]:
    """Address of process 0, number of processes and rank as SLURM, Open MPI, Kubernetes or Cloud TPU give them.

    It waits up to ``seconds`` for the name of the first process to be known.
    """
    detect = _private("clusters", "ClusterEnv.auto_detect_unset_distributed_params")
    address, count, rank, _ = detect(None, None, None, None, None, max(1, int(seconds)))
    return address, count, rank


def _private(module: str, name: str) -> Any:
    """Raises ConfigError if this version of JAX keeps it elsewhere."""
    try:
        return operator.attrgetter(name)(importlib.import_module(f"jax._src.{module}"))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"runs of several processes do not work with jax {jax.__version__}, whose internals changed ({error}): "
            "install jax 0.12.0.1, or train in one process."
        ) from error


@contextlib.contextmanager
def tracing_for(device: jax.Device) -> Iterator[None]:
    """Context in which implementations are chosen for ``device``, which need not be here.

    What an experiment computes meanwhile, as an optimizer that makes a key, it computes on JAX's default device. Two
    look-ups ask NVIDIA's libraries, which need not be here either: attention asks for cuDNN's version, a cuDNN LSTM for
    the sizes of its buffers, which are then estimated.
    """
    from jax.experimental import rnn

    attention, capability = _private("cudnn", "fused_attention_stablehlo"), device.compute_capability
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (attention, "check_cudnn_version", lambda: 91000),
            (attention, "check_compute_capability", lambda least: float(capability) >= float(least)),
            (rnn.gpu_rnn, "compute_rnn_workspace_reserve_space_sizes", _rnn_buffers),
        ):
            stack.callback(setattr, module, name, getattr(module, name, None))
            setattr(module, name, value)
        with TARGET(device):
            yield


def _rnn_buffers(
    inputs: int, hidden: int, layers: int, batch: int, time: int, dropout: float, bidirectional: bool, *_: Any
) -> tuple[int, int]:
    """Bytes of a cuDNN LSTM's workspace and of what it keeps for its gradient: gates, cell and output of each step."""
    step = 4 * batch * hidden * layers * (1 + bidirectional)
    return 4 * time * step, 6 * time * step


def configure_orbax_logging() -> None:
    """Has Orbax's errors reported once, by those who catch them; holds for the process."""
    # Through absl it logs each phase of each save, and once more the errors that it also raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Of several writes that fail together it raises the first error; asyncio and TensorStore report the others.
    logging.getLogger("asyncio").addFilter(_is_news)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)
    # For a monitor that no one runs, Orbax asks TensorStore twice a save how much it ever wrote. TensorStore (0.1.86
    # and before) never frees its answer: 16 KiB a checkpoint.
    with contextlib.suppress(ImportError):
        utilities: Any = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
        if hasattr(utilities, "get_tensorstore_raw_bytes"):
            utilities.get_tensorstore_raw_bytes = lambda *_, **__: 0


def _is_news(record: logging.LogRecord) -> bool:
    """Whether asyncio logs something other than a write of Orbax's that failed like one before it."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, OSError | ValueError):
        return True
    # TensorStore's errors name its own description of the file. If no one awaited one, it was never in Orbax.
    if "tensorstore_spec=" in str(error):
        return False
    return not any("orbax" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


class _UnraisableHook:
    """Python's hook for errors that no one can catch, except TensorStore's complaint that Orbax did not wait."""

    def __init__(self, others: Any) -> None:
        self.others = others

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (unraisable.object is None and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.others(unraisable)
