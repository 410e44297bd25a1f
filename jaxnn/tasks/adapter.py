"""Any model as two pure functions: a Flax Linen module or an ``(init, apply)`` pair behind one signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from jaxnn.nn import Policy
from jaxnn.types import Array, ConfigError, ModelState, Params

# How Linen modules spell "this is training", and whether the word means the opposite.
TRAIN_FLAGS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
# Collections a module fills for its caller to look at; they are no state to carry.
TRANSIENT_COLLECTIONS = ("params", "intermediates", "losses", "perturbations")


class Model(NamedTuple):
    """A network as pure functions.

    Attributes:
        init: ``(key, inputs) -> (params, model_state)``.
        apply: ``(params, model_state, inputs, key) -> (outputs, model_state)``; a key means training (dropout
            draws from it, batch statistics move), ``None`` means evaluation.
    """

    init: Callable[[jax.Array, Array], tuple[Params, ModelState]]
    apply: Callable[[Params, ModelState, Array, jax.Array | None], tuple[Any, ModelState]]


def as_model(model: Any, policy: Policy | None = None) -> Model:
    """Takes a model in any of its forms, computing in the precision of ``policy`` (default: as it comes).

    Args:
        model: a Flax Linen module, or a pair ``(init, apply)`` with ``init(key, inputs) -> params`` and
            ``apply(params, inputs) -> outputs``, where ``apply`` may also take ``key`` and ``train``.
        policy: parameters are kept in ``policy.params`` and cast to ``policy.compute`` for every call.

    Raises:
        ConfigError: something else was passed.
    """
    if isinstance(model, Model):
        plain = model
    elif isinstance(model, nn.Module):
        plain = _from_linen(model)
    elif isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        plain = _from_pair(*model)
    else:
        raise ConfigError(f"a model must be a Flax Linen module or a pair (init, apply) of functions, not {model!r}.")
    return plain if policy is None else _with_policy(plain, policy)


def _from_linen(module: nn.Module) -> Model:
    flags = _train_flags(type(module).__call__)

    def init(key: jax.Array, inputs: Array) -> tuple[Params, ModelState]:
        params_key, dropout_key = jax.random.split(key)
        keys = {"params": params_key, "dropout": dropout_key}
        variables = module.init(keys, inputs, **flags(False))
        state = {k: v for k, v in variables.items() if k not in TRANSIENT_COLLECTIONS}
        return variables.get("params", {}), state

    def apply(params: Params, model_state: ModelState, inputs: Array, key: jax.Array | None) -> tuple[Any, ModelState]:
        variables = {"params": params, **model_state}
        if key is None:
            return module.apply(variables, inputs, **flags(False)), model_state
        # Linen falls back to the key named "params" for any name it is not given.
        keys = {"params": key, "dropout": key}
        outputs, updated = module.apply(variables, inputs, **flags(True), rngs=keys, mutable=list(model_state))
        return outputs, updated

    return Model(init, apply)


def _from_pair(init: Callable[..., Any], apply: Callable[..., Any]) -> Model:
    flags = _train_flags(apply)
    takes_key = "key" in inspect.signature(apply).parameters

    def init_pair(key: jax.Array, inputs: Array) -> tuple[Params, ModelState]:
        return init(key, inputs), {}

    def apply_pair(
        params: Params, model_state: ModelState, inputs: Array, key: jax.Array | None
    ) -> tuple[Any, ModelState]:
        keys = {"key": key} if takes_key else {}
        return apply(params, inputs, **flags(key is not None), **keys), model_state

    return Model(init_pair, apply_pair)


def _train_flags(function: Callable[..., Any]) -> Callable[[bool], dict[str, Any]]:
    """The keyword arguments that tell ``function`` whether it is training."""
    known = {name: positive for name, positive in TRAIN_FLAGS.items() if name in inspect.signature(function).parameters}
    return lambda train: {name: train == positive for name, positive in known.items()}


def _with_policy(model: Model, policy: Policy) -> Model:
    def init(key: jax.Array, inputs: Array) -> tuple[Params, ModelState]:
        params, model_state = model.init(key, inputs)
        return policy.cast_to_params(params), model_state

    def apply(params: Params, model_state: ModelState, inputs: Array, key: jax.Array | None) -> tuple[Any, ModelState]:
        params, inputs = policy.cast_to_compute((params, inputs))
        outputs, updated = model.apply(params, model_state, inputs, key)
        # Statistics keep the dtype they have, whatever precision they were computed in.
        updated = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, model_state)
        return policy.cast_to_outputs(outputs), updated

    return Model(init, apply)
