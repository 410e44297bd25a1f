"""What models of all libraries share: their two pure functions, and how inputs and the mode reach a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxnn.types import ModelState, Params, PyTree

# Arguments of models that switch between training and evaluation, with their values in training.
_TRAIN_FLAGS = dict.fromkeys(("train", "training", "is_training"), True)
_TRAIN_FLAGS |= {"deterministic": False, "use_running_average": False}


class ModelResult(NamedTuple):
    """The result of calling a model; ``sown_loss []`` is what it adds to the training loss, None if nothing."""

    outputs: Any
    model_state: ModelState
    sown_loss: jax.Array | None = None


# (key, inputs) -> (params, model_state)
type Init = Callable[[jax.Array, PyTree], tuple[Params, ModelState]]
# (params, model_state, inputs, key) -> result; a key means training (dropout draws from it, batch statistics move),
# None means evaluation.
type Apply = Callable[[Params, ModelState, PyTree, jax.Array | None], ModelResult]


def input_arguments(function: Callable[..., Any], inputs: PyTree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments: those of a tuple, those of a dict of parameters' names, else one."""
    if type(inputs) is tuple:  # a named tuple is one argument
        return inputs, {}
    if isinstance(inputs, Mapping) and inputs.keys() <= inspect.signature(function).parameters.keys():
        return (), dict(inputs)
    return (inputs,), {}


def train_flags(function: Callable[..., Any], train: bool) -> dict[str, bool]:
    """Returns the keyword arguments of ``function`` that say whether it is training."""
    parameters = inspect.signature(function).parameters
    return {name: train == means for name, means in _TRAIN_FLAGS.items() if name in parameters}
