"""Where the time of one training step goes: the call, the forward pass, the backward pass, the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxnn.loop import Programs, make_feed, make_step
from jaxnn.observe import Clock, Ledger
from jaxnn.parallel import computing_on
from jaxnn.sweeps import try_size
from jaxnn.types import Batch, Experiment, Splits


class StepParts(NamedTuple):
    """The seconds of one step that is a call of its own, on a batch that lies on the device.

    Attributes:
        call: what a call costs that computes next to nothing.
        forward: from the batch to the loss.
        backward: from the loss to the gradient of all parameters.
        update: from the gradient to the next state.
    """

    call: float
    forward: float
    backward: float
    update: float

    @property
    def step(self) -> float:
        """All of it."""
        return sum(self)

    def shares(self) -> dict[str, float]:
        """Each part's share of the step."""
        return {name: value / self.step for name, value in self._asdict().items()}


def measure_parts(experiment: Experiment[Any], splits: Splits, kind: str) -> StepParts:
    """Times programs that do more and more of a step; a part is what it adds, none less than 0.

    Args:
        experiment: whose step it is.
        splits: its data.
        kind: the device's.
    """
    with computing_on(kind):
        config = experiment.config
        feed = make_feed(splits, config.seed, config.batch_size, resident=False)
        programs = Programs(experiment, splits.train, feed, Ledger(), Clock())
        state, batch = programs.init(), splits.train.as_batch(programs.first_examples)

        def seconds(part: Callable[[Any, Any], Any]) -> float:
            # The mask is not handed over: like a run's step, the program is to know that the batch is full.
            program = jax.jit(lambda state, inputs, targets: part(state, Batch(inputs, targets, batch.mask)))
            return _seconds(program, state, batch.inputs, batch.targets)

        call, forward, gradient, step = map(seconds, _programs(experiment))
    forward, gradient, step = max(forward, call), max(gradient, forward, call), max(step, gradient, forward, call)
    return StepParts(call, forward - call, gradient - forward, step - gradient)


def _programs(experiment: Experiment[Any]) -> list[Callable[[Any, Any], Any]]:
    """From nothing to a whole step; each takes the state and a batch."""

    def loss(params: Any, state: Any, batch: Any) -> Any:
        task = experiment.task(experiment.config)
        return task.loss(params, state.model_state, batch, state.key)

    return [
        lambda state, batch: state.step + 1,
        lambda state, batch: loss(state.params, state, batch),
        lambda state, batch: jax.value_and_grad(loss, has_aux=True)(state.params, state, batch),
        make_step(experiment),
    ]


def _seconds(program: Callable[..., Any], *arguments: Any) -> float:
    return try_size(1, 1, lambda: program(*arguments), 0).seconds
