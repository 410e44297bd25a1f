"""A model and a loss per example become a task; every supervised task is one call of `supervised`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from jaxnn.nn import Policy, is_full, mean_over_batch_axis, use_batch_mask
from jaxnn.tasks._contract import LossResult
from jaxnn.tasks._data_checks import check_data
from jaxnn.types import Array, Batch, ConfigError, Metrics, ModelState, Params, Task

type PerExample = Callable[[Array, Array], jax.Array]

# Arguments of Linen modules that switch between training and evaluation, with their values in training.
_TRAIN_FLAGS = dict.fromkeys(("train", "training", "is_training"), True)
_TRAIN_FLAGS |= {"deterministic": False, "use_running_average": False}
# Collections that a module fills for its caller; they are no state.
_TRANSIENT_COLLECTIONS = ("params", "intermediates", "losses", "perturbations")


# (key, inputs) -> (params, model_state)
type Init = Callable[[jax.Array, Array], tuple[Params, ModelState]]
# (params, model_state, inputs, key) -> (outputs, model_state); a key means training (dropout draws from it, batch
# statistics move), None means evaluation.
type Apply = Callable[[Params, ModelState, Array, jax.Array | None], tuple[Any, ModelState]]


def as_model(model: Any, policy: Policy | None = None) -> tuple[Init, Apply]:
    """Returns ``model`` as pure functions that compute in the precision of ``policy`` if one is given.

    ``model`` is a Flax Linen module, or a pair ``(init, apply)`` with ``init(key, inputs) -> params`` and
    ``apply(params, inputs) -> outputs``, where ``apply`` may also take ``key`` and ``train``; anything else raises
    ConfigError. Parameters are kept in ``policy.params`` and cast to ``policy.compute`` for every call.
    """
    if isinstance(model, nn.Module):
        plain_init, plain_apply = _from_linen(model)
    elif isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        plain_init, plain_apply = _from_pair(*model)
    else:
        raise ConfigError(f"a model must be a Flax Linen module or a pair (init, apply) of functions, not {model!r}.")
    if policy is None:
        return plain_init, plain_apply

    def init(key: jax.Array, inputs: Array) -> tuple[Params, ModelState]:
        params, model_state = plain_init(key, inputs)
        return policy.cast_to_params(params), model_state

    def apply(params: Params, model_state: ModelState, inputs: Array, key: jax.Array | None) -> tuple[Any, ModelState]:
        params, inputs = policy.cast_to_compute((params, inputs))
        outputs, updated = plain_apply(params, model_state, inputs, key)
        # Statistics keep their dtype, also if they were computed in another precision.
        updated = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, model_state)
        return policy.cast_to_outputs(outputs), updated

    return init, apply


def _from_linen(module: nn.Module) -> tuple[Init, Apply]:
    flags = _train_flags(type(module).__call__)

    def init(key: jax.Array, inputs: Array) -> tuple[Params, ModelState]:
        params_key, dropout_key = jax.random.split(key)
        keys = {"params": params_key, "dropout": dropout_key}
        variables = module.init(keys, inputs, **flags(False))
        state = {k: v for k, v in variables.items() if k not in _TRANSIENT_COLLECTIONS}
        return variables.get("params", {}), state

    def apply(params: Params, model_state: ModelState, inputs: Array, key: jax.Array | None) -> tuple[Any, ModelState]:
        variables = {"params": params, **model_state}
        if key is None:
            try:
                return module.apply(variables, inputs, **flags(False)), model_state
            except InvalidRngError as error:
                stream = str(error).partition(" for ")[2].partition(" ")[0]
                raise ConfigError(
                    f"the model draws from the random stream {stream} in evaluation, which has no random numbers: let "
                    "it draw only in training, by an argument train of its __call__, or return its mean."
                ) from error
        # Linen falls back to the key named "params" for any name it is not given.
        keys = {"params": key, "dropout": key}
        outputs, updated = module.apply(variables, inputs, **flags(True), rngs=keys, mutable=list(model_state))
        return outputs, updated

    return init, apply


def _from_pair(initialize: Callable[..., Any], function: Callable[..., Any]) -> tuple[Init, Apply]:
    flags = _train_flags(function)
    takes_key = "key" in inspect.signature(function).parameters

    def apply(params: Params, model_state: ModelState, inputs: Array, key: jax.Array | None) -> tuple[Any, ModelState]:
        keys = {"key": key} if takes_key else {}
        return function(params, inputs, **flags(key is not None), **keys), model_state

    return lambda key, inputs: (initialize(key, inputs), {}), apply


def _train_flags(function: Callable[..., Any]) -> Callable[[bool], dict[str, Any]]:
    """Returns the keyword arguments of ``function`` that say whether it is training."""
    known = {name: means for name, means in _TRAIN_FLAGS.items() if name in inspect.signature(function).parameters}
    return lambda train: {name: train == means for name, means in known.items()}


def supervised(
    model: Any, objective: PerExample, measures: Mapping[str, PerExample], policy: Policy | None = None
) -> Task:
    """Returns a task that minimises the masked mean of ``objective``.

    Token ids beyond the embeddings of a Linen model are refused before training; targets may be anything.

    >>> huber = lambda outputs, targets: optax.huber_loss(outputs[:, 0], targets)
    >>> task = jn.tasks.supervised(jn.models.MLP((8, 1)), objective=huber, measures={"loss": huber})

    Args:
        model: a Flax Linen module or an ``(init, apply)`` pair.
        objective: ``(outputs [batch, ...], targets [batch, ...]) -> [batch]``, to be minimised.
        measures: the metrics, each like ``objective``; ``evaluate`` returns their masked sums, and those not
            called ``loss`` are the metrics of a training step.
        policy: the precision to compute in.
    """
    init, apply = as_model(model, policy)

    def sums_of(
        functions: Mapping[str, PerExample], params: Params, state: ModelState, batch: Batch, key: jax.Array | None
    ) -> tuple[dict[str, jax.Array], ModelState]:
        if not is_full(batch.mask):
            # Padding is replaced by zeros: a NaN there would reach the gradient as ``0 * NaN``.
            inputs, targets = jax.tree.map(lambda rows: _where(batch.mask, rows), tuple(batch[:2]))
            batch = Batch(inputs, targets, batch.mask)
        with use_batch_mask(batch.mask):
            outputs, updated = apply(params, state, batch.inputs, key)
        values = {name: function(outputs, batch.targets) for name, function in functions.items()}
        for shape in map(jnp.shape, values.values()):
            # Broadcast, they would be counted more than once.
            if shape != batch.mask.shape:
                raise ConfigError(
                    f"an objective or a measure must return a number an example, [{len(batch.mask)}], not "
                    f"{list(shape)}: take its mean over every axis but the first."
                )
        return {name: jnp.sum(_where(batch.mask, value)) for name, value in values.items()}, updated

    def loss(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> LossResult:
        functions = {**measures, "loss": objective}
        sums, updated = sums_of(functions, params, model_state, batch, key)
        count = batch.mask.sum()
        if not is_full(batch.mask):
            # Devices that share a batch may hold different numbers of examples: then the means of their results, each
            # divided by the mean number, are those of the batch. A batch of padding alone changes nothing.
            count = mean_over_batch_axis(jnp.asarray(count))
            updated = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), updated, model_state)
            count = jnp.where(count > 0, count, 1.0)
        means = {name: total / count for name, total in sums.items()}
        return means.pop("loss"), (updated, means)

    def evaluate(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> Metrics:
        sums, _ = sums_of(measures, params, model_state, batch, None)
        return {**sums, "count": jnp.sum(batch.mask)}

    def predict(params: Params, model_state: ModelState, inputs: Array) -> Any:
        return apply(params, model_state, inputs, None)[0]

    return Task(lambda key, batch: init(key, batch.inputs), loss, evaluate, predict, check=check_data(predict))


def _where(mask: Array, rows: Array) -> jax.Array:
    """``rows [batch, ...]``, zeros where ``mask [batch]`` is 0."""
    return jnp.where((mask > 0).reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)


def regression(model: Any, *, policy: Policy | None = None) -> Task:
    """Trains ``model`` to predict numbers.

    Metrics are ``loss``, the squared error, and ``mean_absolute_error``, both means over a target's components
    and in the targets' units (squared for the loss).

    >>> task = jn.tasks.regression(jn.models.MLP((16, 1)))

    ``model`` outputs ``[batch, ...]`` shaped like the targets; ``[batch, 1]`` also fits targets ``[batch]``.
    ConfigError when traced, if the shapes differ. ``policy`` is the precision to compute in.
    """

    def mean(penalty: Callable[[jax.Array], jax.Array]) -> PerExample:
        def per_example(outputs: Array, targets: Array) -> jax.Array:
            # [batch, 1] - [batch] would broadcast to [batch, batch] and train on nonsense.
            outputs = outputs[..., 0] if outputs.shape == (*targets.shape, 1) else outputs
            if outputs.shape != targets.shape:
                raise ConfigError(
                    f"regression needs outputs shaped like the targets, not outputs {list(outputs.shape)} for targets "
                    f"{list(targets.shape)}: change the model's last layer."
                )
            errors = penalty(jnp.asarray(outputs - targets))
            return jnp.mean(errors.reshape(errors.shape[0], -1), axis=-1)

        return per_example

    squared = mean(jnp.square)
    return supervised(model, squared, {"loss": squared, "mean_absolute_error": mean(jnp.abs)}, policy)
