"""A `jax.custom_vjp` that supports forward mode too: `jax.jvp` and `jax.linearize`.

It is a `jax.custom_jvp` whose tangent is one linear operation, and the transpose of that is the custom backward pass.
`jax.custom_derivatives.linear_call` has no batching rule and cannot be differentiated by its residuals.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def vary_together[*Ts](*trees: *Ts) -> tuple[*Ts]:
    """Makes all arrays vary over the same mesh axes of `jax.shard_map`, as primitives and loops require."""
    leaves = jax.tree.leaves(trees)
    union: frozenset[Any] = frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in leaves))

    def vary(leaf: Any) -> Any:
        axes = tuple(sorted(union - jax.typeof(leaf).mat.varying))
        return jax.lax.pcast(leaf, axes, to="varying") if axes else leaf

    return jax.tree.map(vary, trees)  # type: ignore[no-any-return]


class custom_vjp[R]:  # noqa: N801
    """A function with a custom backward pass, differentiable in either mode and to any order.

    Use it as `jax.custom_vjp`: decorate ``f``, then call ``f.defvjp(forward, backward)``. In `jax.shard_map` all
    operands vary over the same mesh axes: the gradient of one that did not vary is summed. ``function`` takes
    and returns trees of arrays; its first ``num_static`` arguments are static, hashable values.
    """

    def __init__(self, function: Callable[..., R], num_static: int = 0) -> None:
        functools.update_wrapper(self, function)
        self._num_static = num_static
        self._call: Any = jax.custom_jvp(function, nondiff_argnums=tuple(range(num_static)))

    def __call__(self, *args: Any) -> R:
        """Calls the function."""
        static, operands = args[: self._num_static], args[self._num_static :]
        result: R = self._call(*static, *vary_together(*operands))
        return result

    def defvjp(
        self,
        forward: Callable[..., tuple[R, Any]],
        backward: Callable[..., tuple[Any, ...]],
        *,
        push_forward: bool = False,
    ) -> None:
        """Sets the rules: ``forward`` and ``backward`` are those of `jax.custom_vjp`.

        Forward mode transposes ``backward``, or with ``push_forward`` differentiates ``forward`` again, whose residuals
        then start with its operands. Use this for a ``backward`` that loops over large intermediate values: its
        transpose would hold those of all iterations at once.
        """

        def rule(*args: Any) -> tuple[R, R]:
            *static, primals, tangents = args
            out, residuals = forward(*static, *primals)
            kept, residuals_tree = jax.tree.flatten(residuals)
            leaves, tangents_tree = jax.tree.flatten(tangents)
            outs, out_tree = jax.tree.flatten(out)
            zeros = tuple(leaf.aval if isinstance(leaf, SymbolicZero) else None for leaf in leaves)
            outputs = tuple(jax.typeof(leaf).to_tangent_aval() for leaf in outs)
            rules = (backward, forward if push_forward else None, tuple(static))
            linear = _Linear(*rules, residuals_tree, tangents_tree, zeros, out_tree, outputs)
            operands = [leaf for leaf, zero in zip(leaves, zeros, strict=True) if zero is None]
            return out, linear.output.unflatten(_linear.bind(*kept, *operands, linear=linear))

        self._call.defjvp(rule, symbolic_zeros=True)


class _Linear(NamedTuple):
    """Parameters of the linear operation, whose operands are the residuals and the tangents that are not zero.

    For each enclosing `jax.vmap`, the outermost first, ``batch_axes`` has the batch axis of each residual, or None;
    the batch axes of tangents and outputs come first.
    """

    backward: Callable[..., tuple[Any, ...]]
    forward: Callable[..., Any] | None  # to differentiate in forward mode; None: `backward` is transposed
    static: tuple[Any, ...]
    residuals: Any  # their structure
    tangents: Any  # their structure
    zeros: tuple[Any, ...]  # for each leaf of the tangents the type of a zero, or None for an operand
    output: Any  # its structure
    outputs: tuple[Any, ...]  # the types of its leaves
    batch_axes: tuple[tuple[int | None, ...], ...] = ()

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The residuals, and the tangents."""
        count = self.residuals.num_leaves
        return list(operands[:count]), list(operands[count:])

    def batched(self, function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Maps ``function`` of residuals and (co)tangents over all members of the enclosing `jax.vmap`."""
        for axes in reversed(self.batch_axes):
            function = jax.vmap(function, in_axes=(list(axes), 0))
        return function

    def pull(self, residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        """The cotangents of one member's operands, from those of the outputs."""
        kept, cotangent = self.residuals.unflatten(residuals), self.output.unflatten(cotangents)
        results = jax.tree.leaves(self.backward(*self.static, kept, cotangent))
        floats = [zero for zero in self.zeros if zero is None or zero.dtype != jax.dtypes.float0]
        return [result for result, zero in zip(results, floats, strict=True) if zero is None]

    def push(self, residuals: list[Any], tangents: list[Any]) -> list[Any]:
        """The tangents of one member's outputs, from those of the operands."""
        if self.forward is None:
            like = [out.update(shape=out.shape[len(self.batch_axes) :]) for out in self.outputs]
            return list(jax.linear_transpose(functools.partial(self.pull, residuals), like)(tangents)[0])
        operands = iter(tangents)
        leaves = [next(operands) if zero is None else ad.zeros_like_aval(zero) for zero in self.zeros]
        of_operands = tuple(self.tangents.unflatten(leaves))
        primals = self.residuals.unflatten(residuals)[: len(of_operands)]
        forward = functools.partial(self.forward, *self.static)
        return jax.tree.leaves(jax.jvp(lambda *primals: forward(*primals)[0], primals, of_operands)[1])


def _evaluate(*operands: Any, linear: _Linear) -> list[Any]:
    return linear.batched(linear.push)(*linear.split(operands))


def _jvp(primals: Any, tangents: Any, *, linear: _Linear) -> Any:
    evaluate = functools.partial(_evaluate, linear=linear)
    return jax.jvp(evaluate, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _transpose(cotangents: Any, *operands: Any, linear: _Linear) -> list[Any]:
    residuals, tangents = linear.split(operands)
    pulled = linear.batched(linear.pull)(residuals, list(map(ad.instantiate_zeros, cotangents)))
    wanted = [x if ad.is_undefined_primal(tangent) else None for x, tangent in zip(pulled, tangents, strict=True)]
    return [None] * len(residuals) + wanted


def _batch(operands: Any, dims: Any, *, linear: _Linear) -> tuple[list[Any], list[int]]:
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    (residuals, tangents), (axes, tangent_axes) = linear.split(operands), linear.split(dims)
    # A tangent shared by all members is copied for each: its cotangent is summed over them.
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(tangents, tangent_axes, strict=True)
    ]
    outputs = tuple(out.update(shape=(size, *out.shape)) for out in linear.outputs)
    batched = linear._replace(outputs=outputs, batch_axes=(tuple(axes), *linear.batch_axes))
    outs = _linear.bind(*residuals, *moved, linear=batched)
    return outs, [0] * len(outs)


_linear = Primitive("linear_with_transpose")
_linear.multiple_results = True
_linear.def_impl(jax.jit(_evaluate, static_argnames="linear"))
_linear.def_abstract_eval(lambda *_, linear: list(linear.outputs))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_evaluate, multiple_results=True))
