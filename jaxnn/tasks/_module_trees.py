"""Models that are trees of arrays, of Flax NNX, Equinox or a user: parameters and state as nested dicts.

A tree is rebuilt around those arrays for each call, from the structure of ``build(key)``. So nothing is kept between
calls, and a class that a notebook defines again is as good as the first.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.tree_util import GetAttrKey, all_leaves, keystr

from jaxnn.tasks._model_calls import Apply, Init, ModelResult, call_arguments
from jaxnn.types import ConfigError, ModelState, Params, PyTree

_ARRAYS = (jax.Array, np.ndarray)
# The names of the dicts that hold an array, outermost first.
type _Name = Callable[[tuple[Any, ...], Any], list[str]]


def library_of(model: Any) -> str | None:
    """Returns ``flax.linen``, ``flax.nnx``, ``equinox`` or None, by names of modules: this imports none of them."""
    if isinstance(model, type):
        return None  # its type would be a metaclass of the library
    modules = [f"{base.__module__}." for base in type(model).__mro__]
    # Linen first: NNX's wrapper for Linen's modules is defined in NNX, and is a Linen module.
    libraries = ("flax.linen", "flax.nnx", "equinox")
    return next((name for name in libraries if any(module.startswith(f"{name}.") for module in modules)), None)


def is_module_tree(model: Any) -> bool:
    """Whether ``model`` is a callable pytree, or a pair of an Equinox module and its ``State``."""
    if isinstance(model, tuple) and len(model) == 2:
        return library_of(model[0]) == library_of(model[1]) == "equinox"
    return callable(model) and not all_leaves([model])


def from_nnx(build: Callable[[Any], Any]) -> tuple[Init, Apply]:
    """The Flax NNX module ``build(rngs)``: ``Param``s are parameters, other variables are state.

    Streams of random numbers are neither: each gets its own key in each call.
    """
    from flax import nnx  # takes long to import

    def split(module: Any) -> Any:
        """The definition, parameters, random state and all other variables."""
        if library_of(module) != "flax.nnx":
            raise ConfigError(f"a model factory of rngs must return a module of Flax NNX, not {module!r}.")
        return nnx.split(module, nnx.Param, nnx.RngState, ...)

    def init(key: jax.Array, inputs: PyTree) -> tuple[Params, ModelState]:
        _, params, _, state = split(build(nnx.Rngs(key)))
        return _nested(params, _variable_name), _nested(state, _variable_name)

    def apply(params: Params, model_state: ModelState, inputs: PyTree, key: jax.Array | None) -> ModelResult:
        graph, *shapes = jax.eval_shape(lambda: split(build(nnx.Rngs(0))))
        streams, base = itertools.count(), _drawn_from(key)

        def draw(leaf: Any) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)  # the number of draws so far
            own = jax.random.fold_in(base, next(streams))
            return jax.random.split(own, leaf.shape) if leaf.shape else own

        variables = (_filled(shapes[0], params, _variable_name), _filled(shapes[2], model_state, _variable_name))
        module = nnx.merge(graph, *variables, jax.tree.map(draw, shapes[1]))
        module.eval() if key is None else module.train()
        arguments, keywords = call_arguments(type(module).__call__, inputs, key is not None)
        outputs = module(*arguments, **keywords)
        if key is None:
            return ModelResult(outputs, model_state)
        # Without variables that the call has added, such as sown ones.
        state_shapes, updated = jax.eval_shape(lambda: model_state), _nested(split(module)[3], _variable_name)
        return ModelResult(outputs, _filled(state_shapes, updated, _variable_name))

    return init, apply


def from_tree(build: Callable[[jax.Array], Any], *, is_factory: bool) -> tuple[Init, Apply]:
    """The callable pytree ``build(key)``: an Equinox module, alone or with its ``State``, or one of a user.

    Floating arrays are parameters; other arrays and the ``State`` are state; all that is no array is constant. So is a
    tracer that a factory closes over, a swept field of a config: as a number it would be no array.
    """

    def structure() -> tuple[list[Any], Any]:
        """The leaves, shapes in place of arrays, and the tree of ``(module, state)``."""
        made: list[Any] = []

        def arrays(key: jax.Array) -> list[Any]:
            made[:] = jax.tree.flatten(_with_state(build(key)))
            return [leaf for leaf in made[0] if isinstance(leaf, _ARRAYS)]

        closed, shapes = jax.make_jaxpr(arrays, return_shape=True)(jax.random.key(0))
        outside = zip(closed.jaxpr.constvars, closed.consts, strict=True) if is_factory else ()
        traced = {id(variable): const for variable, const in outside if isinstance(const, jax.core.Tracer)}
        known = iter([traced.get(id(at), shape) for at, shape in zip(closed.jaxpr.outvars, shapes, strict=True)])
        return [next(known) if isinstance(leaf, _ARRAYS) else leaf for leaf in made[0]], made[1]

    def init(key: jax.Array, inputs: PyTree) -> tuple[Params, ModelState]:
        shapes, tree = structure()
        leaves = jax.tree.leaves(_with_state(build(key)))
        pairs = zip(leaves, shapes, strict=True)
        arrays = [leaf if isinstance(shape, jax.ShapeDtypeStruct) else None for leaf, shape in pairs]
        parts = _nested(jax.tree.unflatten(tree, arrays), _part_name)
        return parts.pop("params", {}), parts

    def apply(params: Params, model_state: ModelState, inputs: PyTree, key: jax.Array | None) -> ModelResult:
        shapes, tree = structure()
        module, state = _filled(jax.tree.unflatten(tree, shapes), {"params": params, **model_state}, _part_name)
        if library_of(module) == "equinox":
            outputs, state = _call_per_example(module, state, inputs, key)
            updated = {} if state is None else _nested((None, state), _part_name)
            return ModelResult(outputs, model_state if key is None else {**model_state, **updated})
        keys = {"key": key} if "key" in inspect.signature(module).parameters else {}
        arguments, keywords = call_arguments(type(module).__call__, inputs, key is not None)
        return ModelResult(module(*arguments, **keywords, **keys), model_state)

    return init, apply


def _call_per_example(module: Any, state: Any, inputs: PyTree, key: jax.Array | None) -> tuple[Any, Any]:
    """Calls an Equinox module as its documentation does: under ``vmap`` with ``axis_name="batch"``, state shared."""
    import equinox as eqx

    parameters, size = inspect.signature(module).parameters, jax.tree.leaves(inputs)[0].shape[0]
    wants_key = "key" in parameters and (key is not None or parameters["key"].default is inspect.Parameter.empty)
    module = eqx.nn.inference_mode(module, value=key is None)
    shared = {} if state is None else {"state": state}

    def call(example: PyTree, own: dict[str, jax.Array]) -> Any:
        arguments, keywords = call_arguments(type(module).__call__, example, key is not None)
        made = module(*arguments, **keywords, **shared, **own)
        return made if shared else (made, None)

    keys = {"key": jax.random.split(_drawn_from(key), size)} if wants_key else {}
    return jax.vmap(call, out_axes=(0, None), axis_name="batch")(inputs, keys)  # type: ignore[no-any-return]


def _drawn_from(key: jax.Array | None) -> jax.Array:
    """A constant in evaluation, where nothing should be drawn, but a module may split a key for layers."""
    return jax.random.key(0) if key is None else key


def _with_state(made: Any) -> tuple[Any, Any]:
    if not is_module_tree(made):
        raise ConfigError(
            "a model factory of key must return an Equinox module, alone or in a pair with its State, or a pytree with "
            f"a __call__, not {made!r}."
        )
    return made if isinstance(made, tuple) else (made, None)


def _variable_name(path: tuple[Any, ...], leaf: Any) -> list[str]:
    """Without the attribute ``value`` of a variable."""
    return [keystr((key,), simple=True) for key in path if not isinstance(key, GetAttrKey)]


def _part_name(path: tuple[Any, ...], leaf: Any) -> list[str]:
    """Of a leaf of ``(module, state)``."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
    part = "state" if path[0].idx else "params" if is_float else "constants"
    return [part, *(keystr((key,), simple=True) for key in path[1:])]


def _nested(tree: PyTree, name: _Name) -> dict[str, Any]:
    """The arrays of ``tree`` in dicts of strings, which checkpoints and optimizers of any library take."""
    leaves = jax.tree.leaves_with_path(tree)
    # Copies, since training may donate them; of a weak type they would change type in the first step.
    copies = {tuple(name(path, leaf)): jnp.array(leaf, jnp.result_type(leaf)) for path, leaf in leaves}
    return unflatten_dict(copies)  # type: ignore[no-any-return, no-untyped-call]


def _filled(tree: PyTree, nested: Mapping[str, Any], name: _Name) -> PyTree:
    """``tree`` with the arrays of ``nested`` in place of its shapes."""

    def look_up(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        names = name(path, leaf)
        found = functools.reduce(lambda place, key: place.get(key, {}), names, nested)
        if isinstance(found, Mapping) or jnp.shape(found) != leaf.shape:
            has = "absent" if isinstance(found, Mapping) else f"of shape {list(jnp.shape(found))}"
            raise ConfigError(
                f"the model has {'/'.join(names)} of shape {list(leaf.shape)}, which is {has} in the state: if its "
                "class was edited, train again, or use the state with the class that it was trained with."
            )
        return found

    return jax.tree.map_with_path(look_up, tree)
