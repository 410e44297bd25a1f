"""The arrays that an experiment starts from: matched with those of its state by path."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn.types import ConfigError, Experiment, PyTree, TrainState


class Start(NamedTuple):
    """Arrays to start from, by path in ``params`` and ``model_state``, and how they match a state."""

    arrays: Mapping[str, np.ndarray]  # those that are taken
    new: tuple[str, ...] = ()  # parameters that are drawn
    unused: tuple[str, ...] = ()  # given, and not in the state
    fingerprint: str | None = None  # a digest of those taken

    def __str__(self) -> str:
        parts = [f"{len(self.arrays)} arrays given ({self.fingerprint})"]
        for names, what in ((self.new, "drawn"), (self.unused, "given and unused")):
            if names:
                shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
                parts.append(f"{len(names)} {what}: {shown}")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """The matches, for a record."""
        return {"fingerprint": self.fingerprint, "taken": [*self.arrays], "new": self.new, "unused": self.unused}


def find_start(experiment: Experiment[Any], shapes: TrainState) -> Start:
    """Loads what ``experiment.params`` returns and matches it with a state of ``shapes``.

    ConfigError if nothing matches, or an array has another shape than the state's. A parameter that `tasks.freeze`
    keeps in the model state has the path that it had before.
    """
    if experiment.params is None:
        return Start({})
    made = experiment.params(experiment.config)
    if isinstance(made, TrainState):
        given = _named({"params": made.params, "model_state": made.model_state})
    else:
        given = _named({"params": made})
    state = _named({"params": shapes.params, "model_state": shapes.model_state})
    places = {name.replace("model_state/frozen/", "params/", 1): name for name in state}
    places |= {name: name for name in state}
    arrays, unused = {}, []
    for name, array in given.items():
        if name not in places:
            unused.append(name)
            continue
        place = places[name]
        if (shape := np.shape(array)) != state[place].shape:
            raise ConfigError(
                f"the experiment's params have {name} {list(shape)}, and the task {list(state[place].shape)}: leave it "
                "out to draw it anew, or change the model."
            )
        arrays[place] = np.asarray(array)
    if not arrays:
        known = next(iter(state), "nothing")
        raise ConfigError(
            f"no array of the experiment's params is in the task's: it has {known}, and given is "
            f"{next(iter(given), 'nothing')}."
        )
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    new = tuple(name for name in state if name not in arrays and name.startswith(("params/", "model_state/frozen/")))
    return Start(arrays, new, tuple(unused), digest.hexdigest()[:16])


def _named(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(tree)}
