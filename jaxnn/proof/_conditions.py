"""Conditions under which `verify` runs an experiment again, to see which of them makes two processes equal."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

# What is changed in fresh processes, and what it shows if they are equal then; from the specific to the general.
REMEDIES = {
    "hash": "equal with PYTHONHASHSEED=0: something iterates over a set or hashes text",
    "generators": "equal with seeded generators: something draws from random or numpy.random without the config's seed",
    "clock": "equal with a stopped clock: something takes the time as a seed",
    "callbacks": "equal with host callbacks that return zeros: a callback returns other numbers in each run",
    "native": "equal with JAXNN_NATIVE=off: a native kernel computes other bits",
    "fault": "equal with the XLA_FLAGS of a known fault of jaxlib",
    "deterministic": "equal with deterministic=True: operations of the GPU add in any order",
    "core": "equal on one core: threads race",
    "augmentation": "equal without augmentation: an augmentation draws from something other than its key or rng",
}
# Variables that change how libraries compute, and are set for that.
_OF_LIBRARIES = ("JAX_", "XLA_", "JAXNN_", "CUDA_", "TF_", "OMP_", "MKL_", "PYTHON")
_STOPPED_AT = 1_600_000_000.0  # seconds


@contextlib.contextmanager
def changed(remedies: Sequence[str], callbacks: list[str]) -> Iterator[None]:
    """Changes conditions of this process within the block; ``callbacks`` gets the lines that make host callbacks."""

    def silent(callback: Any, shapes: Any, *arguments: Any, **options: Any) -> Any:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        callbacks.append(f"{Path(frame.f_back.f_code.co_filename).name}, line {frame.f_back.f_lineno}")
        return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(_STOPPED_AT, tz)

    make, patches = np.random.default_rng, list[Any]()
    if "generators" in remedies:
        random.seed(0)
        np.random.seed(0)
        patches += [mock.patch("numpy.random.default_rng", lambda seed=None: make(0 if seed is None else seed))]
    if "clock" in remedies:  # not the clocks that measure
        patches += [mock.patch("time.time", lambda: _STOPPED_AT)]
        patches += [
            mock.patch("time.time_ns", lambda: int(_STOPPED_AT * 1e9)),
            mock.patch("datetime.datetime", Stopped),
        ]
    if "callbacks" in remedies:
        patches += [mock.patch("jax.pure_callback", silent), mock.patch("jax.experimental.io_callback", silent)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def reads_noted(reads: set[str]) -> Iterator[None]:
    """Notes in ``reads`` the environment variables that code outside of installed packages reads in the block."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed += (str(Path(__file__).parent.parent), "<frozen")
    kind: Any = type(os.environ)

    class Noted(kind):
        def __getitem__(self, key: str) -> Any:
            frame = inspect.currentframe()
            while frame and frame.f_code.co_filename in (__file__, "<frozen os>", "<frozen _collections_abc>"):
                frame = frame.f_back
            if frame and not frame.f_code.co_filename.startswith(installed) and not key.startswith(_OF_LIBRARIES):
                reads.add(key)
            return super().__getitem__(key)

    os.environ.__class__ = Noted
    try:
        yield
    finally:
        os.environ.__class__ = kind
