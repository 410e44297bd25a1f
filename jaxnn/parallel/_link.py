"""Connections of every process to process 0, for the roll call at the start and the report of an early end.

JAX's client ends its process from C++ as soon as its connection to process 0 closes. So it connects to a local socket,
which forwards its bytes and stays open when process 0 is gone. JAX's coordination service listens on the loopback
interface; the port of process 0 forwards to it for clients that know the secret, and closes once all have joined.
Messages are lines of JSON, and none is trusted.
"""

import asyncio
import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Coroutine
from typing import Any, NamedTuple

import jax

from jaxnn._signals import RESUMABLE
from jaxnn.parallel._place import Place, interfaces
from jaxnn.types import ConfigError, TrainingError, printable

SECRET = "JAXNN_CLUSTER_SECRET"  # the environment variable with a secret that all processes of a run share
# For the main thread to end after another process has: a collective of CPUs fails at once, one of GPUs may wait.
GRACE_SECONDS = 10.0
VERDICT_SECONDS = 5.0  # how much longer than process 0, which reports who is missing, the others wait
GREETING_SECONDS = 10.0  # for a connection to prove that it belongs to the run
MOST_GREETINGS = 128  # connections that may be doing so
LINE_BYTES = 2**14  # of a message
PRINTED_CHARACTERS = 500  # of a text of another process
CHUNK_BYTES = 2**16  # forwarded at once

type Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Ending(NamedTuple):
    """The early end of one process: the exit status of the others, and the reason."""

    status: int
    message: str


class Link:
    """The connections of this process to the others, in a thread."""

    def __init__(self, place: Place) -> None:
        # The fix in the error message about a lost process.
        self.resume_hint = "what was saved before is intact: resume with --resume and the directory of the run"
        self._place = place
        self._greeting = {"--num-processes": place.num_processes, "jax": jax.__version__}
        # In process 0 one for each other process, in the others one of rank 0.
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._hosts = {0: socket.gethostname() if place.process_id == 0 else place.host}
        self._server: asyncio.Server | None = None
        self._started = self._leaving = False
        self._left: set[int] = set()
        self._greetings = asyncio.Semaphore(MOST_GREETINGS)
        self._ending: Ending | None = None
        self._has_ending, self._reported = threading.Event(), threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._verdict: asyncio.Future[str | None] = self._loop.create_future()
        # A daemon, which does not keep the process alive.
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()

    def join(self) -> str:
        """Waits until all processes have started; returns the local address of JAX's coordination service."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(self._place.lost_after / 4)
                await self._broadcast("beat")

        async def join() -> str:
            self._beating = asyncio.ensure_future(beat())
            return await (self._lead() if self._place.process_id == 0 else self._follow())

        return self._call(join())

    def ending(self, seconds: float = 0.0) -> Ending | None:
        """The first early end, if one is known within ``seconds``."""
        self._has_ending.wait(seconds)
        return self._ending

    def close_port(self) -> None:
        """Accepts no more connections, once all processes and their JAX clients have joined."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.close)

    def leave(self) -> None:
        """Announces to the others that this process is done and will close its connection."""
        self._leaving = True
        self._call(self._broadcast("leaving"))

    def fail(self, status: int, message: str) -> None:
        """Announces to the others that this process ends with ``status``, and ensures it."""
        self._loop.call_soon_threadsafe(self._loop.call_later, GRACE_SECONDS, os._exit, status)
        rank = self._place.process_id
        self._call(self._broadcast("ended", status=status, message=f"process {rank} failed: {message}"))

    def report(self, ending: Ending) -> bool:
        """Prints once, on standard error, why this process ends; returns whether it was printed now."""
        if not self._reported.acquire(blocking=False):
            return False
        hint = f": {self.resume_hint}" if ending.status == RESUMABLE else ""
        # The reader of standard error may have ended.
        with contextlib.suppress(OSError):
            os.write(2, f"error: {clean(ending.message)}{hint}.\n".encode())
        return True

    def close(self) -> None:
        """Ends the connections; process 0 waits until the others have ended theirs."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    # Process 0.

    async def _lead(self) -> str:
        """Waits for all others, and announces to them whether the run starts."""
        place, late = self._place, False
        try:
            hosts = interfaces(place.host)
            self._server = await asyncio.start_server(self._accept, hosts, place.port, limit=LINE_BYTES)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise ConfigError(
                f"process 0 cannot listen on port {place.port} of this machine, which {reason}: choose another port."
            ) from None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._service_port = free.getsockname()[1]
        try:
            async with asyncio.timeout(place.start_timeout):
                refusal = await self._verdict
        except TimeoutError:
            late, missing = True, [rank for rank in range(1, place.num_processes) if rank not in self._writers]
            refusal = (
                f"process 0 waited {place.start_timeout:g} s, and process{'es' * (len(missing) > 1)} "
                f"{', '.join(map(str, missing))} of {place.num_processes} did not start: read "
                f"{'their' if len(missing) > 1 else 'its'} output, and check that {place.coordinator} can be reached "
                f"from there and {SECRET} is the same (--start-timeout waits longer)."
            )
        if refusal is not None:
            await self._broadcast("refused", message=refusal, late=late)
            raise (TrainingError if late else ConfigError)(refusal)
        self._started = True
        await self._broadcast("go")
        return f"127.0.0.1:{self._service_port}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection to its end."""
        # A connection may break at any time. Python 3.12.1 reports each one that is cancelled at the end.
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            if self._greetings.locked():
                return
            async with self._greetings:
                nonce = secrets.token_hex(16)
                send(writer, "nonce", nonce=nonce)
                hello = await receive(reader, GREETING_SECONDS)
            given = str(hello.pop("proof", "")).encode(errors="replace")
            if not hmac.compare_digest(given, proof(nonce, hello).encode()):
                return
            if hello.get("kind") == "jax" and self._started:
                await forward(reader, writer, await self._service())
            elif hello.get("kind") == "join" and not self._started:
                await self._admit(hello, reader, writer)

    async def _service(self) -> Connection:
        """A connection to JAX's coordination service, which may be about to start."""
        async with asyncio.timeout(self._place.start_timeout):
            while True:
                with contextlib.suppress(ConnectionError):
                    return await asyncio.open_connection("127.0.0.1", self._service_port)
                await asyncio.sleep(0.05)

    async def _admit(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, host, greeting = hello.get("rank"), clean(hello.get("host")), hello.get("greeting")
        if not isinstance(rank, int) or not isinstance(greeting, dict):
            return
        mistake = None
        if different := [name for name, mine in self._greeting.items() if greeting.get(name) != mine]:
            name = different[0]
            theirs, mine = (f"{name} {clean(values.get(name))}" for values in (greeting, self._greeting))
            mistake = f"process {rank} on {host} was started with {theirs}, and process 0 with {mine}: use the same."
        elif rank == 0 or rank in self._writers:
            mistake = (
                f"two processes, on {self._hosts[rank]} and on {host}, have --process-id {rank}: number them from 0."
            )
        elif 0 < rank < self._place.num_processes:
            self._writers[rank], self._hosts[rank] = writer, host
        if mistake is not None:
            send(writer, "refused", message=mistake, late=False)
        complete = len(self._writers) == self._place.num_processes - 1
        if (mistake is not None or complete) and not self._verdict.done():
            self._verdict.set_result(mistake)
        if self._writers.get(rank) is writer:
            await self._watch(rank, reader)

    # The others.

    async def _follow(self) -> str:
        """Answers the roll call of the run that starts, not of an earlier one that is ending."""
        place, why = self._place, "nothing answered at"
        deadline = self._loop.time() + place.start_timeout
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline + VERDICT_SECONDS):
                while self._loop.time() < deadline:
                    try:
                        rank, host = place.process_id, socket.gethostname()
                        reader, writer = await self._open("join", rank=rank, host=host, greeting=self._greeting)
                        self._writers[0] = writer
                        why = f"a run with another {SECRET} is at"
                        while (message := await receive(reader, place.lost_after)).get("kind") == "beat":
                            pass
                        if message.get("kind") == "refused":
                            raise (TrainingError if message.get("late") else ConfigError)(clean(message.get("message")))
                        if message.get("kind") == "go":
                            self._started = True
                            self._watching = asyncio.ensure_future(self._watch(0, reader))
                            self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
                            return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
                        writer.close()
                    except socket.gaierror:
                        why = "there is no such host as in"
                    except OSError:
                        pass
                    await asyncio.sleep(0.2)
        raise TrainingError(
            f"process {place.process_id} waited {place.start_timeout:g} s, and process 0 did not start: {why} "
            f"{place.coordinator}; read its output, and check that it runs there (--start-timeout waits longer)."
        )

    async def _open(self, kind: str, **fields: Any) -> Connection:
        """An authenticated connection to process 0."""
        async with asyncio.timeout(GREETING_SECONDS):
            reader, writer = await asyncio.open_connection(self._place.host, self._place.port, limit=LINE_BYTES)
        try:
            nonce = (await receive(reader, GREETING_SECONDS)).get("nonce")
            if nonce is None:
                raise ConnectionError
            send(writer, kind, **fields, proof=proof(nonce, {"kind": kind, **fields}))
        except OSError:
            writer.close()
            raise
        return reader, writer

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection of this process's JAX client."""
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            await forward(reader, writer, await self._open("jax"))

    # All.

    async def _watch(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Receives the messages of another process until it ends."""
        how = "its connection closed"
        try:
            while message := await receive(reader, self._place.lost_after):
                if message.get("kind") == "leaving":
                    self._left.add(rank)
                elif message.get("kind") == "ended":
                    await self._note(message.get("status"), message.get("message"))
        except TimeoutError:
            how = f"nothing was heard of it for {self._place.lost_after:g} s"
        del self._writers[rank]
        if self._started and not self._leaving and rank not in self._left:
            await self._note(RESUMABLE, f"process {rank} on {self._hosts[rank]} is gone ({how})")

    async def _note(self, status: object, message: object) -> None:
        """Keeps the first early end; process 0 announces it to all others."""
        if self._ending is None and isinstance(status, int):
            self._ending = Ending(status & 0xFF, clean(message))
            self._loop.call_later(GRACE_SECONDS, self._end, self._ending)
            # First, since the main thread may end this process as soon as the event is set.
            if self._place.process_id == 0:
                await self._broadcast("ended", **self._ending._asdict())
            self._has_ending.set()

    def _end(self, ending: Ending) -> None:
        """Ends this process although its main thread may wait forever."""
        try:
            if self.report(ending):
                # Flushing takes a second at most, since the main thread may hold the lock of the stream.
                flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
                flushing.start()
                flushing.join(1.0)
        finally:
            os._exit(ending.status)

    async def _broadcast(self, kind: str, **fields: Any) -> None:
        for writer in self._writers.values():
            send(writer, kind, **fields)

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                while self._started and self._place.process_id == 0 and self._writers:
                    await asyncio.sleep(0.01)
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Closed connections end in the next turn of the loop.
        await asyncio.sleep(0)

    def _call[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs ``coroutine`` in the thread and returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def send(writer: asyncio.StreamWriter, kind: str, **fields: Any) -> None:
    """Sends one message, which is lost if the connection is closed."""
    if not writer.is_closing():
        writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any]:
    """Receives the next message, empty if it is invalid or the connection ended; TimeoutError after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            message = json.loads(await reader.readline())
    except (ConnectionError, ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def proof(nonce: str, message: dict[str, Any]) -> str:
    """Proves that the sender of ``message`` knows the secret, if there is one."""
    key = os.environ.get(SECRET, "").encode()
    return hmac.new(key, json.dumps([nonce, message], sort_keys=True).encode(), "sha256").hexdigest()


def clean(text: object) -> str:
    """A text of another process, shortened, on one line and without control characters."""
    return printable(" ".join(str(text)[:PRINTED_CHARACTERS].split()), lines=False)


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: Connection) -> None:
    """Copies bytes both ways until ``reader`` ends, even if ``upstream`` ends before."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(CHUNK_BYTES):
                target.write(data)
                await target.drain()

    with contextlib.closing(upstream[1]):
        back = asyncio.ensure_future(copy(upstream[0], writer))
        try:
            await copy(reader, upstream[1])
            while await reader.read(CHUNK_BYTES):
                pass
        finally:
            back.cancel()
