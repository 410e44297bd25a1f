"""What goes over the connections between processes: messages of one line each, and bytes handed on as they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

# How long a connection may take to say what it is.
GREETING_SECONDS = 10.0
CHUNK_BYTES = 2**16


async def send(writer: asyncio.StreamWriter, kind: str, **fields: Any) -> None:
    """Sends one message; one whose reader is gone is lost, which that reader's silence tells."""
    with contextlib.suppress(ConnectionError):
        writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        await writer.drain()


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any] | None:
    """The next message; None at the end of the connection.

    Raises:
        TimeoutError: nothing came for ``seconds``.
    """
    async with asyncio.timeout(seconds):
        return parse(await line(reader))


async def line(reader: asyncio.StreamReader) -> bytes:
    """The next line; what there is of it at the end of the connection."""
    try:
        return await reader.readline()
    except (ConnectionError, ValueError):  # ValueError: longer than any message is
        return b""


def parse(text: bytes) -> dict[str, Any] | None:
    """A line as a message; None if it is none."""
    try:
        message = json.loads(text)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "kind" in message else None


async def serve(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], listening: socket.socket
) -> asyncio.Server:
    """Has ``handle`` called for every connection, which is closed afterwards."""

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A connection may break, or be silent, at any time. Python 3.12.1 reports each that is cut off at the end.
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            await handle(reader, writer)

    return await asyncio.start_server(handled, sock=listening)


async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until ``reader`` ends, and no further: ``writer`` stays open."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


async def connect(host: str, port: int, seconds: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects, trying again for ``seconds`` while nothing listens.

    Raises:
        OSError: nothing listened, or there is no such host, to the end.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            async with asyncio.timeout(max(0.1, deadline - loop.time())):
                return await asyncio.open_connection(host, port)
        except OSError:  # TimeoutError is one
            if loop.time() >= deadline:
                raise
            await asyncio.sleep(min(0.2, max(0.0, deadline - loop.time())))
