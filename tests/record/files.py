"""States to save, and the files of records: their bytes, their metrics without timings, and one changed bit."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import TrainState
from tests import tiny

TIMINGS = ("seconds", "steps_per_second", "examples_per_second", "elapsed")


def make_state(step: int = 0, width: int = 3) -> TrainState:
    """A state with narrow floats, NaN and a key."""
    params = {
        "kernel": np.full((2, width), 0.1 + step, np.float32),
        "bias": np.zeros(width, jnp.bfloat16),
        "square": np.arange(1024, dtype=np.float32).reshape(32, 32) + step,
    }
    opt_state = (np.int32(step), {}, {"mean": {**params, "kernel": np.full((2, width), np.nan, np.float32)}})
    return jax.device_put(TrainState(np.int32(step), params, {}, opt_state, jax.random.key(7)))


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def untimed(path: Path) -> list[dict[str, Any]]:
    """The reports of a record, without how long they took."""
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in tiny.lines(path)]


def flip(file: Path) -> None:
    """Changes one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
