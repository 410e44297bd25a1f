"""Process 0's end: calls the roll at the start, then watches the connections of all others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any

from jaxnn.parallel.processes import wire
from jaxnn.parallel.processes.ending import LOST, Ending, failed, gone
from jaxnn.parallel.processes.place import Place
from jaxnn.types import ConfigError, TrainingError

# How the first bytes of HTTP/2 begin, which JAX's coordination service speaks.
HTTP2 = b"PRI "
# What a process says of itself.
HELLO = {"kind", "rank", "host", "greeting"}


class Hub:
    """Where all other processes are connected to, and through which they reach JAX's coordination service.

    Args:
        place: process 0's.
        greeting: what all processes must agree on to start, by name, such as the version of JAX.
        ended: told how another process ended, unless all did.
    """

    def __init__(self, place: Place, greeting: dict[str, Any], ended: Callable[[Ending], None]) -> None:
        self._place, self._greeting, self._ended = place, greeting, ended
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._hosts = {0: socket.gethostname()}
        self._mistake: str | None = None
        self._decided = asyncio.Event()
        self._started = False
        self._done: set[int] = set()
        self._all_done = asyncio.Event()
        self._server: asyncio.Server | None = None
        # On this machine only: whoever else wants it comes through the hub.
        self._service_port = free_port()

    async def join(self) -> str:
        """Waits for all processes; where JAX's coordination service is to be started.

        Raises:
            ConfigError: the port is taken, or processes do not fit together.
            TrainingError: some did not start in time.
        """
        await self._listen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._place.start_timeout):
                await self._decided.wait()
        if self._mistake is None and (missing := self._missing()):
            self._mistake = missing_sentence(self._place, missing)
            await self._tell_all("refused", sentence=self._mistake, late=True)
            raise TrainingError(self._mistake)
        if self._mistake is not None:
            await self._tell_all("refused", sentence=self._mistake, late=False)
            raise ConfigError(self._mistake)
        self._started = True
        await self._tell_all("go")
        return f"127.0.0.1:{self._service_port}"

    async def finish(self) -> None:
        """Waits until all processes are done."""
        await self._is_done(0)
        await self._all_done.wait()

    async def fail(self, status: int, sentence: str) -> None:
        """Tells all others that this process ends."""
        await self._tell_all("ended", rank=0, status=status, sentence=failed(0, sentence))

    async def close(self) -> None:
        """Waits until the others have ended their connections."""
        while self._members:
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()

    async def _listen(self) -> None:
        try:
            # Both families where there are both, as the others may know this machine by either.
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listening = socket.create_server(("", self._place.port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise ConfigError(
                f"process 0 is to listen on port {self._place.port} of this machine, which {reason}: choose another "
                "port, or end what has this one."
            ) from None
        self._server = await wire.serve(self._serve, listening)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection from its first line to its end."""
        async with asyncio.timeout(wire.GREETING_SECONDS):
            first = await wire.line(reader)
        if first.startswith(HTTP2):
            await self._to_service(first, reader, writer)
        elif (hello := wire.parse(first)) is not None and HELLO <= hello.keys():
            await self._admit(hello, reader, writer)

    async def _to_service(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hands a connection on to JAX's coordination service, which starts about now."""
        down, up = await wire.connect("127.0.0.1", self._service_port, wire.GREETING_SECONDS)
        with contextlib.closing(up):
            up.write(first)
            back = asyncio.ensure_future(wire.hand_on(down, writer))
            await wire.hand_on(reader, up)
            back.cancel()

    async def _admit(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._started:
            # One that was started anew while this run ends: its turn comes.
            await wire.send(writer, "busy")
            return
        if (mistake := self._mistake_in(hello)) is not None:
            self._mistake = self._mistake or mistake
            await wire.send(writer, "refused", sentence=mistake, late=False)
            self._decided.set()
            return
        rank = hello["rank"]
        self._members[rank], self._hosts[rank] = writer, hello["host"]
        await self._roll_changed()
        beats = asyncio.ensure_future(self._beat(writer))
        try:
            await self._follow(rank, reader)
        finally:
            beats.cancel()

    def _mistake_in(self, hello: dict[str, Any]) -> str | None:
        rank, host = hello["rank"], hello["host"]
        for name, mine in self._greeting.items():
            if (its := hello["greeting"].get(name)) != mine:
                return (
                    f"process {rank} on {host} was started with {name} {its}, and process 0 with {name} {mine}: start "
                    "all alike."
                )
        if rank == 0 or rank in self._members:
            return (
                f"two processes say that they are process {rank}, on {self._hosts[rank]} and on {host}: give each a "
                "--process-id of its own."
            )
        return None

    async def _follow(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Hears a process to its end."""
        how = "its connection closed"
        try:
            while (message := await wire.receive(reader, self._place.lost_after)) is not None:
                if message["kind"] == "done":
                    await self._is_done(rank)
                elif message["kind"] == "failed":
                    await self._over(Ending(rank, message["status"], failed(rank, message["sentence"])))
        except TimeoutError:
            how = f"nothing was heard of it for {self._place.lost_after:g} s"
        del self._members[rank]
        if not self._started:
            await self._roll_changed()
        elif not self._all_done.is_set():
            await self._over(Ending(rank, LOST, gone(rank, self._hosts[rank], how)))

    async def _over(self, ending: Ending) -> None:
        self._ended(ending)
        await self._tell_all("ended", **ending._asdict())

    async def _is_done(self, rank: int) -> None:
        self._done.add(rank)
        if len(self._done) == self._place.num_processes:
            self._all_done.set()
            await self._tell_all("finished")

    async def _roll_changed(self) -> None:
        missing = self._missing()
        await self._tell_all("missing", ranks=missing)
        if not missing:
            self._decided.set()

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._place.num_processes) if rank not in self._members]

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(self._place.lost_after / 4)
            await wire.send(writer, "beat")

    async def _tell_all(self, kind: str, **fields: Any) -> None:
        for writer in list(self._members.values()):
            await wire.send(writer, kind, **fields)


def missing_sentence(place: Place, missing: list[int]) -> str:
    """Which processes did not start, after how long, as this process says it."""
    ranks = ", ".join(map(str, missing))
    which = f"process {ranks} of {place.num_processes} did" if len(missing) == 1 else f"processes {ranks} did"
    return (
        f"process {place.process_id} waited {place.start_timeout:g} s, and {which} not start: look at what they say, "
        f"whether they reach {place.coordinator}, and whether all {place.num_processes} were started (--start-timeout "
        "waits longer)."
    )


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
