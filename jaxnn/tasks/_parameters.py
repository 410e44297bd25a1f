"""Tasks that train a part of their parameters: frozen ones, and low-rank adapters of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxnn.optim import first_matches
from jaxnn.tasks._contract import LossResult
from jaxnn.types import Batch, ConfigError, ModelState, Params, Splits, Task, check_int, named_leaves, path_name

FROZEN = "frozen"
"""The collection of the model state that holds parameters which are not trained; it is sharded as parameters are."""
ADAPTERS = "adapters"


def freeze(task: Task, *patterns: str) -> Task:
    """Returns ``task`` with the parameters whose paths match one of ``patterns`` kept as they are.

    They move to the collection ``frozen`` of the model state: no gradient and no optimizer state is computed for them.
    A pattern is a regular expression for the first names of a path, such as ``"teacher"`` or ``"Dense_[01]/kernel"``; a
    batch statistic is no parameter, and moves as before. With `Experiment.params`, they start from other arrays.

    >>> task = jn.tasks.freeze(jn.tasks.classification(jn.models.MLP((8, 10))), "Dense_0")
    >>> params, model_state = task.init(jax.random.key(0), batch)
    >>> sorted(params), sorted(model_state["frozen"])
    (['Dense_1'], ['Dense_0'])

    Raises:
        ConfigError: when initialised, if a pattern matches no parameter, or nothing is left to train.
    """

    def init(key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        params, model_state = _plain(*task.init(key, batch))
        names = named_leaves(linen.unbox(params))
        kept = first_matches("freeze", patterns, names)
        if not 0 < len(kept) < len(names):
            which = "all parameters: leave some to train" if kept else "none: give a pattern"
            raise ConfigError(f"freeze: {', '.join(patterns) or 'no patterns'} match {which}.")
        frozen = _select(params, kept.__contains__)
        return _select(params, lambda name: name not in kept), {**model_state, FROZEN: frozen}

    return _with_params(task, init, _joined)


def lora(
    task: Task, rank: int, *, alpha: float | None = None, match: str = r".*kernel$", train: tuple[str, ...] = ()
) -> Task:
    """Returns ``task`` with frozen parameters and low-rank adapters (Hu et al. 2021, arXiv:2106.09685).

    Of a parameter of two axes or more whose path matches ``match`` the task computes with ``kernel + alpha / rank *
    (a @ b)``, with trained ``a [inputs, rank]`` and ``b [rank, outputs]``; all axes but the last count as inputs.
    ``b`` starts at 0. ``alpha`` is by default ``rank``. Parameters that match a pattern of ``train``, as of `freeze`,
    are trained themselves, such as a new last layer. `merge_lora` makes plain parameters of the result.

    >>> task = jn.tasks.lora(jn.tasks.classification(jn.models.MLP((8, 10))), rank=2, train=("Dense_1",))
    >>> params, model_state = task.init(jax.random.key(0), batch)
    >>> params["adapters"]["Dense_0/kernel"]["b"].shape, sorted(params["Dense_1"])
    ((2, 8), ['bias', 'kernel'])

    Raises:
        ConfigError: when initialised, if there is nothing to adapt.
    """
    check_int("lora: rank", rank)
    if isinstance(train, str):
        raise ConfigError(f"lora: train is {train!r}, and must be a tuple of patterns.")
    scale = (rank if alpha is None else alpha) / rank

    def init(key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        params, model_state = _plain(*task.init(key, batch))
        names = named_leaves(linen.unbox(params))
        trained = first_matches("lora", train, names)
        wide = [name for name, leaf in names.items() if name not in trained and jnp.ndim(leaf) >= 2]
        adapted = first_matches("lora, of frozen parameters of two axes", (match,), wide)
        adapters: dict[str, Any] = {}
        for index, (name, leaf) in enumerate(names.items()):
            if name in adapted:
                rows = leaf.size // leaf.shape[-1]
                a = jax.random.normal(jax.random.fold_in(key, index), (rows, rank), leaf.dtype) / jnp.sqrt(rows)
                adapters[name] = {"a": a, "b": jnp.zeros((rank, leaf.shape[-1]), leaf.dtype)}
        frozen = _select(params, lambda name: name not in trained)
        return {**_select(params, trained.__contains__), ADAPTERS: adapters}, {**model_state, FROZEN: frozen}

    return _with_params(task, init, lambda params, frozen: merge_lora(params, frozen, scale))


def merge_lora(params: Params, frozen: Params, scale: float = 1.0) -> Params:
    """Returns the plain parameters of trained ``params`` and ``model_state["frozen"]`` of a task by `lora`.

    ``scale`` is ``alpha / rank``.

    >>> task = jn.tasks.lora(jn.tasks.classification(jn.models.MLP((8, 10))), rank=2)
    >>> params, model_state = task.init(jax.random.key(0), batch)
    >>> sorted(jn.tasks.merge_lora(params, model_state["frozen"]))
    ['Dense_0', 'Dense_1']
    """
    adapters = params[ADAPTERS]

    def adapted(path: Any, leaf: jax.Array) -> Any:
        name = path_name(path)
        if name not in adapters:
            return leaf
        return leaf + scale * (adapters[name]["a"] @ adapters[name]["b"]).reshape(leaf.shape)

    rest = {name: part for name, part in params.items() if name != ADAPTERS}
    return _joined(rest, jax.tree.map_with_path(adapted, frozen))


def _with_params(
    task: Task,
    init: Callable[[jax.Array, Batch], tuple[Params, ModelState]],
    whole: Callable[[Params, Params], Params],
) -> Task:
    """``task`` with parameters made by ``whole`` of the trained and the frozen ones."""

    def split(params: Params, model_state: ModelState) -> tuple[Params, ModelState]:
        rest = {name: part for name, part in model_state.items() if name != FROZEN}
        return whole(params, model_state[FROZEN]), rest

    def loss(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> LossResult:
        value, (updated, metrics) = task.loss(*split(params, model_state), batch, key)
        return value, ({**updated, FROZEN: model_state[FROZEN]}, metrics)

    def check(params: Params, model_state: ModelState, batch: Batch, splits: Splits) -> None:
        shapes: Any = jax.eval_shape(split, params, model_state)
        task.check(shapes[0], shapes[1], batch, splits)

    evaluate, predict = (
        lambda params, model_state, *rest, function=function: function(*split(params, model_state), *rest)
        for function in (task.evaluate, task.predict)
    )
    return task._replace(init=init, loss=loss, evaluate=evaluate, predict=predict, check=check, evaluate_again=None)


def _plain(params: Params, model_state: ModelState) -> tuple[Params, ModelState]:
    if not isinstance(params, Mapping) or FROZEN in model_state:
        raise ConfigError(
            "freeze and lora take a task with parameters in nested dicts, and none that is frozen already: give all "
            "patterns to one of them."
        )
    return params, model_state


# By tuples of names: Haiku's names have slashes.
def _select(params: Params, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The parts of nested dicts whose paths are ``wanted``."""
    flat: dict[tuple[str, ...], Any] = flatten_dict(params)  # type: ignore[no-untyped-call]
    found = {path: leaf for path, leaf in flat.items() if wanted("/".join(path))}
    return unflatten_dict(found)  # type: ignore[no-any-return, no-untyped-call]


def _joined(one: Params, other: Params) -> dict[str, Any]:
    """Two nested dicts without a common leaf as one."""
    both = flatten_dict(one) | flatten_dict(other)  # type: ignore[no-untyped-call]
    return unflatten_dict(both)  # type: ignore[no-any-return, no-untyped-call]
