"""An update by Adam of a parameter and its moments, which reads and writes each once."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._package import native_call

_MIN_UPDATED = 2**14  # elements of a parameter: with fewer, XLA's three passes are as fast


def _by_xla(
    gradient: jax.Array, mu: jax.Array, nu: jax.Array, numbers: jax.Array, param: jax.Array
) -> tuple[jax.Array, ...]:
    decay_mu, part_mu, decay_nu, part_nu, rate, factor_nu, eps, eps_root, shrink = numbers
    mu = decay_mu * mu + part_mu * gradient
    nu = decay_nu * nu + part_nu * jnp.square(gradient)
    step = rate * mu / (jnp.sqrt(nu * factor_nu + eps_root) + eps)
    return param - (step + jnp.where(shrink == 0, 0, shrink * param)), mu, nu  # an infinite one stays so


def _natively(*operands: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(native_call("jaxnn_adam", [operands[-1].shape] * 3, *operands, in_place={4: 0, 1: 1, 2: 2}))


def _unfit(*operands: Any) -> str | None:
    return None if {str(operand.dtype) for operand in operands} == {"float32"} else "it updates float32"


def _slower(*operands: Any) -> str | None:
    few = jnp.size(operands[-1]) < _MIN_UPDATED
    return f"the parameter has fewer than {_MIN_UPDATED:,} elements, for which it is not faster" if few else None


# Of the gradient, both moments, ``numbers [9]`` and the parameter; returns the parameter and the moments. The numbers
# are the decay of the first moment and 1 less that, those of the second, ``rate / (1 - b1**count)``,
# ``1 / (1 - b2**count)``, ``eps``, ``eps_root`` and ``rate * weight_decay``.
adam = Kernel("adam", _by_xla, _natively, _unfit, _slower)
