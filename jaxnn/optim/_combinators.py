"""Combinators of optimizers: gradients accumulated, clipped or scaled, averages, norms, rates by layer; checks.

Each takes any Optax optimizer. Norms and decays are numbers ``[]``, and may be tracers; an argument out of its range
raises `ConfigError`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxnn._fields import check_range
from jaxnn.optim._adam import FusedTransformation
from jaxnn.optim._row_gradients import apply_updates
from jaxnn.types import ConfigError, Params, PyTree, TrainState, check_int, named_leaves, path_name

type Optimizers = optax.GradientTransformation | Mapping[str, optax.GradientTransformation]  # or by top-level names


def with_accumulation(optimizer: optax.GradientTransformation, num_steps: int) -> optax.GradientTransformation:
    """Returns ``optimizer`` with one update per ``num_steps`` calls, from the mean of their gradients.

    The calls between return zero updates: ``optax.MultiSteps`` as a plain gradient transformation. It equals one batch
    of ``num_steps`` times the examples if the micro-batches have equal counts. A schedule inside ``optimizer`` counts
    updates, not calls. The mean costs one more copy of the parameters, in float32. A gradient that is not
    finite stays in the mean forever: to skip such micro-batches put ``optax.apply_if_finite`` around this, not inside.
    ``num_steps`` is an integer of at least 1; 1 returns ``optimizer`` itself.

    >>> optimizer = jn.optim.with_accumulation(optax.adam(1e-3), num_steps=4)
    """
    check_int("with_accumulation: num_steps", num_steps)
    if num_steps == 1:
        return optimizer
    multi_steps = optax.MultiSteps(optimizer, int(num_steps))
    return optax.GradientTransformationExtraArgs(multi_steps.init, multi_steps.update)


def with_clipping(
    optimizer: optax.GradientTransformation, max_norm: ArrayLike
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optimizer`` with gradients scaled down to a global norm of at most ``max_norm``.

    Pascanu, Mikolov & Bengio, On the Difficulty of Training Recurrent Neural Networks, 2013 (arXiv:1211.5063).
    Gradients within the norm stay as they are. Equal to ``optax.clip_by_global_norm`` before the optimizer, which
    refuses a traced norm for gradients narrower than float32; here their norm is computed in float32.
    The norm is above 0; infinity clips nothing.

    >>> optimizer = jn.optim.with_clipping(optax.sgd(1.0), max_norm=1.0)
    >>> gradient = jnp.array([3.0, 4.0])
    >>> optimizer.update(gradient, optimizer.init(gradient))[0]
    Array([-0.6, -0.8], dtype=float32)
    """
    check_range("with_clipping", "max_norm", max_norm, positive=True)

    def clip(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        norm = optax.tree.norm(optax.tree.cast(updates, jnp.float32))
        scale = jnp.minimum(1.0, max_norm / norm)  # 1 where the norm is 0
        return jax.tree.map(lambda update: update * scale.astype(update.dtype), updates)

    chained = optax.chain(optax.stateless(clip), optimizer)
    inner_update = getattr(optimizer, "update_params", None)
    if inner_update is None:
        return chained

    def update_params(gradient: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        params, inner = inner_update(clip(gradient, params), state[1], params, **extra)
        return params, (state[0], inner)

    return FusedTransformation.of(chained, update_params)


class AveragedState(NamedTuple):
    """State of ``with_ema``."""

    inner: optax.OptState  # of the optimizer within
    average: optax.Params  # the average so far, debiased already, shaped as the parameters, float32 or wider
    total: jax.Array  # ``[]`` float32, the sum of the weights averaged so far: ``1 + decay + decay² + …``
    # The average of the model's state, such as batch statistics, and the sum of its weights; None outside of a step.
    model_state: PyTree = None
    model_total: jax.Array | None = None


def with_ema(
    optimizer: optax.GradientTransformation, decay: ArrayLike, *, debias: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optimizer`` that also keeps an exponential moving average of the parameters, and of batch statistics.

    Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; ``decay=1`` is their uniform
    average. The parameters ``k`` updates ago weigh ``decay**k``, over the sum of the weights. Evaluations and
    predictions use the average; read it with ``evaluation_state``. Costs one copy of the parameters. Put it around all
    else that changes the updates; around ``with_accumulation`` it averages at each micro-batch, inside it at each
    update. In a state of `jaxnn.steps.init_train_state` the floats of the model's state are averaged too, since batch
    statistics of the last parameters do not fit averaged ones: those of step ``t`` weigh ``1 - decay**t`` times as
    much, as they start from no data.
    ``decay`` is 0…1. ``debias=False`` starts from the initial parameters, with a weight of ``decay**updates``. An
    ``update`` without parameters raises `ConfigError`.

    >>> optimizer = jn.optim.with_ema(optax.adam(1e-3), decay=0.999)
    """
    check_range("with_ema", "decay", decay, 1.0)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> AveragedState:
        total = jnp.float32(0.0) if debias else 1.0 / jnp.asarray(1.0 - decay, jnp.float32)
        return AveragedState(inner.init(params), jax.tree.map(_widened, params), total)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, AveragedState]:
        if params is None:
            raise ConfigError("with_ema: update needs the parameters: pass them as params.")
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        total = jnp.asarray(1.0 + decay * state.total, jnp.float32)
        trained = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda mean, param: mean + (param - mean) / total, state.average, trained)
        new = AveragedState(inner_state, average, total, state.model_state, state.model_total)
        if state.model_total is None or "model_state" not in extra_args:
            return updates, new
        # The first time from no weight, as for the parameters, or as after infinitely many steps.
        before = jnp.where(state.model_total == 0, state.total * state.total, state.model_total)
        model_total = total + decay * before

        def averaged(mean: Any, leaf: Any) -> Any:
            return mean + (leaf - mean) * (total / model_total) if _is_float(leaf) else leaf

        model_state = jax.tree.map(averaged, state.model_state, extra_args["model_state"])
        return updates, new._replace(model_state=model_state, model_total=model_total)

    return optax.GradientTransformationExtraArgs(init, update)


def as_one(optimizer: Optimizers) -> optax.GradientTransformation:
    """Returns an optimizer itself, or of a dict of them the one that updates each part of the parameters by its own.

    The dict has the names of the top level of the parameters, and so has the state.
    """
    if not isinstance(optimizer, Mapping):
        return optimizer
    parts = {name: optax.with_extra_args_support(one) for name, one in optimizer.items()}

    def init(params: Any) -> dict[str, Any]:
        if not isinstance(params, Mapping) or params.keys() != parts.keys():
            found = ", ".join(params) if isinstance(params, Mapping) else f"a {type(params).__name__}"
            raise ConfigError(
                f"the optimizers are of {', '.join(parts)}, and the parameters of {found}: give each one."
            )
        return {name: one.init(params[name]) for name, one in parts.items()}

    def update(gradient: Any, state: Any, params: Any = None, *, value: Any = None, **extra: Any) -> tuple[Any, Any]:
        # ``grad`` and ``value_fn`` are of all parameters, and no part could use them.
        shared = {"value": value} | {name: extra[name] for name in ("model_state",) if name in extra}
        done = {
            name: one.update(gradient[name], state[name], None if params is None else params[name], **shared)
            for name, one in parts.items()
        }
        return {name: updates for name, (updates, _) in done.items()}, {name: new for name, (_, new) in done.items()}

    return optax.GradientTransformationExtraArgs(init, update)


def _widened(leaf: ArrayLike) -> jax.Array:
    # A copy even where the dtype stays: the array and its average may be donated together.
    return jnp.array(leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32), copy=True)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _is_average(node: Any) -> bool:
    return isinstance(node, AveragedState)


def init_state(optimizer: Optimizers, params: Params, model_state: PyTree) -> optax.OptState:
    """The state of an optimizer before the first step, whose averages also average ``model_state``."""
    opt_state = as_one(optimizer).init(params)

    def started(state: Any) -> Any:
        if not _is_average(state):
            return state
        copies = jax.tree.map(lambda leaf: _widened(leaf) if _is_float(leaf) else leaf, model_state)
        return state._replace(model_state=copies, model_total=jnp.zeros_like(state.total))

    return jax.tree.map(started, opt_state, is_leaf=_is_average) if jax.tree.leaves(model_state) else opt_state


def update_params(optimizer: Optimizers) -> Callable[..., tuple[Params, Any]]:
    """Returns ``apply(gradient, opt_state, params, model_state, **extra)``, which returns parameters and a state.

    An optimizer may have a method ``update_params(gradient, opt_state, params, **extra)``, as `adam` has, which returns
    both in fewer passes than its ``update``.
    """
    update = optax.with_extra_args_support(as_one(optimizer)).update
    own = getattr(optimizer, "update_params", None)

    def apply(gradient: Params, opt_state: Any, params: Params, model_state: PyTree, **extra: Any) -> tuple[Any, Any]:
        if any(map(_is_average, jax.tree.leaves(opt_state, is_leaf=_is_average))):
            extra["model_state"] = model_state
        if own is not None:
            return own(gradient, opt_state, params, **extra)  # type: ignore[no-any-return]
        updates, opt_state = update(gradient, opt_state, params, **extra)
        return apply_updates(params, updates), opt_state

    return apply


def evaluation_state(state: TrainState) -> TrainState:
    """Returns the state to evaluate and predict with: averages of ``with_ema`` are in their places.

    Its parameters are those of ``evaluation_params``, and its model state is averaged too; without ``with_ema`` they
    are those of ``state``. So is the model state if no ``update`` was given one as ``model_state``, as a step of your
    own may. Evaluate with a model state of your own by replacing that of the result.

    >>> state = jn.optim.evaluation_state(run.state)
    >>> run.evaluate("test", state=state) == run.evaluate("test")
    True
    """
    params, model_state = evaluation_params(state.params, state.opt_state), state.model_state

    def averages_states(node: Any) -> bool:
        return _is_average(node) and node.model_total is not None

    nodes = jax.tree.leaves(state.opt_state, is_leaf=averages_states)
    if not (averages := [node for node in nodes if averages_states(node)]):
        return state._replace(params=params)

    def chosen(mean: Any, leaf: Any) -> Any:
        return jnp.where(averages[0].model_total > 0, mean.astype(leaf.dtype), leaf) if _is_float(leaf) else leaf

    def without_total(node: Any) -> Any:
        return node._replace(model_total=jnp.zeros_like(node.model_total)) if averages_states(node) else node

    # What evaluates the result takes its parameters for the average again, and its model state as it is.
    return state._replace(
        params=params,
        model_state=jax.tree.map(chosen, averages[0].model_state, model_state),
        opt_state=jax.tree.map(without_total, state.opt_state, is_leaf=averages_states),
    )


def evaluation_params(params: Params, opt_state: optax.OptState) -> Params:
    """Returns the parameters to evaluate with: the average of ``with_ema``, or ``params`` if there is none.

    The average is found anywhere in the state of an optimizer: in a chain, under ``with_accumulation``, in injected
    hyper-parameters; of nested averages the outermost. Of several for parts of the parameters, as in
    ``optax.partition``, each is used for its part. The result has the structure, shapes and dtypes of ``params``.

    >>> params = jn.optim.evaluation_params(run.state.params, run.state.opt_state)
    """

    def pick(average: Any, param: Any) -> Any:
        return param if isinstance(average, optax.MaskedNode) else average.astype(jnp.result_type(param))

    if isinstance(opt_state, Mapping) and isinstance(params, Mapping) and opt_state.keys() == params.keys():
        return {
            name: evaluation_params(part, opt_state[name]) for name, part in params.items()
        }  # of several optimizers
    for state in jax.tree.leaves(opt_state, is_leaf=_is_average):
        if _is_average(state):
            params = jax.tree.map(pick, state.average, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return params


class NormsState(NamedTuple):
    """State of ``with_norms``: norms of the latest update, ``[]`` float32 each."""

    inner: optax.OptState  # of the optimizer within
    gradient_norm: jax.Array
    update_norm: jax.Array
    param_norm: jax.Array  # before the update


def with_norms(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns ``optimizer`` that also measures the global L2 norms of gradients, updates and parameters.

    A training step reports them as ``gradient_norm``, ``update_norm`` and ``param_norm``, that of the parameters before
    the update; in ``metrics.jsonl`` they are ``train_gradient_norm`` and so on, means over a window. Put it around all
    else that changes the updates: the gradient is then measured before clipping. An ``update`` without parameters
    raises `ConfigError`.

    >>> optimizer = jn.optim.with_norms(optax.sgd(0.5))
    >>> params, gradient = jnp.array([6.0, 8.0]), jnp.array([3.0, 4.0])
    >>> _, state = optimizer.update(gradient, optimizer.init(params), params)
    >>> {name: float(norm) for name, norm in jn.optim.step_norms(state).items()}
    {'gradient_norm': 5.0, 'update_norm': 2.5, 'param_norm': 10.0}
    """
    inner = optax.with_extra_args_support(optimizer)

    def norm(tree: Any) -> jax.Array:
        return jnp.asarray(optax.tree.norm(optax.tree.cast(tree, jnp.float32)))

    def init(params: optax.Params) -> NormsState:
        return NormsState(inner.init(params), *(jnp.zeros((), jnp.float32) for _ in range(3)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, NormsState]:
        if params is None:
            raise ConfigError("with_norms: update needs the parameters: pass them as params.")
        gradient_norm = norm(updates)
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        return updates, NormsState(inner_state, gradient_norm, norm(updates), norm(params))

    return optax.GradientTransformationExtraArgs(init, update)


def step_norms(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns the norms that the outermost ``with_norms`` of an optimizer measured last, by name.

    Norms are ``[]`` float32; the result is empty if no ``with_norms`` is in ``opt_state``.

    >>> jn.optim.step_norms(run.state.opt_state)
    {}
    """
    for state in jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, NormsState)):
        if isinstance(state, NormsState):
            return {name: value for name, value in state._asdict().items() if name != "inner"}
    return {}


class LossScaleState(NamedTuple):
    """State of ``with_loss_scale``."""

    inner: optax.OptState  # of the optimizer within
    scale: jax.Array  # ``[]`` float32, by which the loss of the next step is multiplied
    good_steps: jax.Array  # ``[]`` int32, steps since a gradient was not finite or the scale was doubled


def with_loss_scale(
    optimizer: optax.GradientTransformation, *, init_scale: float = 2.0**16, growth_interval: int = 2_000
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optimizer`` for gradients of a scaled loss, as `jaxnn.steps.make_scaled_train_step` computes them.

    Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740), with the defaults of NVIDIA Apex. Gradients
    are divided by the scale. If one is not finite, the update is skipped, which keeps the state of ``optimizer``, and
    the scale halved, down to 1 or a smaller ``init_scale``; after ``growth_interval`` finite ones in a row, an integer
    of at least 1, it is doubled, up to 2²⁴. A power of two as ``init_scale`` rounds nothing. To be put outermost.

    >>> optimizer = jn.optim.with_loss_scale(optax.adam(1e-3))
    """
    check_int("with_loss_scale: growth_interval", growth_interval)
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> LossScaleState:
        return LossScaleState(optimizer.init(params), jnp.float32(init_scale), jnp.int32(0))

    def update(scaled: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, LossScaleState]:
        gradient = jax.tree.map(lambda leaf: (leaf / state.scale).astype(leaf.dtype), scaled)
        extra_args |= {"grad": gradient} if "grad" in extra_args else {}
        made = optimizer.update(gradient, state.inner, params, **extra_args)
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]).all()
        skipped = jax.tree.map(jnp.zeros_like, made[0]), state.inner
        updates, inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), made, skipped)
        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        grows = good_steps >= growth_interval
        scale = state.scale * jnp.where(grows, 2.0, jnp.where(finite, 1.0, 0.5))
        scale = jnp.clip(scale, jnp.minimum(init_scale, 1.0), 2.0**24)
        return updates, LossScaleState(inner, scale, jnp.where(grows, 0, good_steps))

    return optax.GradientTransformationExtraArgs(init, update)


def with_rates(
    optimizer: optax.GradientTransformation, rates: Mapping[str, ArrayLike]
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optimizer`` with updates multiplied by a rate for the parameters whose paths match a pattern.

    A pattern is a regular expression for the first names of a path such as ``Dense_0/kernel``; the first that matches
    counts, and 1 if none does. ConfigError in ``init`` for a pattern that matches no parameter.

    >>> optimizer = jn.optim.with_rates(optax.adam(1e-3), {"Dense_1": 1.0, "Dense_.*": 0.1})
    """

    def scale(updates: Any, params: Any) -> Any:
        matched = first_matches("with_rates", rates, named_leaves(updates))

        def scaled(path: Any, update: jax.Array) -> jax.Array:
            pattern = matched.get(path_name(path))
            return update if pattern is None else update * jnp.asarray(rates[pattern], update.dtype)

        return jax.tree.map_with_path(scaled, updates)

    chained = optax.chain(optimizer, optax.stateless(scale))

    def init(params: Params) -> optax.OptState:
        first_matches("with_rates", rates, named_leaves(params))
        return chained.init(params)

    return optax.GradientTransformationExtraArgs(init, chained.update)


def layer_decay(layers: Sequence[str], decay: ArrayLike) -> dict[str, ArrayLike]:
    """Rates for `with_rates` that fall from the last of ``layers``, which has 1, by a factor of ``decay`` each.

    Layer-wise learning rates for fine-tuning (Howard & Ruder 2018, arXiv:1801.06146; Bao et al. 2021, BEiT).

    >>> jn.optim.layer_decay(["Embed", "Block_0", "Block_1", "head"], 0.5)
    {'Embed': 0.125, 'Block_0': 0.25, 'Block_1': 0.5, 'head': 1.0}
    """
    return {name: decay ** float(len(layers) - 1 - depth) for depth, name in enumerate(layers)}


def is_decayed(params: Params) -> Any:
    """Returns True for each parameter that weight decay usually applies to: those of two axes or more.

    Biases and the gains of normalization are left out: ``optax.adamw(1e-3, mask=jn.optim.is_decayed)``.

    >>> optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=jn.optim.is_decayed)
    """
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, params)


def path_matches(pattern: str, path: str) -> bool:
    """Whether a regular expression matches the first names of a path: ``Dense_[01]`` of ``Dense_1/kernel``.

    ConfigError if it is no regular expression.
    """
    try:
        return re.match(rf"(?:{pattern})(?:/|$)", path) is not None
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} is no regular expression: {error}.") from error


def first_matches(where: str, patterns: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Returns the first of ``patterns`` that matches each of ``names``, for those that one matches.

    ConfigError, which ``where`` begins, for a pattern that matches no name.
    """
    for pattern in patterns:
        if not any(path_matches(pattern, name) for name in names):
            raise ConfigError(f"{where}: no parameter starts with {pattern!r}: there are {', '.join(names) or 'none'}.")
    matches = ((name, pattern) for name in names for pattern in reversed([*patterns]) if path_matches(pattern, name))
    return dict(matches)
