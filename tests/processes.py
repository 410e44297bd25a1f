"""Runs of several processes on this machine: started over the loopback, and always ended."""

from __future__ import annotations

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

# What of a cluster, or for JAX, may be in the environment that tests run in.
FOREIGN = ("SLURM_", "OMPI_", "KUBERNETES_", "JAX_", "XLA_", "TPU_", "JAXNN_CLUSTER_")
# The pieces in which Gloo says that it is connected; its threads, one a device, put theirs between each other's.
GLOO = re.compile(r"\d*(\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of [a-z ]+ is : )\d*")
# What a snippet finds: its rank, and a sum over the devices of all processes, waited for or only started.
PRELUDE = """
import functools, os, signal, sys, time
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import jaxnn as jn
from jaxnn.cli import ClusterOptions, exit_on_user_error, processes
from jaxnn.parallel import *

rank, count = int(sys.argv[1]), int(sys.argv[2])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))

@functools.cache
def adding():
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    spread, same = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda values: values.sum(), out_shardings=same), spread

def begin(value):
    add, spread = adding()
    mine = np.full(jax.local_device_count(), value, np.float32)
    return add(jax.make_array_from_process_local_data(spread, mine))

def total(value):
    return float(begin(value))

def say(*words):
    print(*words, flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Done:
    """A process that has ended: its exit status, negative for a signal, and its output."""

    rank: int
    status: int
    out: str
    err: str
    seconds: float


@dataclasses.dataclass
class Started:
    """Processes that may be running."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    since: float = dataclasses.field(default_factory=time.monotonic)

    def said(self, rank: int, stream: str = "out") -> str:
        return (self.folder / f"{rank}.{stream}").read_text()

    def wait_for(self, text: str, ranks: Sequence[int] | None = None, seconds: float = 60) -> None:
        """Waits until each of ``ranks``, default all, has printed ``text``."""
        deadline = time.monotonic() + seconds
        for rank in range(len(self.processes)) if ranks is None else ranks:
            while text not in self.said(rank):
                told = f"process {rank} did not say {text!r}: {self.said(rank)}{self.said(rank, 'err')}"
                assert time.monotonic() < deadline and self.processes[rank].poll() is None, told
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
                said = "\n".join(self.said(other) + self.said(other, "err") for other in range(len(self.processes)))
                raise AssertionError(f"process {rank} did not end within {seconds:g} s: {said}") from None
            took = time.monotonic() - self.since
            done.append(Done(rank, process.returncode, self.said(rank), errors(self.said(rank, "err")), took))
        return done


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[object]], *variables: Mapping[str, str], **environment: str
) -> Iterator[Started]:
    """Starts commands side by side, each in a session of its own; what is left of them is killed at the end.

    Args:
        commands: of each process.
        *variables: of each process, if they differ.
        **environment: of all processes.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    # A process that crashes prints its stack.
    clean |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **environment}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = Started([], Path(folder))
        for rank, command in enumerate(commands):
            out, err = (stack.enter_context((running.folder / f"{rank}.{name}").open("wb")) for name in ("out", "err"))
            own = clean | dict(variables[rank] if variables else {})
            words = list(map(str, command))
            process = subprocess.Popen(words, stdout=out, stderr=err, env=own, cwd=ROOT, start_new_session=True)
            stack.callback(_end, process)
            running.processes.append(process)
        yield running


def start(
    code: str,
    count: int = 2,
    *,
    devices: int = 1,
    ranks: Sequence[int] | None = None,
    flags: Mapping[str, Any] | None = None,
    variables: Sequence[Mapping[str, str]] = (),
    before: str = "",
    **environment: str,
) -> contextlib.AbstractContextManager[Started]:
    """Starts a snippet in ``count`` processes that have joined each other.

    Args:
        code: what each does once it has joined; ``rank``, ``count``, ``total`` and ``say`` are there.
        count: how many processes there are to be.
        devices: how many CPU devices each has.
        ranks: those that are started; default: all.
        flags: fields of ``ClusterOptions``, beside or instead of where process 0 is.
        variables: of each process, if they differ.
        before: what each does before it joins.
        **environment: variables of all.
    """
    where = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": count, "start_timeout": 30.0}
    options = "".join(f", {name}={value!r}" for name, value in {**where, **(flags or {})}.items())
    body = f"with exit_on_user_error(), processes(ClusterOptions(**{{'process_id': rank}} | dict({options[2:]}))):\n"
    program = PRELUDE + before + body + textwrap.indent(textwrap.dedent(code).strip(), "    ")
    return started(
        [[sys.executable, "-c", program, rank, count, devices] for rank in (range(count) if ranks is None else ranks)],
        *variables,
        **environment,
    )


def run(code: str, count: int = 2, *, seconds: float = 60, **how: Any) -> list[Done]:
    """Runs a snippet in processes that have joined each other, to their end; see ``start``."""
    with start(code, count, **how) as running:
        return running.finish(seconds)


def free_port(first: int = 0, last: int = 0) -> int:
    """A port of the loopback interface that is free now; of a range, if one is given."""
    for port in random.sample(range(first, last + 1), last + 1 - first):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise AssertionError("no port is free")


def words(said: str) -> list[str]:
    """The lines that a process printed, without Gloo's and what is left of those: numbers alone."""
    return [line for line in said.splitlines() if GLOO.sub("", line).strip(" 0123456789")]


def errors(said: str) -> str:
    """A process's standard error, without lines that depend on the machine."""
    return "".join(line for line in said.splitlines(keepends=True) if "cpu_feature_guard" not in line)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
