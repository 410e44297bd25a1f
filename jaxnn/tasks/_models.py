"""Models of several libraries as a pair of pure functions."""

from __future__ import annotations

import contextlib
import inspect
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from jaxnn.nn import Policy
from jaxnn.tasks._model_calls import Apply, Init, ModelResult, call_arguments, train_flags
from jaxnn.tasks._module_trees import from_nnx, from_tree, is_module_tree, library_of
from jaxnn.types import ConfigError, ModelState, Params, PyTree, check_call

# Collections that a module fills for its caller; they are no state.
_TRANSIENT_COLLECTIONS = ("params", "intermediates", "losses", "perturbations")


def as_model(model: Any, policy: Policy | None = None) -> tuple[Init, Apply]:
    """Returns ``model`` as pure functions that compute in the precision of ``policy`` if one is given.

    They are ``init(key, inputs) -> (params, model_state)``, nested dicts of arrays, and ``apply(params, model_state,
    inputs, key) -> (outputs, model_state, sown_loss)``. Parameters are kept in float32 and cast to
    ``policy.compute`` for every call. Inputs that are a tuple are passed as several arguments, and a dict as keyword
    arguments if the model has parameters of those names; a model may take its training mode as ``train``, ``training``,
    ``is_training``, ``deterministic`` or ``use_running_average``. ConfigError if ``model`` is none of these:

    - a Flax Linen module. What it sows into ``losses`` is added to the training loss.
    - a Flax NNX module, or a factory ``rngs -> module``. ``Param``s are trained, other variables are state; streams of
      random numbers get new keys in each step, and modes are those of ``train`` and ``eval``.
    - an Equinox module or a pair of one and its ``State``, or a factory ``key -> either``: floating arrays are trained.
      It takes one example, and is called under ``vmap`` with ``axis_name="batch"``; if it has a parameter ``key``, each
      example gets its own. ``inference_mode`` is on in evaluation.
    - a pytree with a ``__call__`` that takes a batch, or a factory ``key -> pytree``: floating arrays are trained.
    - what ``haiku.transform`` or ``haiku.transform_with_state`` returns; in evaluation its ``rng`` is None.
    - a pair ``(init, apply)``: ``init(key, inputs) -> params`` and ``apply(params, inputs) -> outputs``, where
      ``apply`` may also take ``key``, None in evaluation.

    An instance starts from its own arrays, at any seed; a factory draws them from it.

    >>> init, apply = jn.tasks.as_model(jn.models.MLP((8, 10)))
    >>> params, model_state = init(jax.random.key(0), batch.inputs)
    >>> apply(params, model_state, batch.inputs, None).outputs.shape  # a key in place of None: training
    (32, 10)
    """
    plain_init, plain_apply = _functions_of(model)
    if policy is None:
        return plain_init, plain_apply

    def init(key: jax.Array, inputs: PyTree) -> tuple[Params, ModelState]:
        params, model_state = plain_init(key, inputs)
        return policy.cast_to_params(params), model_state

    def apply(params: Params, model_state: ModelState, inputs: PyTree, key: jax.Array | None) -> ModelResult:
        params, inputs = policy.cast_to_compute((params, inputs))
        outputs, updated, sown_loss = plain_apply(params, model_state, inputs, key)
        # Statistics keep their dtype, also if they were computed in another precision.
        updated = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, model_state)
        return ModelResult(policy.cast_to_outputs(outputs), updated, sown_loss)

    return init, apply


def _functions_of(model: Any) -> tuple[Init, Apply]:
    library = library_of(model)
    if library == "flax.linen":
        return _from_linen(model)
    if library == "flax.nnx":
        return from_nnx(lambda rngs: model)
    if is_module_tree(model):
        # A copy, since a `State` of Equinox can be used once.
        leaves, tree = jax.tree.flatten(model)
        return from_tree(lambda key: jax.tree.unflatten(tree, leaves), is_factory=False)
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        taken = inspect.signature(model[1]).parameters
        is_haiku = "rng" in taken or any(p.kind is p.VAR_POSITIONAL for p in taken.values())
        return _from_haiku(*model) if is_haiku else _from_pair(*model)
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):  # no function, or one without a signature
        # Metaclasses of libraries hide the signature of a class.
        parameters = inspect.signature(model.__init__ if inspect.isclass(model) else model).parameters
        # But for its first argument, ``self`` by any name.
        parameters = dict(list(parameters.items())[inspect.isclass(model) :])
    if name := next((name for name in ("rngs", "key") if name in parameters), None):
        return _from_factory(model, name, parameters)
    raise ConfigError(
        "a model must be a Flax Linen module, a Flax NNX module or a factory lambda rngs: Net(rngs=rngs), an Equinox "
        "module or another pytree with __call__ or a factory lambda key: Net(key=key), a Haiku transform, or a pair "
        f"(init, apply) of functions, not {model!r}."
    )


def _from_factory(factory: Callable[..., Any], name: str, parameters: Mapping[str, Any]) -> tuple[Init, Apply]:
    required = [p.name for p in parameters.values() if p.default is p.empty and "VAR" not in p.kind.name]
    needed = [word for word in required if word != name]
    if needed:
        called = getattr(factory, "__name__", "model")
        raise ConfigError(
            f"the model factory {called} needs {', '.join(needed)} besides {name}: pass "
            f"lambda {name}: {called}({', '.join(f'{word}=...' for word in needed)}, {name}={name})."
        )
    if name == "key":
        return from_tree(lambda key: factory(key=key), is_factory=True)
    return from_nnx(lambda rngs: factory(rngs=rngs))


def _from_linen(module: nn.Module) -> tuple[Init, Apply]:
    function = type(module).__call__

    def init(key: jax.Array, inputs: PyTree) -> tuple[Params, ModelState]:
        params_key, dropout_key = jax.random.split(key)
        keys = {"params": params_key, "dropout": dropout_key}
        arguments, keywords = call_arguments(function, inputs, False)
        variables = module.init(keys, *arguments, **keywords)
        state = {k: v for k, v in variables.items() if k not in _TRANSIENT_COLLECTIONS}
        return variables.get("params", {}), state

    def apply(params: Params, model_state: ModelState, inputs: PyTree, key: jax.Array | None) -> ModelResult:
        arguments, keywords = call_arguments(function, inputs, key is not None)
        variables = {"params": params, **model_state}
        if key is None:
            try:
                return ModelResult(module.apply(variables, *arguments, **keywords), model_state)
            except InvalidRngError as error:
                raise ConfigError(
                    f'the model draws from the random stream "{_stream_of(error)}" in evaluation, which has no random '
                    "numbers: let it draw only in training, by an argument train of its __call__, or return its mean."
                ) from error
        keywords["mutable"] = [*model_state, "losses"]
        outputs, updated = _with_streams(lambda keys: module.apply(variables, *arguments, **keywords, rngs=keys), key)
        state = {name: collection for name, collection in updated.items() if name != "losses"}
        sown = [jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(updated.get("losses", {}))]
        return ModelResult(outputs, state, sum(sown[1:], sown[0]) if sown else None)

    return init, apply


def _with_streams[Result](call: Callable[[dict[str, jax.Array]], Result], key: jax.Array) -> Result:
    """Returns ``call(keys)`` with a key for each stream of random numbers that a Linen module draws from.

    With ``params`` among them, Linen would draw from its key for all other names, and only where a lifted transform
    passes it on. So names are found one by one, by Linen's error for a missing one, and each has an independent key.
    """
    keys = {"dropout": key}
    while True:
        try:
            return call(keys)
        except InvalidRngError as error:
            if (name := _stream_of(error)) is None or name in keys:
                raise
            keys[name] = jax.random.fold_in(key, zlib.crc32(name.encode()))


def _stream_of(error: InvalidRngError) -> str | None:
    """The name of the missing stream."""
    found = re.search(r'needs PRNG for "([^"]*)"', str(error))
    return found and found[1]


def _from_haiku(initialize: Callable[..., Any], function: Callable[..., Any]) -> tuple[Init, Apply]:
    has_state = "state" in inspect.signature(function).parameters

    def init(key: jax.Array, inputs: PyTree) -> tuple[Params, ModelState]:
        arguments, keywords = call_arguments(initialize, inputs, False)
        made = initialize(key, *arguments, **keywords)
        return made if has_state else (made, {})

    def apply(params: Params, model_state: ModelState, inputs: PyTree, key: jax.Array | None) -> ModelResult:
        arguments, keywords = call_arguments(function, inputs, key is not None)
        variables = (params, model_state) if has_state else (params,)
        made = function(*variables, key, *arguments, **keywords)
        outputs, updated = made if has_state else (made, model_state)
        return ModelResult(outputs, model_state if key is None else updated)

    return init, apply


def _from_pair(initialize: Callable[..., Any], function: Callable[..., Any]) -> tuple[Init, Apply]:
    takes_key = "key" in inspect.signature(function).parameters
    check_call("the init of a model (init, apply) must be a function of (key, inputs)", initialize, 2)
    keywords = [*train_flags(function, True), *["key"] * takes_key]
    check_call("the apply of a model (init, apply) must be a function of (params, inputs)", function, 2, *keywords)

    def apply(params: Params, model_state: ModelState, inputs: PyTree, key: jax.Array | None) -> ModelResult:
        keys = {"key": key} if takes_key else {}
        return ModelResult(function(params, inputs, **train_flags(function, key is not None), **keys), model_state)

    return lambda key, inputs: (initialize(key, inputs), {}), apply
