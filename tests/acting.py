"""A tiny experiment whose training split calls a function when the batches of one step are requested."""

from collections.abc import Callable
from typing import Any

import numpy as np

import jaxnn as jn
from tests import tiny


class Acting:
    """A split that calls ``action`` when the batches of ``step`` are requested."""

    def __init__(self, source: Any, step: int, action: Callable[[], object]) -> None:
        self._source, self._step, self._action = source, step, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def order(self, seed: Any, steps: Any, batch_size: int) -> Any:
        if self._step in np.asarray(steps):
            self._action()
        return self._source.order(seed, steps, batch_size)


def acting(step: int, action: Callable[[], object]) -> jn.Experiment[tiny.Config]:
    splits = tiny.splits()
    return tiny.experiment(data=splits._replace(train=Acting(splits.train, step, action)))
