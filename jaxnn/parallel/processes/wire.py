"""What goes over the connections between processes: lines of JSON, each read as if a stranger had written it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
from typing import Any

# The environment variable with what all processes of a run know and strangers do not.
SECRET = "JAXNN_CLUSTER_SECRET"
# The longest line that is read; the longest text of another process that is printed.
LINE_BYTES = 2**14
PRINTED_CHARACTERS = 500
CHUNK_BYTES = 2**16


def send(writer: asyncio.StreamWriter, kind: str, **fields: Any) -> None:
    """Sends one message; it is lost if the other end is gone, which closes the connection."""
    if not writer.is_closing():
        writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any]:
    """The next message; empty at the end of the connection, and for anything that is no message.

    Raises:
        TimeoutError: no line was complete after ``seconds``.
    """
    try:
        async with asyncio.timeout(seconds):
            message = json.loads(await reader.readline())
    except (ConnectionError, ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def proof(nonce: str, message: dict[str, Any]) -> str:
    """What shows that the sender of ``message`` knows the secret; without one it shows nothing."""
    key = os.environ.get(SECRET, "").encode()
    return hmac.new(key, json.dumps([nonce, message], sort_keys=True).encode(), "sha256").hexdigest()


def clean(text: object) -> str:
    """What another process sent, on one line and without characters that a terminal obeys."""
    line = " ".join(str(text)[:PRINTED_CHARACTERS].split())
    return "".join(character if character.isprintable() else "?" for character in line)


async def forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Copies bytes both ways until ``reader`` ends; ``writer`` stays open until then, even if ``upstream`` ends."""
    with contextlib.closing(upstream[1]):
        back = asyncio.ensure_future(_copy(upstream[0], writer))
        try:
            await _copy(reader, upstream[1])
            while await reader.read(CHUNK_BYTES):
                pass
        finally:
            back.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
