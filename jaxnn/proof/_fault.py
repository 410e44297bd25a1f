"""What makes the first number of a step that is not finite: the operation, its line of code and its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxnn._equations import equation_paths
from jaxnn.proof._source_lines import SourceLine, calls, num_common, source_line
from jaxnn.proof._walk import CALLS, Element, Origin, Tape, bind, inputs_at, not_finite, origin
from jaxnn.types import Batch, Metrics, TrainState, named_leaves

_MOST_ALIKE = 5  # operations that one operation and its derivative become in the forward pass


@dataclasses.dataclass(frozen=True)
class Inputs:
    """An array that an operation gets.

    Attributes:
        shape: such as ``float32[32, 10]``.
        low: its smallest finite number.
        high: its largest finite number.
        zeros: how many of its numbers are zero.
        non_finite: how many are not finite.
        here: the number at the element that is not finite in the result; None: its shape does not say which that is.
    """

    shape: str
    low: float
    high: float
    zeros: int
    non_finite: int
    here: float | None

    def __str__(self) -> str:
        parts = [f"{self.shape}: {self.low:.6g} to {self.high:.6g}"]
        parts += [f"{self.zeros:,} zero"] * bool(self.zeros) + [f"{self.non_finite:,} not finite"] * bool(
            self.non_finite
        )
        return ", ".join(parts) + ("" if self.here is None else f"; here {self.here:.6g}")


@dataclasses.dataclass(frozen=True, repr=False)
class NumericFault:
    """The origin of the first number that is not finite and reaches the loss or the new state.

    Attributes:
        result: the result that it reaches, such as ``loss`` or ``params/Dense_0/kernel``.
        kind: ``operation``: it makes it of finite numbers; ``constant``: it stands in the program; ``input``: the
            state or the batch holds it; ``finite``: the loop's operations, one at a time, do not make it.
        operation: such as ``log of float32[32, 10]``.
        direction: ``forward pass``, ``backward pass`` or ``update``.
        derivative_of: of an operation of the backward pass, the one of the forward pass.
        scope: such as ``transpose(jvp(MLP))/Dense_0``.
        line: of the user's code.
        loops: the iterations around it, outermost first, such as ``iteration 3 of scan``.
        index: the element of the result, or of the input.
        value: of that element: ``nan``, ``inf`` or ``-inf``.
        inputs: of the operation.
        became_nan: the later operation that made NaN of the infinity, and its line.
        leaf: of an input, its name, such as ``params/Dense_0/kernel`` or ``batch/inputs``.
        count: how many numbers of the leaf, or of the operation's result, are not finite.
        size: how many numbers it has.
        rows: of a batch, the rows that hold them.
    """

    result: str
    kind: str
    operation: str = ""
    direction: str = ""
    derivative_of: str | None = None
    scope: str = ""
    line: SourceLine | None = None
    loops: tuple[str, ...] = ()
    index: tuple[int, ...] = ()
    value: str = "nan"
    inputs: tuple[Inputs, ...] = ()
    became_nan: str | None = None
    leaf: str | None = None
    count: int = 0
    size: int = 0
    rows: tuple[int, ...] = ()

    def rows_of_text(self) -> list[tuple[str, str]]:
        """What is printed, as (name, value)."""
        at = str(list(self.index)) if self.index else "its only number"
        if self.kind == "input":
            what = f"{self.leaf} is given with {self.count:,} of {self.size:,} numbers not finite; the first at {at}"
            rows = [("input", what), *([("reached by", self.operation)] if self.operation else [])]
        else:
            said = {"constant": f"the constant {self.value} of the program reaches the result: ", "finite": "within "}
            of = f", of the derivative of {self.derivative_of}" if self.derivative_of else ""
            rows = [("operation", said.get(self.kind, "") + self.operation + of)]
            rows += [("result", f"{self.value} at {at}; {self.count:,} of {self.size:,} numbers are not finite")]
        rows += [("line", str(self.line))] if self.line else []
        rows += [("where", ", ".join(filter(None, (self.direction, self.scope, *self.loops))))]
        rows += [
            (f"input {at}" if len(self.inputs) > 1 else "input", str(one)) for at, one in enumerate(self.inputs, 1)
        ]
        rows += [("then", f"it became NaN in {self.became_nan}")] if self.became_nan else []
        return [*rows, ("reaches", self.result)]

    def __repr__(self) -> str:
        return "\n".join(f"{name:<12}{value}" for name, value in self.rows_of_text())


@dataclasses.dataclass(frozen=True)
class Program:
    """A step as a jaxpr, with the names of its results."""

    jaxpr: Any
    outputs: dict[str, int]  # by name: params/…, model_state/…, opt_state/…, loss, metrics

    @classmethod
    def trace(cls, step: Callable[..., Any], state: TrainState, batch: Batch) -> Program:
        """Of ``step(state, batch) -> (state, metrics)``."""
        jaxpr, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
        new, metrics = shapes
        names = [*named_leaves(new), *metrics]
        return cls(jaxpr, {name: at for at, name in enumerate(names)})

    def find(self, state: TrainState, batch: Batch) -> tuple[NumericFault, Origin] | None:
        """The fault of a step, and its place in the program; None: all results are finite."""
        arguments = jax.tree.leaves((state, batch))
        before = named_leaves(state)
        for names in (["loss"], [name for name in self.outputs if name != "loss"]):
            tape = Tape()
            results = tape.run(self.jaxpr, arguments, {self.outputs[name] for name in names})
            for name in sorted(names, key=_order):
                number, value = results[self.outputs[name]]
                mask = not_finite(value)
                if mask is not None and name in before and mask.shape == before[name].shape:
                    old = not_finite(before[name])
                    mask = mask & ~old if old is not None else mask  # such as the best loss so far, inf
                if mask is not None and mask.any():
                    index = tuple(int(i) for i in np.argwhere(mask)[0])
                    found = origin(tape, number, index)
                    return self._fault(name, found, state, batch), found
        return None

    def inputs_at(self, state: TrainState, batch: Batch, found: Origin) -> tuple[Any, ...] | None:
        """The inputs of the operation of a fault in another step; None: that step does not come to it."""
        return inputs_at(self.jaxpr, jax.tree.leaves((state, batch)), found)

    def _fault(self, result: str, found: Origin, state: TrainState, batch: Batch) -> NumericFault:
        about: dict[str, Any] = {} if found.element is None else self._about(result, found.element)
        about["loops"] = tuple(
            f"iteration {loop.iteration + 1} of {loop.operation.equation.primitive.name}" for loop in found.loops
        )
        if found.became_nan is not None:
            nan = self._about(result, found.became_nan)
            about["became_nan"] = f"{nan['operation']} in the {nan['direction']}, {nan['line']}"
        if found.kind == "input":
            return NumericFault(result, "input", **about | _held(found.argument, state, batch))
        assert found.element is not None
        (operation, output, index), inputs = found.element, found.element.operation.values
        made = np.asarray(bind(operation.equation, inputs)[output])
        element: dict[str, Any] = {
            "index": index,
            "value": str(made[index]),
            "count": int((~np.isfinite(made)).sum()),
            "size": made.size,
        }
        stats = tuple(describe(value, _place(value.shape, made.shape, index)) for value in inputs)
        return NumericFault(result, found.kind, inputs=stats, **about, **element)

    def _about(self, result: str, element: Element) -> dict[str, Any]:
        """The names of an operation."""
        path, scopes, *_, values = element.operation
        tracebacks = [equation.source_info.traceback for equation in path]
        line = source_line(tracebacks, __file__)
        derivative = self._differentiated(path, scopes, line) if "jvp(" in scopes and result != "loss" else None
        is_backward = "transpose(" in scopes or derivative is not None
        is_forward = "jvp(" in scopes or result == "loss"
        direction = "backward pass" if is_backward else "forward pass" if is_forward else "update"
        shapes = " and ".join(map(shape_of, values))
        name = kernel_name(path[-1])
        return {
            "operation": f"{name} of {shapes}" if shapes else name,
            "direction": direction,
            "derivative_of": derivative,
            "scope": scopes.strip("/"),
            "line": line,
        }

    def _differentiated(self, path: tuple[Any, ...], scopes: str, line: SourceLine | None) -> str | None:
        """The operation of the forward pass that JAX differentiated to an equation; None: it is no derivative."""
        own = calls([equation.source_info.traceback for equation in path])
        forward = [
            (other[-1], [equation.source_info.traceback for equation in other], names)
            for other, names in equation_paths(self.jaxpr)
            if "transpose(" not in names and other[-1].primitive.name not in CALLS
        ]
        if "transpose(" in scopes:
            numbers = [num_common(own, calls(tracebacks)) for _, tracebacks, _ in forward]
            most = max(numbers, default=0)
            alike = [one for one, number in zip(forward, numbers, strict=True) if number == most][:1]
        else:  # what a derivative needs is computed in the forward pass, with the calls of the operation
            alike = [one for one in forward if one[2] == scopes and calls(one[1]) == own]
            alike = alike[:1] if len(alike) <= _MOST_ALIKE else []
        for equation, tracebacks, _ in alike:
            if equation is not path[-1] and line is not None and source_line(tracebacks, __file__) == line:
                return f"{kernel_name(equation)} of {' and '.join(shape_of(var.aval) for var in equation.invars)}"
        return None


def first_fault(
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]], state: TrainState, batch: Batch
) -> NumericFault | None:
    """Evaluates a training step one operation at a time, and finds its first number that is not finite.

    ``step`` is a function that is not compiled, such as `jn.steps.make_train_step` returns. None: the loss, the
    metrics and the new state are finite.

    >>> task, optimizer = jn.tasks.classification(jn.models.MLP((8, 10))), optax.adam(1e-3)
    >>> step = jn.steps.make_train_step(task, optimizer)
    >>> state = jn.steps.init_train_state(task, optimizer, jax.random.key(0), batch)
    >>> jn.proof.first_fault(step, state, batch)  # doctest: +SKIP
    """
    found = Program.trace(step, state, batch).find(state, batch)
    return None if found is None else found[0]


def _order(name: str) -> int:
    parts = ("loss/", "params/", "model_state/", "opt_state/")
    return next((at for at, part in enumerate(parts) if f"{name}/".startswith(part)), len(parts))


def kernel_name(equation: Any) -> str:
    """The name of an operation; of a native kernel, the kernel's."""
    target = equation.params.get("target_name")
    return str(target or equation.primitive.name)


def shape_of(value: Any) -> str:
    """``float32[32, 10]``."""
    return f"{value.dtype}{list(value.shape)}"


def describe(value: Any, index: tuple[int, ...] | None) -> Inputs:
    """The numbers of an operation's input; ``index`` is the element to show."""
    if not np.issubdtype(getattr(value, "dtype", object), np.number) and not_finite(value) is None:
        return Inputs(shape_of(value), 0, 0, 0, 0, None)
    numbers = np.asarray(value)
    wide = numbers.astype(np.complex128 if np.iscomplexobj(numbers) else np.float64)
    mask = np.isfinite(wide)
    low, high = (float(np.real(of(wide[mask]))) if mask.any() else np.nan for of in (np.min, np.max))
    here = None if index is None else float(np.real(wide[index]))
    return Inputs(shape_of(value), low, high, int((wide == 0).sum()), int((~mask).sum()), here)


def _place(shape: tuple[int, ...], result: tuple[int, ...], index: tuple[int, ...]) -> tuple[int, ...] | None:
    """The element of an input that an element of the result is computed of, if each is of one."""
    if not all(n in (1, m) for n, m in zip(shape, result, strict=False)) or len(shape) not in (0, len(result)):
        return None
    return tuple(min(i, n - 1) for i, n in zip(index, shape, strict=False))


def _held(argument: tuple[int, tuple[int, ...]], state: TrainState, batch: Batch) -> dict[str, Any]:
    """What an input of the program holds."""
    leaves = {**named_leaves(state), **{f"batch/{name}": leaf for name, leaf in named_leaves(batch).items()}}
    name, leaf = [*leaves.items()][argument[0]]
    mask = not_finite(leaf)
    assert mask is not None
    places = np.argwhere(mask)
    rows = tuple(map(int, np.unique(places[:, 0]))) if name.startswith("batch/") and mask.ndim else ()
    index = tuple(map(int, places[0]))
    return {
        "leaf": name,
        "index": index,
        "value": str(np.asarray(leaf)[index]),
        "count": len(places),
        "size": mask.size,
        "rows": rows,
    }
