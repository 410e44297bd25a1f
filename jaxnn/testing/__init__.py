"""Conformance of tasks, training steps, layers and searchers of a user's own with what jaxnn relies on.

`check_task`, `check_step` and `check_layer` compute the same in two ways that must agree: with `jax.jit` and without,
mapped over members and one after another, on two devices and on one, with padding and without. Call them in a test, or
once in a notebook, with a small model and a small batch: each check compiles a program or two. `check_searcher` runs a
search on learning curves that are known.

>>> jn.testing.check_task(task, batch)["vmap"]
'passed'
"""

from jaxnn.testing._agreement import ConformanceError
from jaxnn.testing._layer_checks import LAYER_CHECKS, check_layer
from jaxnn.testing._searcher_checks import SEARCHER_CHECKS, check_searcher
from jaxnn.testing._task_checks import STEP_CHECKS, TASK_CHECKS, check_step, check_task

__all__ = [
    "LAYER_CHECKS",
    "SEARCHER_CHECKS",
    "STEP_CHECKS",
    "TASK_CHECKS",
    "ConformanceError",
    "check_layer",
    "check_searcher",
    "check_step",
    "check_task",
]
