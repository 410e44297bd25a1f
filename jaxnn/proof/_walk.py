"""A walk through a step's jaxpr, one operation at a time, back from a number that is not finite to its origin.

The program is evaluated operation by operation, calls inlined, loops as a whole. A result that is not finite is then
followed back, element by element: an operation is the origin if its element stays non-finite once every non-finite
input is replaced by a finite number, else the walk continues at the one input element that makes it so, which is found
by bisection. This needs no rule for any primitive, so native kernels are followed too. Only inputs of operations with
non-finite results are kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxnn._equations import constants_and_carries

# Calls that are walked through as if their equations stood in the caller. Others with a jaxpr, such as `shard_map`, are
# operations.
CALLS = frozenset(
    "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call custom_vmap_call".split()
)
# Numbers that take the place of those that are not finite: each makes some function infinite (acosh(0.5) is NaN).
_FILLS = 0.5, 2.0
_MOST_ORIGINS = 20  # that are looked at for one that is no constant

type Index = tuple[int, ...]
type Path = tuple[Any, ...]  # an equation, after the calls around it, outermost first


class Operation(NamedTuple):
    """One evaluation of an equation."""

    path: Path
    scopes: str
    inputs: tuple[int, ...]  # numbers of values
    outputs: tuple[int, ...]
    values: tuple[Any, ...]  # of the inputs; empty where they are not kept

    @property
    def equation(self) -> Any:
        """The equation."""
        return self.path[-1]


class Loop(NamedTuple):
    """An iteration of a loop that the walk entered."""

    operation: Operation
    iteration: int  # from 0, in the order of execution


class Element(NamedTuple):
    """An element of a result of an operation."""

    operation: Operation
    output: int  # the number of the result
    place: Index


class Origin(NamedTuple):
    """Where a number that is not finite comes from.

    Attributes:
        kind: ``operation``: it makes it of finite numbers, or NaN of a constant infinity; ``constant``: it stands in
            the program; ``input``: the program is given it; ``finite``: within a loop that gave it as a compiled
            program, its operations do not.
        element: that the operation makes; of the operation that gets the input or the constant; None: there is none.
        argument: the number of the input of the program, and the element in it.
        loops: around the operation, outermost first.
        became_nan: what a later operation made of this infinity.
    """

    kind: str
    element: Element | None
    argument: tuple[int, Index] = (-1, ())
    loops: tuple[Loop, ...] = ()
    became_nan: Element | None = None


class _Reached(Exception):
    """The evaluation came to the operation it was for, whose inputs these are."""


class Tape:
    """The operations of a program as they are evaluated; `_Reached` before the equation ``until``.

    ``finite`` are the numbers of inputs, by equations, whose numbers that are not finite are replaced; ``loop`` is that
    whose body is evaluated.
    """

    def __init__(
        self, until: Path | None = None, finite: Mapping[Path, int] = {}, loop: Operation | None = None
    ) -> None:
        self.operations: list[Operation] = []
        self.made_by: dict[int, tuple[Operation, int]] = {}  # by the number of a value: its operation, which output
        self.constants: set[int] = set()
        self.bad: set[int] = set()  # values that are not finite
        self.program: tuple[Any, Sequence[Any]] | None = None
        self._until = until
        self._finite = finite
        self.loop = loop
        self._count = 0

    def run(self, jaxpr: Any, arguments: Sequence[Any], wanted: Collection[int] | None = None) -> list[tuple[int, Any]]:
        """Evaluates ``jaxpr``, whose arguments get the numbers from 0, and returns number and value of each result.

        ``wanted`` are the results to compute; the others are None.
        """
        given = [(self._number(), value) for value in arguments]
        self.program = jaxpr, arguments
        with jax.debug_nans(False), jax.debug_infs(False):
            around = ((), "") if self.loop is None else (self.loop.path, self.loop.scopes)
            return self._run(jaxpr, given, *around, wanted)

    def _number(self) -> int:
        self._count += 1
        return self._count - 1

    def _run(
        self, jaxpr: Any, given: Sequence[tuple[int, Any]], path: Path, scopes: str, wanted: Collection[int] | None
    ) -> list[tuple[int, Any]]:
        jaxpr, constants = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        named = dict(zip(jaxpr.invars, given, strict=True))
        named |= {var: self._constant(value) for var, value in zip(jaxpr.constvars, constants, strict=False)}
        results = [var for at, var in enumerate(jaxpr.outvars) if wanted is None or at in wanted]
        todo = needed(jaxpr.eqns, results) if wanted is not None else jaxpr.eqns
        last = {var: at for at, equation in enumerate(todo) for var in _variables(equation.invars)}
        last |= dict.fromkeys(_variables(results), len(todo))

        def read(var: Any) -> tuple[int, Any]:
            return self._constant(var.val) if isinstance(var, core.Literal) else named[var]

        for at, equation in enumerate(todo):
            inputs = [read(var) for var in equation.invars]
            within = f"{scopes}/{equation.source_info.name_stack}"
            outputs = self._evaluate(equation, inputs, (*path, equation), within)
            named |= zip(equation.outvars, outputs, strict=True)
            for var in {*_variables(equation.invars), *equation.outvars}:
                if last.get(var, -1) <= at:
                    named.pop(var, None)
            del inputs, outputs
        return [read(var) if isinstance(var, core.Literal) or var in named else (-1, None) for var in jaxpr.outvars]

    def _constant(self, value: Any) -> tuple[int, Any]:
        self.constants.add(number := self._number())
        return number, jnp.asarray(value) if isinstance(value, np.generic | int | float) else value

    def _evaluate(self, equation: Any, inputs: list[tuple[int, Any]], path: Path, scopes: str) -> list[tuple[int, Any]]:
        name = equation.primitive.name
        if name in CALLS and len(inner := list(core.jaxprs_in_params(equation.params))) == 1:
            return self._run(inner[0], inputs, path, scopes, None)
        if name == "cond":
            branches = equation.params["branches"]
            taken = int(np.clip(inputs[0][1], 0, len(branches) - 1))
            return self._run(branches[taken], inputs[1:], path, scopes, None)
        values = [value for _, value in inputs]
        if (at := self._finite.get(path)) is not None:
            values[at] = jnp.nan_to_num(values[at], nan=_FILLS[0], posinf=_FILLS[0], neginf=_FILLS[0])
        if path == self._until:
            raise _Reached(*values)
        outputs = [(self._number(), value) for value in bind(equation, values)]
        masks = {number: not_finite(value) for number, value in outputs}
        bad = {number for number, mask in masks.items() if mask is not None and mask.any()}
        self.bad |= bad
        numbers = tuple(number for number, _ in inputs), tuple(number for number, _ in outputs)
        operation = Operation(path, scopes, *numbers, tuple(values) if bad else ())
        self.operations.append(operation)
        self.made_by |= {number: (operation, at) for at, number in enumerate(numbers[1])}
        return outputs


def _variables(variables: Sequence[Any]) -> list[Any]:
    return [var for var in variables if not isinstance(var, core.Literal)]


def needed(equations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The equations that ``results`` depend on, in order."""
    alive, found = set(_variables(results)), []
    for equation in reversed(equations):
        if alive.intersection(equation.outvars):
            alive.update(_variables(equation.invars))
            found.append(equation)
    return found[::-1]


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, a loop or a kernel as a whole."""
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*values, **parameters)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def not_finite(value: Any) -> np.ndarray | None:
    """Where a floating-point or complex array is not finite; None for other values."""
    if not jnp.issubdtype(getattr(value, "dtype", bool), jnp.inexact):
        return None
    mask: np.ndarray = ~np.isfinite(np.asarray(value))
    return mask


def origin(tape: Tape, number: int, index: Index) -> Origin:
    """Follows the element ``index`` of a value of ``tape``, which is not finite, back to where it comes from.

    Of several origins it is the first to be evaluated. A constant is none where there is another: an attention mask's
    -inf is no fault.
    """
    pending: list[_Step] = [_Step(number, index, None, None)]
    found: list[Origin] = []
    seen: set[tuple[int, Index]] = set()
    while pending and len(found) < _MOST_ORIGINS:
        if (one := _follow(tape, pending.pop(), pending, seen)) is not None:
            found.append(one)
    first = min(found, key=_rank)
    if first.kind == "constant" and first.became_nan is not None:  # such as 0 · inf of a constant
        return first._replace(kind="operation", element=first.became_nan, became_nan=None)
    if first.kind == "operation" and not first.loops and (behind := _behind(tape, first)) is not None:
        return behind
    return first


class _Step(NamedTuple):
    """An element on the way back."""

    number: int
    place: Index
    became_nan: Element | None  # what came of it
    user: Element | None


def _rank(found: Origin) -> tuple[bool, int]:
    operation = found.loops[0].operation if found.loops else found.element and found.element.operation
    early = found.kind == "input" or operation is None
    return found.kind == "constant", -1 if early else operation.outputs[0]  # type: ignore[union-attr]


def _follow(tape: Tape, step: _Step, pending: list[_Step], seen: set[tuple[int, Index]]) -> Origin | None:
    """Follows one element to its origin; further inputs that make it non-finite are added to ``pending``.

    None: another way came to an element on this one.
    """
    number, index, nan, user = step
    while number in tape.made_by:
        if (number, index) in seen:
            return None
        seen.add((number, index))
        operation, output = tape.made_by[number]
        here = Element(operation, output, index)
        if operation.equation.primitive.name in ("scan", "while"):
            entered = _in_loop(here)
            nan = entered.became_nan or nan
            if entered.kind != "input":
                return entered._replace(became_nan=nan)
            argument, index = entered.argument
            number, user = operation.inputs[argument], here
            continue
        found = causes(here)
        if not found:
            return Origin("operation", here, became_nan=nan)
        is_nan = bool(np.isnan(np.asarray(bind(operation.equation, operation.values)[output])[index]))
        steps = []
        for at, element in found:
            inf = is_nan and not np.isnan(np.asarray(operation.values[at])[element])
            steps.append(_Step(operation.inputs[at], element, here if inf else nan, here))
        pending.extend(reversed(steps[1:]))
        number, index, nan, user = steps[0]
    kind = "constant" if number in tape.constants else "input"
    return Origin(kind, user, (number, index), became_nan=nan)


def _behind(tape: Tape, found: Origin) -> Origin | None:
    """An earlier origin that an operation hid, as exp(-inf) = 0 before log(0), without which this would be finite."""
    assert found.element is not None and tape.program is not None
    operation, output, index = found.element
    upstream, todo = {}, list(operation.inputs)
    while todo:
        if (number := todo.pop()) in tape.made_by and number not in upstream:
            upstream[number] = tape.made_by[number][0]
            todo += upstream[number].inputs
    hiding = {one.outputs[0]: one for one in upstream.values() if not tape.bad.intersection(one.outputs)}
    tried = 0
    for _, one in sorted(hiding.items()):
        for at, number in enumerate(one.inputs):
            if number not in tape.bad or number not in tape.made_by or tried >= _MOST_ORIGINS:
                continue
            maker, which = tape.made_by[number]
            mask = not_finite(bind(maker.equation, maker.values)[which])
            assert mask is not None
            earlier = origin(tape, number, tuple(int(i) for i in np.argwhere(mask)[0]))
            if earlier.kind == "constant" or (earlier.kind == "operation" and earlier.element == found.element):
                continue
            tried += 1
            try:
                Tape(operation.path, {one.path: at}, tape.loop).run(*tape.program)
            except _Reached as reached:
                if np.isfinite(np.asarray(bind(operation.equation, reached.args)[output])[index]):
                    return earlier
    return None


def causes(result: Element) -> list[tuple[int, Index]]:
    """The inputs, NaN first, and of each the element, that make a result non-finite; none: the operation does."""
    (operation, output, index), equation = result, result.operation.equation
    values = operation.values
    masks = {at: mask for at, mask in enumerate(map(not_finite, values)) if mask is not None and mask.any()}

    def stays(kept: Mapping[int, np.ndarray], fill: float) -> bool:
        """Whether it is not finite if only the numbers in ``kept`` are not."""
        replaced = list(values)
        for at, mask in masks.items():
            dropped = mask & ~kept[at] if at in kept else mask
            replaced[at] = jnp.asarray(np.where(dropped, np.asarray(fill, values[at].dtype), np.asarray(values[at])))
        return not np.isfinite(np.asarray(bind(equation, replaced)[output])[index])

    fill = next((fill for fill in _FILLS if not stays({}, fill)), None) if masks else None
    if fill is None:
        return []
    alone = [at for at in masks if stays({at: masks[at]}, fill)]
    others = {} if alone else masks  # if only several together make it

    def alone_stays(at: int, part: np.ndarray) -> bool:
        return stays({**others, at: part}, fill)

    found = []
    for at in alone or [*masks][:1]:
        has_nan = np.isnan(np.asarray(values[at]))
        element = _bisect(masks[at], has_nan, index, functools.partial(alone_stays, at))
        found.append((at, element, not has_nan[element]))
    return [(at, element) for at, element, _ in sorted(found, key=lambda one: one[2])]


def _bisect(mask: np.ndarray, nan: np.ndarray, index: Index, stays: Callable[[np.ndarray], bool]) -> Index:
    """An element of ``mask`` that makes the result non-finite, if possible at ``index``, else a NaN."""
    if len(index) == mask.ndim and all(i < n for i, n in zip(index, mask.shape, strict=True)) and mask[index]:
        one = np.zeros_like(mask)
        one[index] = True
        if stays(one):
            return index
    places = np.flatnonzero(mask)
    if nan.any() and not nan[mask].all() and stays(mask & nan):
        places = np.flatnonzero(mask & nan)
    while len(places) > 1:
        half = places[: len(places) // 2]
        part = np.zeros(mask.size, bool)
        part[half] = True
        places = half if stays(part.reshape(mask.shape)) else places[len(half) :]
    return tuple(int(i) for i in np.unravel_index(places[0], mask.shape))


@dataclasses.dataclass(frozen=True)
class _Iterations:
    """The body of a loop and what each iteration gets."""

    body: Any
    constants: Sequence[Any]
    carries: list[Sequence[Any]]  # before each iteration, in the order of execution
    rows: Sequence[Any]  # arrays with an axis of iterations
    first: int  # the number of the loop's input that is the body's first constant
    reverse: bool

    def row(self, iteration: int) -> int:
        """The row of the arrays that an iteration gets."""
        return len(self.carries) - 1 - iteration if self.reverse else iteration

    def arguments(self, iteration: int) -> list[Any]:
        """Of the body."""
        rows = [jax.tree.map(lambda x: x[self.row(iteration)], array) for array in self.rows]
        return [*self.constants, *self.carries[iteration], *rows]


def _iterations(operation: Operation) -> _Iterations:
    """Runs a loop iteration by iteration, and keeps what it carries."""
    equation, values = operation.equation, operation.values
    params = equation.params
    if equation.primitive.name == "scan":
        body = params["jaxpr"]
        num_constants, num_carries = constants_and_carries(equation, body)
        constants, carry = values[:num_constants], values[num_constants : num_constants + num_carries]
        rows, reverse = values[num_constants + num_carries :], bool(params["reverse"])
        loop = _Iterations(body, constants, [carry] * params["length"], rows, 0, reverse)
        evaluate = core.jaxpr_as_fun(body)
        for iteration in range(params["length"] - 1):
            loop.carries[iteration + 1] = evaluate(*loop.arguments(iteration))[:num_carries]
        return loop
    first, count = params["cond_nconsts"], params["body_nconsts"]
    constants, carry = values[first : first + count], values[first + count :]
    loop = _Iterations(params["body_jaxpr"], constants, [], (), first, False)
    evaluate, continues = core.jaxpr_as_fun(params["body_jaxpr"]), core.jaxpr_as_fun(params["cond_jaxpr"])
    while bool(continues(*values[:first], *carry)[0]):
        loop.carries.append(carry)
        carry = evaluate(*constants, *carry)
    return loop


def _in_loop(result: Element) -> Origin:
    """As `origin`, within a loop; its input is one of the loop's."""
    operation, output, index = result
    loop = _iterations(operation)
    num_constants, num_carries = len(loop.constants), len(operation.outputs)
    iteration, nan = len(loop.carries) - 1, None
    if operation.equation.primitive.name == "scan":
        num_carries = len(loop.carries[0])
    if output >= num_carries:
        iteration, index = loop.row(index[0]), index[1:]
    argument = num_constants + output
    while iteration >= 0:
        tape = Tape(loop=operation)
        number, value = tape.run(loop.body, loop.arguments(iteration))[output]
        here = Loop(operation, iteration)
        if np.isfinite(np.asarray(value)[index]):
            return Origin("finite", result, loops=(here,))
        found = origin(tape, number, index)
        nan = found.became_nan or nan
        if found.kind != "input":
            return found._replace(loops=(here, *found.loops), became_nan=nan)
        argument, index = found.argument
        output = argument - num_constants
        if output >= num_carries:
            index = loop.row(iteration), *index
        if not 0 <= output < num_carries:
            break
        iteration -= 1
    return Origin("input", result, (loop.first + argument, index), became_nan=nan)


def inputs_at(program: Any, arguments: Sequence[Any], found: Origin) -> tuple[Any, ...] | None:
    """The inputs that the operation of an origin gets from other arguments of the program; None: it is not reached."""
    assert found.element is not None
    inputs: tuple[Any, ...] | None = None
    around: Operation | None = None
    for step in (*found.loops, Loop(found.element.operation, 0)):
        inputs = None
        try:
            Tape(step.operation.path, loop=around).run(program, arguments)
        except _Reached as reached:
            inputs = reached.args
        if inputs is None or step.operation is found.element.operation:
            break
        loop = _iterations(step.operation._replace(values=inputs))
        if step.iteration >= len(loop.carries):
            return None
        program, arguments, around = loop.body, loop.arguments(step.iteration), step.operation
    return inputs
