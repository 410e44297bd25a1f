"""Recurrent layers one upon another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jaxnn.nn.dropout import Dropout, check_rate
from jaxnn.nn.recurrent_input import check_inputs, one_for_each
from jaxnn.types import ConfigError


class Stacked(linen.Module):
    """Recurrent layers one upon another, with dropout between them.

    ``Stacked([LSTM(64), LSTM(64)], dropout=0.2)`` is PyTorch's ``LSTM(…, 64, num_layers=2, dropout=0.2)``; widths and
    kinds may differ, and any layer may be a `Bidirectional`. The parameters are under ``layers_0``, ``layers_1``, ….

    Attributes:
        layers: `LSTM`, `GRU`, `Bidirectional`, or whatever is called as they are; the first reads the inputs.
        dropout: ``[]`` the rate between two layers, 0…1; may be a tracer.
        time_major: whether inputs and outputs are ``[time, *batch, features]``; the layers' own is overridden.
        return_carry: whether the tuple of all layers' last states is returned too.
    """

    layers: Sequence[linen.Module]
    dropout: ArrayLike = 0.0
    time_major: bool = False
    return_carry: bool = False

    def __post_init__(self) -> None:
        check_rate(self.dropout)
        layers = self.layers if isinstance(self.layers, Sequence) else ()
        readers = [isinstance(layer, linen.Module) and not isinstance(layer, linen.RNNCellBase) for layer in layers]
        if not readers or not all(readers):
            raise ConfigError(f"Stacked needs layers, as Stacked([LSTM(64), LSTM(64)]), not {self.layers!r}.")
        super().__post_init__()

    @linen.compact
    def __call__(
        self,
        inputs: jax.Array,
        *,
        train: bool = False,
        initial_carry: Any = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
    ) -> Any:
        """Reads sequences; arguments, results and errors are the layers', with a tuple of states.

        Args:
            inputs: ``[*batch, time, inputs]`` floats, or ``[time, *batch, inputs]`` if ``time_major``.
            train: whether to drop; then ``apply`` needs ``rngs={"dropout": key}``, unless the rate is a plain 0.
            initial_carry: one state for each layer; None: zeros.
            seq_lengths: as the layers'.
            return_carry: overrides the attribute where it is not None, as ``time_major`` does.
            time_major: likewise.
        """
        time_major = self.time_major if time_major is None else time_major
        carries = one_for_each("Stacked", initial_carry, len(self.layers))
        check_inputs("Stacked", inputs, time_major)
        x = inputs if time_major else jnp.moveaxis(inputs, -2, 0)
        last = []
        for k, (layer, carry) in enumerate(zip(self.layers, carries, strict=True)):
            x = Dropout(self.dropout, batch_axis=1)(x, train=train) if k else x
            options = {"initial_carry": carry, "seq_lengths": seq_lengths, "return_carry": True, "time_major": True}
            carry, x = layer(x, **options)
            last.append(carry)
        outputs = x if time_major else jnp.moveaxis(x, 0, -2)
        wants_carry = self.return_carry if return_carry is None else return_carry
        return (tuple(last), outputs) if wants_carry else outputs
