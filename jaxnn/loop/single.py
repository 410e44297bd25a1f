"""A state that the user saves by hand, in one process or in all of a run."""

from __future__ import annotations

from pathlib import Path

from jaxnn import checkpoints
from jaxnn.loop.saving import the_team
from jaxnn.types import PyTree


def save(path: Path | str, state: PyTree) -> None:
    """Writes any pytree of arrays to the new directory ``path``, complete or not at all.

    In a run of several processes all of them call it, with arrays of all their devices or NumPy's; process 0 writes
    these, and gives the directory its name.

    Raises:
        RecordError: ``path`` exists already or cannot be written; ``state`` is one bare array or holds none, or holds
            arrays of one process where there are several.
    """
    checkpoints.save(path, state, the_team())
