"""An average of the parameters over training, kept in the optimizer's state, to evaluate."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxnn.optim.checks import check_range
from jaxnn.types import ConfigError, Params


class AveragedState(NamedTuple):
    """State of ``averaged``.

    Attributes:
        inner: the state of the optimizer within.
        average: the average so far, debiased already, shaped as the parameters, float32 or wider.
        total: ``[]`` float32, the sum of the weights averaged so far: ``1 + decay + decay² + …``.
    """

    inner: optax.OptState
    average: optax.Params
    total: jax.Array


def averaged(
    optimizer: optax.GradientTransformation, decay: ArrayLike, *, debias: bool = True
) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` that also keeps an exponential moving average of the parameters it leads to.

    Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; ``decay=1`` is
    their uniform average. The parameters ``k`` updates ago weigh ``decay**k``, over the sum of the
    weights. Read it with ``evaluation_params``. Costs one copy of the parameters. Put it around
    whatever else changes the updates; around ``accumulated`` it averages at each micro-batch,
    within at each update.

    Args:
        optimizer: any Optax optimizer; its ``update`` must be given the parameters.
        decay: ``[]`` how much less the parameters of the update before weigh, 0…1; may be a tracer.
        debias: True averages only what updates led to; False starts from the initial parameters, as
            if they had always been there, so that they weigh ``decay**updates``.

    Raises:
        ConfigError: ``decay`` is a number outside 0…1, or ``update`` is called without parameters.
    """
    check_range("averaged", "decay", decay, 0.0, 1.0)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> AveragedState:
        total = jnp.float32(0.0) if debias else 1.0 / jnp.asarray(1.0 - decay, jnp.float32)
        return AveragedState(inner.init(params), jax.tree.map(_widened_copy, params), total)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AveragedState]:
        if params is None:
            raise ConfigError("averaged: update needs the parameters: pass them as params.")
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        total = jnp.asarray(1.0 + decay * state.total, jnp.float32)
        average = jax.tree.map(
            lambda mean, param: mean + (param - mean) / total,
            state.average,
            optax.apply_updates(params, updates),
        )
        return updates, AveragedState(inner_state, average, total)

    return optax.GradientTransformationExtraArgs(init, update)


def evaluation_params(params: Params, opt_state: optax.OptState) -> Params:
    """The parameters to evaluate with: ``averaged``'s average, or ``params`` where there is none.

    The average is found wherever it lies in ``opt_state``: in a chain, under ``accumulated``, in
    injected hyper-parameters; of averages within averages the outermost. Where several cover parts
    of the parameters, as in ``optax.partition``, each gives its part.

    Args:
        params: what is trained.
        opt_state: the state of any optimizer.

    Returns:
        A tree with the structure, shapes and dtypes of ``params``.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_averaged)
    for state in filter(_is_averaged, nodes):
        params = jax.tree.map(_average_or_param, state.average, params, is_leaf=_is_masked)
    return params


def _widened_copy(param: ArrayLike) -> jax.Array:
    # A copy even where the dtype stays: parameters and average may be donated together.
    return jnp.array(param, jnp.promote_types(jnp.result_type(param), jnp.float32), copy=True)


def _average_or_param(average: Any, param: Any) -> Any:
    return param if _is_masked(average) else average.astype(jnp.result_type(param))


def _is_averaged(node: Any) -> bool:
    return isinstance(node, AveragedState)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
