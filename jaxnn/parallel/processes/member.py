"""The end of every process but process 0: answers the roll, watches process 0, and stands between JAX and it.

JAX's client ends its process from C++ the moment the connection to its service closes. So it is connected to a socket
of this process, and the bytes are handed on: when process 0 dies, JAX's client hears nothing, and there is time to say
what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from jaxnn.parallel.processes import wire
from jaxnn.parallel.processes.ending import LOST, Ending, gone
from jaxnn.parallel.processes.hub import missing_sentence
from jaxnn.parallel.processes.place import Place
from jaxnn.types import ConfigError, TrainingError

# Process 0 says who is missing when its time is over; who started a little earlier waits so much longer for that.
GRACE_SECONDS = 5.0


class Member:
    """A process's connection to process 0.

    Args:
        place: the process's.
        greeting: what all processes must agree on to start.
        ended: told how another process ended, unless all did.
    """

    def __init__(self, place: Place, greeting: dict[str, Any], ended: Callable[[Ending], None]) -> None:
        self._place, self._greeting, self._ended = place, greeting, ended
        self._finished = asyncio.Event()
        self._missing: list[int] = []
        self._why = "nothing answered"
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    async def join(self) -> str:
        """Waits for all processes; where this one reaches JAX's coordination service.

        Raises:
            ConfigError: processes do not fit together.
            TrainingError: some did not start in time.
        """
        try:
            async with asyncio.timeout(self._place.start_timeout + GRACE_SECONDS):
                reader = await self._connected()
        except (TimeoutError, OSError) as error:
            raise TrainingError(self._nobody(error)) from None
        self._watching = asyncio.ensure_future(self._watch(reader))
        listening = socket.create_server(("127.0.0.1", 0))
        self._server = await wire.serve(self._relay, listening)
        return f"127.0.0.1:{listening.getsockname()[1]}"

    async def finish(self) -> None:
        """Waits until all processes are done."""
        await wire.send(self._connection, "done")
        await self._finished.wait()

    async def fail(self, status: int, sentence: str) -> None:
        """Tells all others that this process ends."""
        await wire.send(self._connection, "failed", status=status, sentence=sentence)

    async def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
        await self._connection.wait_closed()

    def stop(self) -> None:
        """Drops the connection, and listens no more."""
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.close()

    @property
    def _connection(self) -> asyncio.StreamWriter:
        assert self._writer is not None
        return self._writer

    async def _connected(self) -> asyncio.StreamReader:
        """Answers the roll until it is complete, with the run that begins, not with one that is ending."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._place.start_timeout
        while True:
            reader, self._writer = await wire.connect(self._place.host, self._place.port, deadline - loop.time())
            await wire.send(
                self._writer,
                "hello",
                rank=self._place.process_id,
                host=socket.gethostname(),
                greeting=self._greeting,
            )
            if await self._answered(reader):
                return reader
            self._writer.close()
            if loop.time() >= deadline:
                raise TimeoutError
            await asyncio.sleep(0.2)

    async def _answered(self, reader: asyncio.StreamReader) -> bool:
        """Whether the roll is complete; False: to be tried again."""
        self._missing = []
        self._beats = asyncio.ensure_future(self._beat())
        with contextlib.suppress(TimeoutError):
            while (message := await wire.receive(reader, self._place.lost_after)) is not None:
                match message["kind"]:
                    case "missing":
                        self._missing = message["ranks"]
                    case "refused":
                        raise (TrainingError if message["late"] else ConfigError)(message["sentence"])
                    case "go":
                        return True
                    case "busy":
                        self._why = "a run that has not ended is"
                        break
        self._beats.cancel()
        return False

    def _nobody(self, error: OSError) -> str:
        """Who is missing, as far as this process knows."""
        if self._missing:
            return missing_sentence(self._place, self._missing)
        why = "there is no such host as in" if isinstance(error, socket.gaierror) else f"{self._why} at"
        return (
            f"process {self._place.process_id} waited {self._place.start_timeout:g} s, and process 0 did not start: "
            f"{why} {self._place.coordinator}; look at what it says, and whether it runs there (--start-timeout "
            "waits longer)."
        )

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        how = "its connection closed"
        try:
            while (message := await wire.receive(reader, self._place.lost_after)) is not None:
                if message["kind"] == "finished":
                    self._finished.set()
                elif message["kind"] == "ended":
                    self._ended(Ending(message["rank"], message["status"], message["sentence"]))
        except TimeoutError:
            how = f"nothing was heard of it for {self._place.lost_after:g} s"
        self._beats.cancel()
        if not self._finished.is_set():
            self._ended(Ending(0, LOST, gone(0, self._place.host, how)))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._place.lost_after / 4)
            await wire.send(self._connection, "beat")

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hands on what JAX's client and the service say; the client does not hear the service end."""
        down, up = await wire.connect(self._place.host, self._place.port, wire.GREETING_SECONDS)
        with contextlib.closing(up):
            back = asyncio.ensure_future(wire.hand_on(down, writer))
            await wire.hand_on(reader, up)
            # Where process 0 is gone JAX's client may say more, to nobody.
            while await reader.read(wire.CHUNK_BYTES):
                pass
            back.cancel()
