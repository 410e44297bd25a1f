"""Processes call the roll: who joins, and who is refused and why."""

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

import jaxnn as jn
from jaxnn.parallel import Link, Place
from jaxnn.types import JaxnnError
from tests.processes import free_port


@contextlib.contextmanager
def links(*ranks: int, port: int = 0, count: int | None = None, seconds: float = 20.0) -> Iterator[list[Link]]:
    """The links of some processes of one run, in this process; closed at the end."""
    where = f"localhost:{port or free_port()}"
    found = [Link(Place(where, count or max(2, len(ranks)), rank, start_timeout=seconds)) for rank in ranks]
    try:
        yield found
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Link.close, found))


def join(*found: Link) -> list[Any]:
    """The address of JAX's service for each process, or the error that it gets."""

    def result(link: Link) -> Any:
        try:
            return link.join()
        except JaxnnError as error:
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(result, found))


def test_processes_that_do_not_fit_together_all_report_it(monkeypatch):
    with links(0, 2, count=4, seconds=0.5) as found:
        for error in join(*found):
            assert isinstance(error, jn.TrainingError) and "processes 1, 3 of 4 did not start: read" in str(error)
    with links(1, seconds=0.3) as found:
        (error,) = join(*found)
        assert isinstance(error, jn.TrainingError)
        assert "process 1 waited 0.3 s, and process 0 did not start: nothing answered at localhost" in str(error)
    with links(0, 1, 1) as found:
        assert sum("have --process-id 1: number them" in str(error) for error in join(*found)) >= 2
    port = free_port()
    with links(0, port=port) as first, links(1, port=port, count=3) as second:
        for error in join(*first, *second):
            assert isinstance(error, jn.ConfigError)
            assert "with --num-processes 3, and process 0 with --num-processes 2: use" in str(error)
    with links(0, port=port) as first, monkeypatch.context() as patched:
        patched.setattr(jax, "__version__", "0.0.1")
        with links(1, port=port) as second:
            for error in join(*first, *second):
                assert isinstance(error, jn.ConfigError) and "was started with jax 0.0.1, and process 0" in str(error)
    with socket.create_server(("localhost", 0)) as taken, links(0, port=taken.getsockname()[1]) as found:
        (error,) = join(*found)
        assert f"listen on port {taken.getsockname()[1]} of this machine, which is in use" in str(error)


def connect(port: int) -> socket.socket:
    """A connection to a process 0 that is about to listen, by a client that is no process of the run."""
    for _ in range(1000):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        time.sleep(0.02)
    raise AssertionError("nothing listens")


def send(port: int, content: bytes) -> None:
    with connect(port) as client, contextlib.suppress(OSError):
        client.sendall(content)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1000):
            pass


def greet(port: int, secret: str, kind: str) -> bytes:
    """Greets as a process would; the answer of process 0."""
    greeting = {"--num-processes": 2, "jax": jax.__version__}
    message = {"kind": kind, "rank": 1, "host": "node", "greeting": greeting}
    with connect(port) as client, client.makefile("rb") as lines, contextlib.suppress(OSError):
        signed = json.dumps([json.loads(lines.readline())["nonce"], message], sort_keys=True).encode()
        proof = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
        client.sendall(json.dumps({**message, "proof": proof}).encode() + b"\n")
        return lines.readline()
    return b""


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    b"\x00" * 1_000_000,
    b"[" * 10_000 + b"\n",
    b'{"kind": "join", "rank": 1, "host": 7, "greeting": [], "proof": {"a": "\\ud800"}}\n',
    b'{"kind": "jax", "proof": "\xc3\xa9\\ud800"}\n',
    b"",
]


def test_untrusted_clients_neither_end_nor_hang_a_run(monkeypatch):
    monkeypatch.setenv("JAXNN_CLUSTER_SECRET", "known to two")
    port = free_port()
    with links(0, 1, port=port) as found, contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        first = pool.submit(found[0].join)
        for content in GARBAGE:
            send(port, content)
        for kind in ("join", "jax"):
            assert greet(port, "guessed", kind) == b""
        hanging = [stack.enter_context(connect(port)) for _ in range(200)]
        for connection in hanging[:100]:  # as many hold a place until they time out
            connection.close()
        with pytest.raises(ConnectionRefusedError):  # only 127.0.0.1 is listened on
            socket.create_connection(("127.0.0.2", port))
        (second,) = join(found[1])
        assert first.result().startswith("127.0.0.1:") and second.startswith("127.0.0.1:")
        found[0].close_port()
        with pytest.raises(ConnectionRefusedError):
            for _ in range(2000):  # the port closes soon
                socket.create_connection(("127.0.0.1", port)).close()
                time.sleep(0.01)
        for link in found:
            link.leave()


def test_process_with_another_secret_is_not_admitted():
    def close_after_greeting(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as connection:
                    connection.sendall(b'{"kind": "nonce", "nonce": "0"}\n')
                    connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=close_after_greeting, args=(server,), daemon=True).start()
        with links(1, port=server.getsockname()[1], seconds=0.5) as found:
            (error,) = join(*found)
        server.shutdown(socket.SHUT_RDWR)
    assert isinstance(error, jn.TrainingError) and "a run with another JAXNN_CLUSTER_SECRET is at" in str(error)
