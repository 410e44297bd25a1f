"""The environment variables that processes find which are started meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets ``variables`` inside the block, for this process's children, and puts back what was there before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
