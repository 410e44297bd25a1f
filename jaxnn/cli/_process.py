"""The process of a command: its compile cache, devices and other processes, and how it exits."""

import atexit
import contextlib
import dataclasses
import errno
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jaxnn._clock import Clock
from jaxnn._signals import RESUMABLE, interruptible, leave
from jaxnn._text import drop_output, flush_output, is_of_output, say_error
from jaxnn.observe import cpu_count
from jaxnn.parallel import Place, joined
from jaxnn.types import ConfigError, JaxnnError, LostError, TrainingError, check_int, printable

FAILED = 1
BAD_INPUT = 2
# Errors of the system about a path that a user gave; a missing file may be a defect.
_UNUSABLE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)
# Each device has a copy of the data: more copies than this would cost more memory than cores are worth.
_MOST_DEVICES = 16
# Bytes: thousands of small networks' programs. JAX's own limit reads the whole cache for each program that it adds,
# which takes 0.3 s with 5,000.
_CACHE_LIMIT = 2 << 30


def use_all_cores() -> None:
    """Makes each CPU core a JAX device, unless another number is configured or a backend runs already.

    XLA computes small operations on one core; sweep members on several devices use several cores.
    """
    if jax.config.jax_num_cpu_devices <= 0 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # a backend runs already
            jax.config.update("jax_num_cpu_devices", min(cpu_count() or 1, _MOST_DEVICES))


def enable_compile_cache(limit: int = _CACHE_LIMIT) -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX is configured to use another one.

    JAX runs the programs that it finds there: without a directory that only the user can write there is no cache, and
    standard error has a line about it. The user's cache is reduced to half of ``limit`` bytes if it is larger.
    """
    if jax.config.jax_compilation_cache_dir is None:
        import platformdirs

        directory = Path(platformdirs.user_cache_dir("jaxnn")) / "compiled"
        if reason := _make_private(directory):
            say_error(f"jaxnn: compiled programs are not kept: {reason}")
            return
        files = []
        for file in filter(Path.is_file, directory.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # another process may delete files here
                known = file.stat()
                # File systems record a reading once a day, or not at all.
                files.append((max(known.st_atime, known.st_mtime), known.st_size, file))
        size = sum(num_bytes for _, num_bytes, _ in files)
        for _, num_bytes, file in sorted(files) if size > limit else ():
            if size > limit // 2:  # half, so that the next scripts have nothing to delete
                with contextlib.suppress(OSError):
                    file.unlink()
                size -= num_bytes
        jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX keeps only programs that took a second to compile; small ones add up too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _make_private(directory: Path) -> str | None:
    """Creates a directory that only this user can write; returns why it cannot be used, or None."""
    try:
        for folder in (directory.parent, directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Who can write the parent can replace the directory.
        parent, known = directory.parent.stat(), directory.stat()
    except OSError as error:
        return f"{directory} cannot be made ({error.strerror or error})."
    if {parent.st_uid, known.st_uid} != {os.getuid()}:
        return f"{directory} or its parent belongs to another user: set JAX_COMPILATION_CACHE_DIR to one of yours."
    if known.st_mode & 0o022 or parent.st_mode & 0o002:
        return f"other users can write {directory} or its parent: delete it, or restrict its permissions."
    return None


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Which process of several this is; flags of every script, the same in all of them but for --process-id."""

    cpu_devices: int | None = None
    """Number of devices that the CPU simulates, to try out runs on several; they share its cores."""
    distributed: bool = False
    """Join the processes that SLURM, Open MPI, Kubernetes or Cloud TPU started together."""
    coordinator: str | None = None
    """HOST:PORT, the machine of process 0 and a free port there; instead of --distributed, with the next two."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    start_timeout: float = Place.start_timeout
    """Seconds within which all of them must have started."""
    lost_after: float = Place.lost_after
    """Seconds of silence after which one counts as lost and the others end; one that is killed is noticed at once."""

    def __post_init__(self) -> None:
        if self.cpu_devices is not None:
            check_int("cpu_devices", self.cpu_devices)

    def place(self) -> Place | None:
        """Which process this is, None: the only one; raises ConfigError if flags are incomplete or contradictory."""
        flags = dataclasses.asdict(self)
        del flags["cpu_devices"]
        return Place.of_flags(**flags)


@contextlib.contextmanager
def processes(options: ClusterOptions, device: str | None = None) -> Iterator[None]:
    """Joins this process to the others within the block, if there are any; see `jaxnn.parallel.joined`."""
    if device == "cpu":  # no accelerator is opened, which others could use
        jax.config.update("jax_platforms", "cpu")
    if options.cpu_devices is not None:
        try:
            jax.config.update("jax_num_cpu_devices", options.cpu_devices)
        except RuntimeError as error:
            raise ConfigError(
                f"cpu_devices is {options.cpu_devices}, and JAX has started already: compute nothing before jn.main."
            ) from error
    if (place := options.place()) is None:
        yield
        return
    # Connections of JAX's runtime within this machine must not go through a proxy for the web.
    names = [os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy"), "127.0.0.1"]
    os.environ["no_grpc_proxy"] = ",".join(filter(None, names))
    with joined(place, status_of):
        yield


def count_from_start() -> None:
    """Lets budgets count from the start of this process."""
    with contextlib.suppress(OSError, AttributeError):  # a system without these; imports take about a second
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        Clock.process_started = time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def check_alone(arguments: Sequence[str], command: str) -> None:
    """Raises ConfigError if a flag of several processes is among the arguments of a command that is for one."""
    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ClusterOptions)} - {"--cpu-devices"}
    for word in arguments:
        if (flag := word.partition("=")[0].replace("_", "-")) in flags:
            others = "split its members over machines with --shard I/N" if command == "sweep" else "leave it out"
            raise ConfigError(f"{flag} makes one run of several processes, and {command} is for one process: {others}.")


def status_of(error: BaseException) -> int:
    """The exit status after ``error``, which a process that joined others sends to them."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, KeyboardInterrupt | LostError):
        return RESUMABLE  # the others lost a process, as if it had been killed
    return BAD_INPUT if isinstance(error, JaxnnError) and not isinstance(error, TrainingError) else FAILED


@contextlib.contextmanager
def exit_on_user_error(resumed: Path | None = None, *, owns_process: bool = False) -> Iterator[None]:
    """Turns errors meant for the user into one line on standard error and an exit; a defect keeps its traceback.

    The status is 2 for input that cannot be used, 1 after training failed; after a signal 130, or 75 if nothing was
    trained since the record ``resumed``, which the command resumes, was saved. If it ``owns_process``, an interruption
    may end the process outside of Python code, which compilers and computations in C++ keep from running.
    """
    if owns_process:
        _open_streams()
        atexit.register(flush_output)
    with interruptible(owns_process=owns_process, resumed=resumed) as interruption:
        try:
            yield
        except BaseException as error:
            if interruption.at_once or isinstance(error, KeyboardInterrupt):
                # Also if another exception replaced KeyboardInterrupt on its way through C++ code.
                status, text = interruption.ending()
                if not isinstance(error, SystemExit):  # which has printed the reason
                    say_error(text)
                if owns_process:
                    leave(status)  # Python's own way waits for running computations
                raise SystemExit(status) from None
            if unread := is_of_output(error):
                drop_output()
            unusable = isinstance(error, OSError) and error.errno in _UNUSABLE
            if isinstance(error, JaxnnError):
                reason = str(error)
            elif isinstance(error, BrokenPipeError):
                reason = "standard output was closed, as by `head`."
            elif isinstance(error, OSError) and unread:
                reason = (
                    f"standard output cannot be written ({error.strerror}): free disk space, or write it elsewhere."
                )
            elif isinstance(error, OSError) and unusable:
                reason = f"{error.filename or 'a file'}: {error.strerror}: choose another path."
            elif isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                reason = f"memory ran out ({error}): make the batch or the model smaller, or add --no-resident."
            else:  # a defect, or an exit that printed its reason
                raise
            say_error(printable(f"error: {reason}", lines=False))
            if owns_process and isinstance(error, LostError):
                leave(RESUMABLE)  # libraries would wait for what is lost
            raise SystemExit(BAD_INPUT if unusable else status_of(error)) from None


def _open_streams() -> None:
    """Opens the null device in place of closed standard streams: the next files would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115
