"""The parameters of Flax's recurrent cells, with the gates put side by side for one matrix product."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnn.nn.recurrence import Weights


class Gate(NamedTuple):
    """One gate of a cell: its letter in Flax, and which of its two products has a bias."""

    letter: str
    input_biased: bool
    state_biased: bool


class Cell(linen.Module):
    """The parameters of a Flax cell: for each gate a dense layer of the inputs, ``i…``, and one of the state, ``h…``.

    Attributes:
        features: the width of the state.
        gates: in the order in which they stand side by side.
        kernel_init: of the inputs' kernels.
        recurrent_kernel_init: of the state's kernels.
        bias_init: of the biases.
        param_dtype: of all of them.
    """

    features: int
    gates: tuple[Gate, ...]
    kernel_init: Initializer
    recurrent_kernel_init: Initializer
    bias_init: Initializer
    param_dtype: DTypeLike

    @linen.compact
    def __call__(self, num_inputs: int) -> Weights:
        """The weights for inputs of this width."""
        of_inputs, of_state = zip(*(self._gate(Gate(*gate), num_inputs) for gate in self.gates), strict=True)
        kernel, recurrent_kernel = (jnp.concatenate([k for k, _ in side], axis=-1) for side in (of_inputs, of_state))
        biases = [of_state[k][1] if bias is None else bias for k, (_, bias) in enumerate(of_inputs)]
        # Where the last gate has two biases, the second is added apart from the first.
        second = None if of_inputs[-1][1] is None else of_state[-1][1]
        return Weights(kernel, recurrent_kernel, jnp.concatenate(biases), second)

    def _gate(self, gate: Gate, num_inputs: int) -> list[tuple[jax.Array, jax.Array | None]]:
        sides = (
            ("i", num_inputs, gate.input_biased, self.kernel_init),
            ("h", self.features, gate.state_biased, self.recurrent_kernel_init),
        )
        return [
            _Dense(self.features, biased, init, self.bias_init, self.param_dtype, name=side + gate.letter)(width)
            for side, width, biased, init in sides
        ]


class _Dense(linen.Module):
    """The parameters of a ``linen.Dense``."""

    features: int
    use_bias: bool
    kernel_init: Initializer
    bias_init: Initializer
    param_dtype: DTypeLike

    @linen.compact
    def __call__(self, num_inputs: int) -> tuple[jax.Array, jax.Array | None]:
        kernel = self.param("kernel", self.kernel_init, (num_inputs, self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return kernel, bias
