"""Command lines as users run them: their error messages, and processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    how = {"env": {**os.environ, "PYTHONPATH": str(ROOT), **environment}, "cwd": ROOT, "timeout": timeout}
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **how)
