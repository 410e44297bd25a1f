"""An operation with a native form: pure JAX defines it, and native code computes it where that fits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from jaxnn.kernels._choice import choose, scope
from jaxnn.kernels._custom_vjp import custom_vjp, vary_together
from jaxnn.kernels._package import package_obstacle
from jaxnn.types import ConfigError

_products: dict[str, Callable[..., float]] = {}  # by the name of a primitive


@dataclasses.dataclass(frozen=True)  # and not a tuple, to which `jax.jit` could hold no weak reference
class Kernel:
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
        gradient: ``(forward, backward)`` in native form; None: the fallback's derivatives.
            ``forward(*operands, **static)`` returns the result and a tuple of what the backward pass needs besides the
            operands; ``backward(operands, kept, cotangent, **static)`` returns a cotangent for each operand, None for
            integers.
        fallback_gradient: the same two in pure JAX, if they take less than to differentiate the fallback, which
            computes its result once more.
        products: of a primitive given to `lower`, ``products(*operands, **static)`` is the number of multiplications.
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

    def __post_init__(self) -> None:
        if self.native is None and self.gradient is None:
            raise ConfigError(f"kernel {self.name}: it has no native form: give native or gradient.")

    def obstacle(self, *operands: Any, requested: bool = False, **static: Any) -> str | None:
        """The reason why the native form is not used here, or None; if it is ``requested``, speed is no reason."""
        leaves = jax.tree.leaves(operands)
        if any(not isinstance(size, int) for leaf in leaves for size in jnp.shape(leaf)):
            return package_obstacle() or "a size is symbolic"
        if any(map(_has_explicit_axes, leaves)):
            return package_obstacle() or "the mesh has explicit axes"
        # Speed first, since a package that would not be used is not missed.
        reason = None if requested else self.slower(*operands, **static)
        reason = reason or package_obstacle() or self.unfit(*operands, **static)
        if not isinstance(reason, str | None):
            raise ConfigError(f"kernel {self.name}: unfit and slower return a reason, text or None, not {reason!r}.")
        return reason

    def is_chosen(self, *operands: Any, implementation: str | None = None, **static: Any) -> bool:
        """Whether the native form is used for operands of these types; `collect_reasons` has the reason if not.

        ``implementation`` is ``"native"``, the fallback's name, or None for the faster; else ConfigError.
        """
        preferred = {"cpu": ("native", self.fallback_name), "other": (self.fallback_name,)}
        obstacle = self.obstacle(*operands, requested=implementation is not None, **static)
        return choose(self.name, implementation, {"native": obstacle}, preferred) == "native"

    def __call__(self, *operands: Any, **static: Any) -> Any:
        """Computes the operation by the form that is faster here, in a scope that names it."""
        operands = jax.tree.map(jnp.asarray, operands)
        if not self.is_chosen(*operands, **static):
            with scope(self.name, self.fallback_name):
                return self.fallback(*operands, **static)
        with scope(self.name, "native"):
            return self.compute(*operands, **static)

    def compute(self, *operands: Any, **static: Any) -> Any:
        """Computes the native form, differentiable in either mode and to any order; `obstacle` was None."""
        # With the types of the static arguments: 1, 1.0 and True are equal.
        key = tuple((name, value, type(value)) for name, value in static.items())
        return _native_form(self, key)(*vary_together(*operands))

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
def _native_form(kernel: Kernel, static: tuple[tuple[str, Hashable, type], ...]) -> Callable[..., Any]:
    """A function of the operands, which programs for other platforms compute by the fallback."""

    def bound(function: Callable[..., Any] | None) -> Any:
        return function and functools.partial(function, **{name: value for name, value, _ in static})

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
        cotangents = backwards(tuple(operands), kept, cotangent)
        structures: list[Any] = [*map(jax.tree.structure, (cotangents, jax.tree.map(_float, tuple(operands))))]
        if structures[0] != structures[1]:
            raise ConfigError(
                f"kernel {kernel.name}: the backward pass must return a cotangent for each operand, None for integers: "
                f"{structures[1]}, not {structures[0]}."
            )
        return cotangents

    primal = _by_platform(native, fallback) if native else lambda *operands: forwards(*operands)[0]
    function = custom_vjp(fallback if kernel.native is kernel.fallback else primal)
    function.defvjp(with_residuals, from_residuals, push_forward=True)
    return function


def _has_explicit_axes(leaf: Any) -> bool:
    sharding = getattr(jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf, "sharding", None)
    return bool(getattr(getattr(sharding, "mesh", None), "explicit_axes", ()))


def _float(leaf: jax.Array) -> jax.Array | None:
    return leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None


def _by_platform(native: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """The native form with the derivatives of the other, which programs for other platforms have."""
    function = jax.custom_jvp(lambda *args: jax.lax.platform_dependent(*args, cpu=native, default=fallback))
    function.defjvp(lambda primals, tangents: jax.jvp(fallback, primals, tangents))
    return function
