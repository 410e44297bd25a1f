"""The private names of other libraries that jaxnn uses exist, and the messages that it silences are silent."""

import importlib
import logging
import os
import sys
import types
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn import _compat
from tests import processes


def test_private_name_of_orbax_exists_and_is_optional(tmp_path, monkeypatch):
    """If this fails, find how Orbax now counts the bytes that TensorStore wrote: that leaks 16 KiB per checkpoint."""
    utilities = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
    assert hasattr(utilities, "get_tensorstore_raw_bytes")
    jn.save_checkpoint(tmp_path / "state", {"w": np.arange(3.0)})
    assert utilities.get_tensorstore_raw_bytes() == 0
    monkeypatch.setitem(sys.modules, "orbax.checkpoint._src.serialization.tensorstore_utils", None)
    jn.save_checkpoint(tmp_path / "without", {"w": np.arange(3.0)})
    assert jn.load_checkpoint(tmp_path / "without")["w"].tolist() == [0, 1, 2]


def test_missing_private_names_of_jax_are_named(monkeypatch):
    assert _compat.coordination_client() is None
    for name in [name for name in os.environ if name.startswith(processes.FOREIGN)]:
        monkeypatch.delenv(name)
    assert _compat.detect_cluster(1) == (None, None, None)
    for module, call in (("distributed", _compat.coordination_client), ("clusters", lambda: _compat.detect_cluster(1))):
        monkeypatch.setitem(sys.modules, f"jax._src.{module}", None)
        with pytest.raises(jn.ConfigError, match=r"several processes do not work with jax .*: install jax"):
            call()


def test_writes_of_orbax_that_fail_together_are_reported_once(tmp_path, caplog, monkeypatch):
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
    assert reported == others, "errors of others must be reported, and once"
    asyncio_log = logging.getLogger("asyncio")
    for path in ("/site-packages/orbax/checkpoint/x.py", "/home/me/mine.py"):
        try:
            exec(compile("raise OSError(28, 'No space left on device')", path, "exec"))
        except OSError as error:
            asyncio_log.error(f"never retrieved: {path}", exc_info=error)
    # As in a future of TensorStore that is never awaited: the error has no traceback.
    refused = ValueError("Failed to write 211 bytes: No space left on device [tensorstore_spec='{}']")
    asyncio_log.error("never retrieved", exc_info=(ValueError, refused, None))
    asyncio_log.error("without an error")
    messages = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert messages == ["never retrieved: /home/me/mine.py", "without an error"]
