"""Checks of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.sharding import AxisType, PartitionSpec

from jaxnn.testing._agreement import BFLOAT16_TOLERANCE, LeftOut, at, cast, difference, moved, run_checks, stacked
from jaxnn.types import ConfigError, PyTree, error_line, named_leaves

LAYER_CHECKS = ("jit", "vmap", "gradient", "rows", "bfloat16", "devices")
"""The checks of `check_layer`."""


def check_layer(
    layer: linen.Module | Callable[[Any, Any], Any],
    inputs: PyTree,
    params: PyTree = None,
    *,
    checks: Sequence[str] = LAYER_CHECKS,
    tolerance: float = 1e-5,
) -> dict[str, str]:
    """Checks that a layer computes the same however jaxnn runs it, on ``inputs [batch, ...]``.

    ``layer`` is a Flax module, or a function ``(params, inputs) -> outputs [batch, ...]``; the module's variables are
    initialised if ``params`` is None.

    - ``jit``: outputs without `jax.jit` equal those with it;
    - ``vmap``: outputs and gradients of two members, mapped, equal those of one after another;
    - ``gradient``: it is finite and not zero, by each parameter and float input, and equals forward mode's derivative,
      or finite differences where a `jax.custom_vjp` function has no forward mode;
    - ``rows``: outputs of half of the batch equal half of the outputs;
    - ``bfloat16``: parameters and inputs in bfloat16 give outputs in it, near those in float32;
    - ``devices``: gradients on two devices, each with its rows, equal those on one.

    A layer that couples examples, such as batch normalization, has no ``rows`` and ``devices``. Numbers may differ by
    ``tolerance``, relative or absolute. Returns ``"passed"``, or why it was left out, by check. Raises ConformanceError
    with a line for each failed check, ConfigError for an unknown check.

    >>> x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    >>> jn.testing.check_layer(jn.nn.Dense(2), x, checks=("vmap", "rows"))
    {'vmap': 'passed', 'rows': 'passed'}
    """
    if isinstance(layer, linen.Module):
        if params is None:
            params = _initialised(layer, inputs)
        called: Any = layer.apply
    else:
        called = layer
    mapped = _Layer(called, jax.device_get(params), jax.device_get(inputs), tolerance)
    found = {
        "jit": mapped.without_jit,
        "vmap": mapped.mapped,
        "gradient": mapped.derivatives,
        "rows": mapped.rows,
        "bfloat16": mapped.narrow,
        "devices": mapped.sharded,
    }
    return run_checks("check_layer", found, checks)


def _initialised(layer: linen.Module, inputs: PyTree) -> Any:
    try:
        return jax.jit(layer.init)(jax.random.key(0), inputs)
    # The user's code, or Flax, which misses an argument.
    except Exception as error:
        raise ConfigError(
            f"the layer cannot be initialised with inputs alone ({error_line(error)}): pass a function (params, "
            "inputs) that calls layer.apply with its other arguments, and params."
        ) from error


class _Layer:
    """A layer as a function of parameters and inputs, and how its outputs and gradients are compared."""

    def __init__(self, layer: Callable[[Any, Any], Any], params: Any, inputs: Any, tolerance: float) -> None:
        self.layer = layer
        self.arrays = params, inputs
        self.tolerance = tolerance
        floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(inputs))
        self.by = (0, 1) if floats else (0,)
        self.outputs = jax.jit(layer)
        self.graded = jax.jit(self._graded)

    def _total(self, params: Any, inputs: Any) -> tuple[jax.Array, Any]:
        """A sum that is not linear in the outputs, and these."""
        outputs = self.layer(params, inputs)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(outputs)), outputs  # type: ignore[return-value]

    def _graded(self, params: Any, inputs: Any) -> Any:
        """Outputs and gradients."""
        gradients, outputs = jax.grad(self._total, self.by, has_aux=True)(params, inputs)
        return outputs, gradients

    def without_jit(self) -> str | None:
        with jax.disable_jit():
            found = self.layer(*jax.tree.map(jnp.asarray, self.arrays))
        return difference(found, self.outputs(*self.arrays), self.tolerance, "without jit")

    def mapped(self) -> str | None:
        members = [self.arrays, moved(self.arrays, 0.5)]
        # First without gradients, which the layer may not have.
        for function, compiled in ((self.layer, self.outputs), (self._graded, self.graded)):
            found = jax.jit(jax.vmap(function))(*stacked(*members))
            expected = stacked(*(jax.device_get(compiled(*member)) for member in members))
            if (fault := difference(found, expected, 10 * self.tolerance, "in two members, mapped")) is not None:
                return fault
        return None

    def derivatives(self) -> str | None:
        gradients = jax.device_get(self.graded(*self.arrays)[1])
        for name, gradient in named_leaves(gradients).items():
            if not np.isfinite(np.float32(gradient)).all():
                return f"gradient {name} is not finite"
            if not np.any(gradient):
                return f"gradient {name} is zero"
        given = self.arrays[: len(self.by)]
        tangents = jax.tree.map(lambda leaf: np.cos(np.arange(leaf.size)).reshape(leaf.shape).astype(leaf.dtype), given)

        def forward(params: Any, inputs: Any) -> Any:
            def value(*some: Any) -> Any:
                return self._total(*some, *(params, inputs)[len(some) :])[0]

            return jax.jvp(value, (params, inputs)[: len(self.by)], tangents)[1]

        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(tangents), strict=True)
        products = [np.float64(gradient) * np.float64(tangent) for gradient, tangent in pairs]
        scale = max(1.0, sum(np.abs(product).sum() for product in products))
        expected = sum(product.sum() for product in products) / scale
        try:
            found, tolerance = np.float64(jax.jit(forward)(*self.arrays)) / scale, 10 * self.tolerance
        except TypeError:  # a `jax.custom_vjp` function has no forward mode
            total = jax.jit(lambda *arrays: self._total(*arrays)[0])
            ends = [jax.tree.map(lambda x, t, s=s: x + s * 1e-2 * t, given, tangents) for s in (-1, 1)]
            low, high = (np.float64(total(*end, *self.arrays[len(end) :])) for end in ends)
            found, tolerance = (high - low) / 2e-2 / scale, 1e-2
        return difference(found, np.float64(expected), tolerance, "by its values, in units of its terms,")

    def rows(self) -> str | None:
        params, inputs = self.arrays
        half = jax.tree.leaves(inputs)[0].shape[0] // 2
        outputs = jax.device_get(self.outputs(params, inputs))
        found = self.outputs(params, at(inputs, slice(half)))
        return difference(found, at(outputs, slice(half)), self.tolerance, "in half of the batch")

    def narrow(self) -> str | None:
        found = jax.device_get(self.outputs(*cast(self.arrays, jnp.bfloat16)))
        expected = jax.device_get(self.outputs(*self.arrays))
        both = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        pairs = [pair for pair in both if jnp.issubdtype(pair[1].dtype, jnp.floating)]
        if wide := {str(leaf.dtype) for leaf, _ in pairs} - {"bfloat16"}:
            return f"outputs of bfloat16 are {', '.join(sorted(wide))}"
        near, exact = ([np.float32(pair[k]) for pair in pairs] for k in (0, 1))
        return difference(near, exact, BFLOAT16_TOLERANCE, "in bfloat16")

    def sharded(self) -> str | None:
        if jax.local_device_count() < 2:
            raise LeftOut("left out: there are fewer than 2 devices; set JAX_NUM_CPU_DEVICES=2")
        mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:2])
        params, inputs = self.arrays
        num_rows = jax.tree.leaves(inputs)[0].shape[0] // 2 * 2
        if num_rows < 2:
            raise LeftOut("left out: there are fewer than 2 rows")
        arrays = params, at(inputs, slice(num_rows))
        whole, rows = PartitionSpec(), PartitionSpec("rows")

        def part(params: Any, inputs: Any) -> Any:
            outputs, gradients = self._graded(params, inputs)
            return outputs, (jax.lax.psum(gradients[0], "rows"), *gradients[1:])

        outputs = rows, (whole, rows)[: len(self.by)]
        parts = jax.shard_map(part, mesh=mesh, in_specs=(whole, rows), out_specs=outputs, check_vma=False)
        return difference(jax.jit(parts)(*arrays), self.graded(*arrays), 10 * self.tolerance, "on two devices")
