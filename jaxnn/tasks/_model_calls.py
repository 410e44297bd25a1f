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


def call_arguments(function: Callable[..., Any], inputs: PyTree, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments of a call, flags of training or evaluation among them.

    Inputs are those of a tuple (a named tuple is one), those of a dict if its keys are names of parameters, else one.
    """
    flags = train_flags(function, train)
    if type(inputs) is tuple:
        return inputs, flags
    if isinstance(inputs, Mapping) and inputs.keys() <= inspect.signature(function).parameters.keys():
        return (), {**inputs, **flags}
    return (inputs,), flags


def train_flags(function: Callable[..., Any], train: bool) -> dict[str, Any]:
    """Returns the keyword arguments of ``function`` that say whether it is training."""
    parameters = inspect.signature(function).parameters
    return {name: train == means for name, means in _TRAIN_FLAGS.items() if name in parameters}
