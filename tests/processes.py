"""Runs of several real processes on this machine, which are always ended."""

import contextlib
import dataclasses
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.shell import ROOT

# Prefixes of variables of clusters and of JAX, which the environment of the tests may have.
FOREIGN = ("SLURM_", "OMPI_", "KUBERNETES_", "JAX_", "XLA_", "TPU_", "JAXNN_CLUSTER_")
# Gloo's messages about its connections; its threads, one per device, print them in pieces.
GLOO = re.compile(r"\d*(\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of [a-z ]+ is : )\d*")
# The names in a snippet: its rank, a sum over the devices of all processes, and helpers.
PRELUDE = """
import functools, os, signal, sys, time
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import jaxnn as jn
from jaxnn.cli import ClusterOptions, exit_on_user_error, processes
from jaxnn.parallel import (
    StopVote, all_agree, broadcast_from_primary, is_primary, process_count, set_resume_hint
)

rank, count = int(sys.argv[1]), int(sys.argv[2])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))

@functools.cache
def adding():
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    sharded, replicated = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda values: values.sum(), out_shardings=replicated), sharded

def start_total(value):
    add, sharded = adding()
    local = np.full(jax.local_device_count(), value, np.float32)
    return add(jax.make_array_from_process_local_data(sharded, local))

def total(value):
    return float(start_total(value))

def error_of(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def fail(error):
    raise error

def say(*words):
    print(*words, flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Done:
    """A process that has ended."""

    rank: int
    status: int
    out: str
    err: str


@dataclasses.dataclass
class Started:
    """Processes that may be running."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path

    def output(self, rank: int, stream: str = "out") -> str:
        return (self.folder / f"{rank}.{stream}").read_text()

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Waits until each process has printed ``text``."""
        deadline = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            while text not in self.output(rank):
                failure = f"process {rank} did not print {text!r}: {self.output(rank)}{self.output(rank, 'err')}"
                assert time.monotonic() < deadline and process.poll() is None, failure
                time.sleep(0.02)

    def signal(self, rank: int, signum: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(signum)

    def finish(self, seconds: float = 60) -> list[Done]:
        """Waits until all have ended by themselves."""
        deadline = time.monotonic() + seconds
        done = []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                outputs = [self.output(one) + self.output(one, "err") for one in range(len(self.processes))]
                raise AssertionError(f"process {rank} did not end within {seconds:g} s: {outputs}") from None
            done.append(Done(rank, process.returncode, self.output(rank), errors(self.output(rank, "err"))))
        return done


@contextlib.contextmanager
def started(commands: Sequence[Sequence[object]], **environment: str) -> Iterator[Started]:
    """Starts commands side by side, each in its own session; they are killed at the end if they still run."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    # A process that crashes prints its stack.
    clean |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **environment}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = Started([], Path(folder))
        for rank, command in enumerate(commands):
            out, err = (stack.enter_context((running.folder / f"{rank}.{name}").open("wb")) for name in ("out", "err"))
            line = list(map(str, command))
            process = subprocess.Popen(line, stdout=out, stderr=err, env=clean, cwd=ROOT, start_new_session=True)
            stack.callback(_end, process)
            running.processes.append(process)
        yield running


def start(
    code: str,
    count: int = 2,
    *,
    devices: int = 1,
    flags: Mapping[str, Any] | None = None,
    **environment: str,
) -> contextlib.AbstractContextManager[Started]:
    """Starts a snippet, with the names of ``PRELUDE``, in ``count`` processes, which join.

    Each has ``devices`` CPU devices; ``flags`` are fields of ``ClusterOptions``, ``environment`` variables of all.
    """
    where = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": count, "start_timeout": 30.0}
    options = "".join(f", {name}={value!r}" for name, value in {**where, **(flags or {})}.items())
    body = f"with exit_on_user_error(), processes(ClusterOptions(**{{'process_id': rank}} | dict({options[2:]}))):\n"
    program = PRELUDE + body + textwrap.indent(textwrap.dedent(code).strip(), "    ")
    return started([[sys.executable, "-c", program, rank, count, devices] for rank in range(count)], **environment)


def run(code: str, count: int = 2, *, seconds: float = 60, **how: Any) -> list[Done]:
    """Runs a snippet in processes that have joined each other, to their end; see ``start``."""
    with start(code, count, **how) as running:
        return running.finish(seconds)


def free_port(first: int = 0, last: int = 0) -> int:
    """A free port of the loopback interface, in a range if one is given."""
    for port in random.sample(range(first, last + 1), last + 1 - first):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise AssertionError("no port is free")


def words(output: str) -> list[str]:
    """The lines that a process printed, without Gloo's and their remnants, which are numbers."""
    return [line for line in output.splitlines() if GLOO.sub("", line).strip(" 0123456789")]


def errors(output: str) -> str:
    """The standard error of a process, without messages about its machine."""
    return "".join(line for line in output.splitlines(keepends=True) if "cpu_feature_guard" not in line)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
