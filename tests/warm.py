"""Python processes that start with JAX, Flax and Optax imported: forks of a server in which no backend has started.

`start` is like `subprocess.Popen`. The server's child ends as any interpreter does: it leaves `serve` and runs its
program at the end of this module, which is the server's main one.
"""

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Read when the interpreter, JAX or XLA starts: with others than the server's, a process starts afresh.
AT_START = ("JAX_", "XLA_", "TF_", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONMALLOC", "LD_")
LEAST = 2**16  # bytes of a request that are read at once


class Program(NamedTuple):
    """What a process runs."""

    words: list[str]  # of the command line, after ``python``
    environment: dict[str, str]
    folder: str


class Warm:
    """A running process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, status: socket.socket) -> None:
        self.pid = int.from_bytes(status.recv(4))
        self.returncode: int | None = None
        status.setblocking(False)
        self._status = status

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                self.returncode = int(self._status.recv(16) or -signal.SIGKILL)
                self._status.close()
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("python", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    words: Sequence[object], environment: Mapping[str, str], folder: os.PathLike[str] | str, outputs: Sequence[int]
) -> Warm | subprocess.Popen[bytes]:
    """Starts ``python *words`` in a session of its own; ``outputs`` are the descriptors of its output and error.

    What the server cannot do, such as flags of the interpreter, a new interpreter does.
    """
    program = Program(list(map(str, words)), dict(environment), os.fspath(folder))
    server, known, _ = _server()
    own = {name: value for name, value in program.environment.items() if name.startswith(AT_START)}
    if own != known or (program.words[0].startswith("-") and program.words[0] not in ("-c", "-m")):
        out, err = outputs
        command = [sys.executable, *program.words]
        return subprocess.Popen(
            command, stdout=out, stderr=err, env=program.environment, cwd=program.folder, start_new_session=True
        )
    status, theirs = socket.socketpair()
    with theirs:
        request = json.dumps(program._asdict()).encode()
        socket.send_fds(server, [len(request).to_bytes(8)], [*outputs, theirs.fileno()])
        server.sendall(request)
    return Warm(status)


@functools.cache
def _server() -> tuple[socket.socket, dict[str, str], subprocess.Popen[bytes]]:
    """The connection to this process's server, the variables that it started with and that count, and its process."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def end() -> None:
        ours.close()
        process.kill()
        process.wait()

    atexit.register(end)
    return ours, {name: value for name, value in os.environ.items() if name.startswith(AT_START)}, process


def serve(connection: socket.socket) -> Program:
    """Forks a process for each request; returns in the new one."""
    while True:
        size, files, *_ = socket.recv_fds(connection, 8, 3)
        if not size:
            os._exit(0)
        text, length = b"", int.from_bytes(size)
        while len(text) < length:
            text += connection.recv(min(LEAST, length - len(text)))
        # A keeper waits for the process, so that the server can go on.
        if (keeper := os.fork()) == 0 and (child := os.fork()) == 0:
            connection.close()
            os.setsid()
            os.dup2(files[0], 1)
            os.dup2(files[1], 2)
            for file in files:
                os.close(file)
            return Program(**json.loads(text))
        if keeper == 0:
            status = socket.socket(fileno=files.pop())
            for file in files:
                os.close(file)
            status.sendall(child.to_bytes(4))
            status.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
            os._exit(0)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def prepare(program: Program) -> None:
    """Makes this process what a new interpreter would be before it runs ``program``."""
    first, *rest = program.words
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    sys.path[0] = os.path.dirname(os.path.abspath(first)) if not first.startswith("-") else os.getcwd()
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = [first, *rest[1:]] if first.startswith("-") else program.words
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


if __name__ == "__main__":
    import flax.linen  # noqa: F401
    import jax  # noqa: F401
    import optax  # noqa: F401

    program = serve(socket.socket(fileno=int(sys.argv[1])))
    prepare(program)
    match program.words:
        case "-c", code, *_:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        case "-m", module, *_:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case script, *_:
            runpy.run_path(script, run_name="__main__")
