"""An operation with a native form: pure JAX defines it, and native code computes it where that fits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from jaxnn.kernels._choice import choose, scope
from jaxnn.kernels._custom_vjp import custom_vjp, vary_together
from jaxnn.kernels._package import package_obstacle

_products: dict[str, Callable[..., float]] = {}  # by the name of a primitive


class Kernel(NamedTuple):
    """A kernel: an operation's fallback in pure JAX, which defines it, and its native form, used where it fits.

    All functions are called with the operands, trees of arrays, and with the static arguments by name, which are
    hashable. The fallback gives the derivatives of higher order, those in forward mode, and what programs for other
    platforms compute. ``docs/kernels.md`` has the recipe for a new one.

    >>> from jaxnn.kernels import Kernel, native_call
    >>> double = Kernel(
    ...     "double",
    ...     fallback=lambda x: 2 * x,
    ...     native=lambda x: native_call("my_double", [x.shape], x)[0],
    ...     unfit=lambda x: None if x.dtype == jnp.float32 else "it computes in float32",
    ... )
    >>> double(jnp.arange(3))
    Array([0, 2, 4], dtype=int32)

    Attributes:
        name: of the operation, in scopes, reports and errors.
        fallback: ``fallback(*operands, **static)`` in pure JAX: meaning, derivatives, batching and cost.
        native: likewise, by `native_call`; None: the first result of the gradient's ``forward``; the fallback itself,
            if only the gradient has a native form.
        unfit: likewise, returns the reason why the native form cannot compute with these shapes and dtypes, or None.
        slower: likewise, the reason why it is not faster here; a choice by name ignores it.
        gradient: ``(forward, backward)`` in native form; None: the derivatives are those of the fallback.
            ``forward(*operands, **static)`` returns the result and a tuple of what the backward pass needs besides the
            operands; ``backward(operands, kept, cotangent, **static)`` returns a cotangent for each operand, None for
            integers.
        fallback_gradient: the same two in pure JAX, if they take less than to differentiate the fallback, which
            computes its result once more.
        products: ``products(*operands, **static)`` is the number of multiplications, if the fallback's program does not
            show it.
        fallback_name: the name of the fallback as an ``implementation``.
        portable: whether programs hold the fallback beside the native form, for other platforms and for derivatives.
    """

    name: str
    fallback: Callable[..., Any]
    native: Callable[..., Any] | None
    unfit: Callable[..., str | None]
    slower: Callable[..., str | None] = lambda *operands, **static: None
    gradient: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    fallback_gradient: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    products: Callable[..., float] | None = None
    fallback_name: str = "xla"
    portable: bool = True

    def obstacle(self, *operands: Any, requested: bool = False, **static: Any) -> str | None:
        """The reason why the native form is not used here, or None; if it is ``requested``, speed is no reason."""
        sizes = [size for leaf in jax.tree.leaves((operands, static)) for size in getattr(leaf, "shape", ())]
        if not requested and all(isinstance(size, int) for size in sizes):
            # First, since a package that would not be used is not missed.
            if (reason := self.slower(*operands, **static)) is not None:
                return reason
        return package_obstacle() or self.unfit(*operands, **static)

    def is_chosen(self, *operands: Any, **static: Any) -> bool:
        """Whether the native form is used for operands of these types; the report has the reason if it does not fit."""
        preferred = {"cpu": ("native", self.fallback_name), "other": (self.fallback_name,)}
        return choose(self.name, None, {"native": self.obstacle(*operands, **static)}, preferred) == "native"

    def __call__(self, *operands: Any, **static: Hashable) -> Any:
        """Computes the operation by the form that is faster here, in a scope that names it."""
        if not self.is_chosen(*operands, **static):
            with scope(self.name, self.fallback_name):
                return self.fallback(*operands, **static)
        with scope(self.name, "native"):
            return self.compute(*operands, **static)

    def compute(self, *operands: Any, **static: Hashable) -> Any:
        """Computes the native form, differentiable in either mode and to any order; `obstacle` was None."""
        return _native_form(self, tuple(static.items()))(*vary_together(*operands))

    def lower(self, primitive: Primitive) -> None:
        """Has a bilinear ``primitive`` computed by this kernel, on CPUs by the native form.

        It keeps rules of its own for transposition and batching; its parameters are the static arguments.
        """
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        mlir.register_lowering(primitive, mlir.lower_fun(self.fallback, multiple_results=False))
        mlir.register_lowering(primitive, mlir.lower_fun(self.native, multiple_results=False), platform="cpu")  # type: ignore[arg-type]
        if self.products is not None:
            _products[primitive.name] = self.products


def products_of(equation: Any) -> float | None:
    """The number of multiplications of an equation whose primitive a kernel computes; None for other primitives."""
    count = _products.get(equation.primitive.name)
    return None if count is None else count(*(value.aval for value in equation.invars), **equation.params)


@functools.cache
def _native_form(kernel: Kernel, static: tuple[tuple[str, Hashable], ...]) -> Callable[..., Any]:
    """A function of the operands, which programs for other platforms compute by the fallback."""

    def bound(function: Callable[..., Any] | None) -> Any:
        return function and functools.partial(function, **dict(static))

    fallback, native = bound(kernel.fallback), bound(kernel.native)
    if kernel.gradient is None:
        return _by_platform(native, fallback) if kernel.portable else native
    forward, backward = map(bound, kernel.gradient)

    def forward_by_fallback(*operands: Any) -> Any:
        like = jax.eval_shape(lambda *operands: forward(*operands)[1], *operands)
        # The backward pass of the fallback needs the operands only.
        unused = vary_together(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), operands)[0]
        return fallback(*operands), unused

    def backward_by_fallback(operands: Any, kept: Any, cotangent: Any) -> Any:
        found = jax.vjp(fallback, *operands)[1](cotangent)
        return jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else leaf, found)

    others = [*map(bound, kernel.fallback_gradient or ())] or [forward_by_fallback, backward_by_fallback]
    forwards, backwards = map(_by_platform, (forward, backward), others)

    def with_residuals(*operands: Any) -> Any:
        result, kept = forwards(*operands)
        return result, (*operands, kept)

    def from_residuals(saved: Any, cotangent: Any) -> Any:
        *operands, kept = saved
        return backwards(tuple(operands), kept, cotangent)

    primal = _by_platform(native, fallback) if native else lambda *operands: forwards(*operands)[0]
    function = custom_vjp(fallback if kernel.native is kernel.fallback else primal)
    function.defvjp(with_residuals, from_residuals, push_forward=True)
    return function


def _by_platform(native: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """The native form with the derivatives of the other, which programs for other platforms have."""
    function = jax.custom_jvp(lambda *args: jax.lax.platform_dependent(*args, cpu=native, default=fallback))
    function.defjvp(lambda primals, tangents: jax.jvp(fallback, primals, tangents))
    return function
