"""What jaxnn uses of other libraries' private modules is still there, and what it silences is silent."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn


def test_private_name_of_orbax_is_still_there(tmp_path: Path) -> None:
    """If this fails, find out how Orbax counts what TensorStore wrote now: asking leaks 16 KiB a checkpoint."""
    utilities = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
    assert hasattr(utilities, "get_tensorstore_raw_bytes")
    jn.save_checkpoint(tmp_path / "state", {"w": np.arange(3.0)})
    assert utilities.get_tensorstore_raw_bytes() == 0


def test_saving_works_without_the_private_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint._src.serialization.tensorstore_utils", None)
    jn.save_checkpoint(tmp_path / "state", {"w": np.arange(3.0)})
    assert jn.load_checkpoint(tmp_path / "state")["w"].tolist() == [0, 1, 2]


def failing_in(path: str) -> OSError:
    """An error raised by code in the file ``path``."""
    try:
        exec(compile("raise OSError(28, 'No space left on device')", path, "exec"))
    except OSError as error:
        return error
    raise AssertionError


def test_writes_of_orbax_that_fail_together_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    for name in ("a", "b"):
        jn.save_checkpoint(tmp_path / name, {"w": np.arange(3.0)})
    closed = types.SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
    others = [
        types.SimpleNamespace(object=None, exc_value=RuntimeError("mine")),
        types.SimpleNamespace(object=print, exc_value=RuntimeError("Event loop is closed")),
    ]
    for unraisable in (closed, *others):
        sys.unraisablehook(unraisable)  # type: ignore[arg-type]
    assert reported == others, "what is not Orbax's must be reported, and once"
    asyncio_log = logging.getLogger("asyncio")
    for place in ("/site-packages/orbax/checkpoint/x.py", "/home/me/mine.py"):
        asyncio_log.error("Future exception was never retrieved", exc_info=failing_in(place))
    # As a future of TensorStore's that no one awaited has it: raised nowhere.
    refused = ValueError("Failed to write 211 bytes: No space left on device [tensorstore_spec='{}']")
    asyncio_log.error("Future exception was never retrieved", exc_info=(ValueError, refused, None))
    asyncio_log.error("without an error")
    (own, without) = [record for record in caplog.records if record.name == "asyncio"]
    assert own.exc_info is not None and without.exc_info is None
    assert traceback.extract_tb(own.exc_info[2])[-1].filename == "/home/me/mine.py"
