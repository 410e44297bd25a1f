"""Command lines as users run them: their error messages, and processes."""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import warm

ROOT = Path(__file__).resolve().parent.parent


def fails(
    capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], Any], *arguments: object, status: int = 2
) -> str:
    """Returns the standard error of ``command``, in one line, after it failed on ``arguments`` with that status."""
    with pytest.raises(SystemExit) as caught:
        command(list(map(str, arguments)))
    said = capsys.readouterr()
    assert caught.value.code == status
    assert "Traceback" not in said.err and said.out == ""
    return " ".join(said.err.split())


def python(*words: object, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a separate process, from the repository, for at most ``timeout`` seconds."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = warm.start(words, variables, ROOT, (out.fileno(), err.fileno()))
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(["python", *map(str, words)], status, out.read(), err.read())
