"""The data directory and downloads, against a server on this machine: nothing half-written stays."""

import hashlib
import http.server
import logging
import socket
import threading

import pytest

from jaxnn import data
from jaxnn.data import data_dir, fetch
from jaxnn.types import DataError

BODY = b"sixteen bytes ok" * 4096
SHA256 = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: len(BODY) // 2] if self.path == "/truncated" else BODY)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def files_below(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_a_good_file_is_downloaded_whole_and_told_in_one_line(server, tmp_path, capsys):
    path = fetch("digits", "a.bin", f"{server}/good", SHA256, tmp_path)
    assert path == tmp_path / "digits" / "a.bin"
    assert path.read_bytes() == BODY
    assert files_below(tmp_path) == ["a.bin"]
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert f"{server}/good" in output.err


def test_a_file_that_is_there_is_used_as_it_is_without_network(tmp_path, capsys):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "a.bin").write_bytes(b"mine")
    path = fetch("digits", "a.bin", "http://127.0.0.1:1/", SHA256, tmp_path)
    assert path.read_bytes() == b"mine"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("place", "sha256", "reason"),
    (("good", "0" * 64, "sha256"), ("truncated", SHA256, "broke off"), ("missing", SHA256, "HTTP status 404")),
)
def test_a_failed_download_is_one_sentence_and_leaves_nothing(server, tmp_path, place, sha256, reason):
    with pytest.raises(DataError) as caught:
        fetch("digits", "a.bin", f"{server}/{place}", sha256, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("a.bin", str(tmp_path / "digits"), reason, f"{server}/{place}", "JAXNN_DATA"):
        assert part in message
    assert files_below(tmp_path) == []


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_no_network_is_said_to_be_that(tmp_path):
    url = f"http://127.0.0.1:{unused_port()}/a.bin"
    with pytest.raises(DataError, match="connection failed, is there a network"):
        fetch("digits", "a.bin", url, SHA256, tmp_path)
    assert files_below(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_said_to_be_that(server, tmp_path):
    (tmp_path / "digits").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be written there: "):
        fetch("digits", "a.bin", f"{server}/good", SHA256, tmp_path)


def test_mirrors_are_tried_in_turn(server, tmp_path, capsys):
    urls = [f"{server}/missing", f"{server}/good"]
    assert fetch("digits", "a.bin", urls, SHA256, tmp_path).read_bytes() == BODY
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(DataError, match="HTTP status 404; .* sha256"):
        fetch("digits", "b.bin", urls, "0" * 64, tmp_path)


def test_poochs_logger_is_as_it_was(server, tmp_path):
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    fetch("digits", "a.bin", f"{server}/good", SHA256, tmp_path)
    assert pooch.get_logger().level == logging.WARNING
    pooch.get_logger().setLevel(logging.INFO)


def test_the_data_directory_is_the_argument_else_the_environment_else_a_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXNN_DATA", str(tmp_path / "environment"))
    assert data_dir(tmp_path / "argument") == tmp_path / "argument"
    assert data_dir() == tmp_path / "environment"
    monkeypatch.delenv("JAXNN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir().name == "jaxnn"
    assert tmp_path in data_dir().parents
    assert data_dir("~/sets") == tmp_path / "sets"


@pytest.mark.parametrize(
    "load", [data.mnist, data.cifar10, data.imdb, data.ag_news, data.sms_spam, data.ptb, data.cats_vs_dogs]
)
def test_a_data_directory_that_the_system_refuses_is_named(load, tmp_path):
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        load(data_dir=tmp_path / ("x" * 300))
