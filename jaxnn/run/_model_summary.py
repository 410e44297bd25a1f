"""What a model computes, layer by layer: output shapes, parameters and operations, from shapes alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from jaxnn import engine
from jaxnn._text import Table, format_bytes
from jaxnn.data import steps_per_epoch
from jaxnn.observe import Traced, nbytes
from jaxnn.types import Batch, Experiment, Task, TrainState, check_int

type _Path = tuple[str, ...]

_SCOPE = re.compile(r"jaxnn\.layer\.(\d+)")


class Layer(NamedTuple):
    """A layer of a model, without the layers within it that have rows themselves."""

    path: str  # where its parameters are, ``MLP_0/Dense_1``; ``.`` of the model
    kind: str  # its class; of a model that is not of Flax Linen, the shapes of its parameters
    output: str  # the shape of its last output, ``[batch, 10]``; empty if unknown
    parameters: int  # numbers that are trained; of a shared layer once
    not_trained: int  # other numbers of its state: batch statistics, frozen parameters
    flops: float  # of the products of all its calls, for each example


class ModelSummary(NamedTuple):
    """The layers of a model in the order of their first calls; prints as a table."""

    layers: tuple[Layer, ...]
    flops: float  # of the products of a forward pass, for each example
    parameter_bytes: int
    not_trained_bytes: int
    optimizer_bytes: int

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(layer.parameters for layer in self.layers)

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        names = ("layer", "kind", "output", "parameters", "not trained", "FLOPs")
        columns = {name: row for name, row in zip(names, zip(*self.layers, strict=True), strict=True) if any(row)}
        texts = ([x if isinstance(x, str) else f"{x:,.0f}" if x else "" for x in row] for row in columns.values())
        others = {"not trained": self.not_trained_bytes, "optimizer's state": self.optimizer_bytes}
        sizes = "".join(f", {name} {format_bytes(size)}" for name, size in others.items() if size)
        note = f"{self.parameters:,} parameters, {format_bytes(self.parameter_bytes)}{sizes}"
        flops = f"; {self.flops:,.0f} FLOPs of products in a forward pass of an example" if self.flops else ""
        return Table([*columns], [*zip(*texts, strict=True)], [note + flops])


def model_summary(experiment: Experiment[Any], depth: int | None = None) -> ModelSummary:
    """Returns the layers of an experiment's model, from shapes: nothing is computed or allocated; data are loaded.

    Layers are those of Flax Linen that ``task.predict`` calls, or ``loss`` if there is no ``predict``; other parameters
    are groups by path. ``depth`` limits the number of names in a path: layers within are added to theirs.

    >>> jn.model_summary(experiment)
    layer      kind     output       parameters  FLOPs
    .          MLP      [batch, 10]
    Dense_0    Dense    [batch, 8]   520         1,024
    Dropout_0  Dropout  [batch, 8]
    Dense_1    Dense    [batch, 10]  90          160
    610 parameters, 2.4 KiB; 1,184 FLOPs of products in a forward pass of an example

    Raises ConfigError or DataError if the experiment cannot be run with these data.
    """
    source, config = engine.load_data(experiment).train, experiment.config
    steps_per_epoch(source.num_examples, config.batch_size)  # raises if there is not one
    examples = jax.tree.map(np.asarray, source.read(np.arange(config.batch_size)))
    batch = jax.eval_shape(source.as_batch, examples)
    state = jax.eval_shape(engine.make_init(experiment, source), examples)
    return summarise_model(experiment.task(config), state, batch, depth)


def summarise_model(task: Task, state: TrainState, batch: Batch, depth: int | None = None) -> ModelSummary:
    """Returns the layers that ``task`` calls for ``batch``; both arguments are shapes."""
    depth = None if depth is None else check_int("depth", depth, 0)
    leaves = _flat(state.params)
    state_leaves = _flat(state.model_state).items()
    # Without the name of a collection, which NNX has not.
    others = [(path[len(path) > 1 and path[0] not in state.params :], leaf) for path, leaf in state_leaves]
    size, model = len(batch.mask), (state.params, state.model_state)
    calls = _Calls({path: leaf.shape for path, leaf in [*others, *leaves.items()]}, depth, size)
    with nn.intercept_methods(calls):
        if task.predict is Task._field_defaults["predict"]:
            flops = Traced(task.loss, *model, batch, state.key).product_flops(by=_number)
        else:
            flops = Traced(task.predict, *model, batch.inputs).product_flops(by=_number)
    own: dict[_Path, list[Any]] = {path: [0, 0, 0.0, []] for path in calls.layers}
    for column, pairs in enumerate((leaves.items(), others)):
        for path, leaf in pairs:
            home = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in calls.layers), path[:-1][:depth])
            found = own.setdefault(home, [0, 0, 0.0, []])
            found[column] += math.prod(leaf.shape)
            found[3].append(f"{'/'.join(path[len(home) :])} {list(leaf.shape)}")
    for number, count in flops.items():
        if number:
            own[calls.homes[int(number)]][2] += count / size
    layers = (
        Layer("/".join(path) or ".", *calls.layers.get(path, (", ".join(shapes), "")), *numbers)
        for path, (*numbers, shapes) in own.items()
    )
    sizes = (nbytes(part) for part in (state.params, state.model_state, state.opt_state))
    return ModelSummary(tuple(layers), sum(flops.values()) / size, *sizes)


def _number(equation: Any, scopes: str) -> str:
    """The number of the innermost layer in which a product is traced; empty outside of all."""
    return next(iter(_SCOPE.findall(scopes)[::-1]), "")


def _flat(tree: Any) -> dict[_Path, Any]:
    """The arrays of nested dicts, or of another tree, by their paths."""
    return {
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


class _Calls:
    """An interceptor of Linen's methods: notes each layer, and names the scope of its operations by a number."""

    def __init__(self, shapes: Mapping[_Path, Any], depth: int | None, batch_size: int) -> None:
        self.layers: dict[_Path, tuple[str, str]] = {}  # kind and output, by path
        self.homes: list[_Path] = []  # by number, the path of the layer that has a row
        self._known, self._depth, self._batch_size = shapes, depth, batch_size
        self._prefix: _Path = ()

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, outer = context.module, self._prefix
        if context.method_name == "setup" or module.scope is None:
            return call(*args, **kwargs)
        if module.path == ():
            self._prefix = self._prefix_of(module.variables.get("params", {}))
        path = (*self._prefix, *module.path[: self._depth])
        has_row = len(module.path[: self._depth]) == len(module.path)
        if has_row:
            self.layers.setdefault(path, (type(module).__name__, ""))
        self.homes.append(path)
        with jax.named_scope(f"jaxnn.layer.{len(self.homes) - 1}"):
            output = call(*args, **kwargs)
        self._prefix = outer
        if has_row and (context.method_name == "__call__" or not self.layers[path][1]):
            self.layers[path] = type(module).__name__, self._shapes(output)
        return output

    def _prefix_of(self, params: Any) -> _Path:
        """Where a model's parameters are among those of the task, as in a task of several models."""
        own = {path: leaf.shape for path, leaf in _flat(params).items()}
        prefixes = sorted({path[:n] for path in self._known for n in range(len(path))}, key=len)
        return next((one for one in prefixes if all(self._known.get(one + path) == own[path] for path in own)), ())

    def _shapes(self, output: Any) -> str:
        shapes = [list(leaf.shape) for leaf in jax.tree.leaves(output)]
        named = [["batch", *shape[1:]] if shape[:1] == [self._batch_size] else shape for shape in shapes]
        return " ".join(f"[{', '.join(map(str, shape))}]" for shape in named)
