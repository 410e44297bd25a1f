"""The data directory and downloads from a local server: a partial file never stays."""

import hashlib
import http.server
import threading

import pytest

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


def test_a_download_is_complete_and_logs_one_line(server, tmp_path, capsys):
    path = fetch("digits", "a.bin", [f"{server}/missing", f"{server}/good"], SHA256, tmp_path)
    assert path == tmp_path / "digits" / "a.bin"
    assert path.read_bytes() == BODY and path.stat().st_mode & 0o777 == 0o644
    assert files_below(tmp_path) == ["a.bin"]
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert f"{server}/missing" in output.err
    # Now that it exists, it is used unchecked and without the network.
    path.write_bytes(b"mine")
    assert fetch("digits", "a.bin", "http://127.0.0.1:1/", SHA256, tmp_path).read_bytes() == b"mine"
    assert capsys.readouterr().err == ""


def test_a_failed_download_is_reported_and_leaves_nothing(server, tmp_path):
    for urls, digest, reason in (
        ([f"{server}/truncated"], SHA256, "cut off"),
        ([f"{server}/missing", f"{server}/good"], "0" * 64, "status 404; .*another sha256"),
        (["http://127.0.0.1:1/a.bin"], SHA256, "connection failed, is there a network"),
    ):
        with pytest.raises(DataError, match=reason) as caught:
            fetch("digits", "a.bin", urls, digest, tmp_path)
        message = str(caught.value)
        assert all(part in message for part in ("a.bin", str(tmp_path / "digits"), *urls, "JAXNN_DATA"))
        assert "\n" not in message and files_below(tmp_path) == []
    (tmp_path / "letters").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be written there: "):
        fetch("letters", "a.bin", f"{server}/good", SHA256, tmp_path)


def test_data_dir_is_the_argument_else_the_environment_else_a_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXNN_DATA", str(tmp_path / "environment"))
    assert data_dir(tmp_path / "argument") == tmp_path / "argument"
    assert data_dir() == tmp_path / "environment"
    monkeypatch.delenv("JAXNN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir().name == "jaxnn" and tmp_path in data_dir().parents
    assert data_dir("~/sets") == tmp_path / "sets"
