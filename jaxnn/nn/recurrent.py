"""Recurrent layers as Flax's: LSTM and GRU, in one direction or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnn.nn import cudnn_lstm, implementations, recurrence
from jaxnn.nn.checks import positive_int
from jaxnn.nn.recurrent_cell import Cell, Gate
from jaxnn.nn.recurrent_input import as_given, flat_carry, flat_lengths, one_for_each, time_first
from jaxnn.types import ConfigError

_OPERATION = "recurrence"


class Recurrent(linen.Module):
    """What `LSTM` and `GRU` share; see there.

    Attributes:
        features: the width of the state, and of the outputs.
        time_major: whether inputs and outputs are ``[time, *batch, features]`` instead of ``[*batch, time, features]``,
            which saves transposing them.
        return_carry: whether the state after the last step is returned too.
        reverse: whether sequences are read, and given, from their ends.
        keep_order: whether the outputs of ``reverse`` are given in the order of the inputs.
        kernel_init: of the inputs' kernels.
        recurrent_kernel_init: of the state's kernels.
        bias_init: of the biases.
        dtype: of the products; None: what the operands promote to. A state of float32 stays float32.
        param_dtype: of the parameters, and of a state that is not given.
        implementation: ``"hoisted"``, ``"paired"``, ``"cudnn"``, or None: what is fastest here.
    """

    features: int
    time_major: bool = False
    return_carry: bool = False
    reverse: bool = False
    keep_order: bool = False
    kernel_init: Initializer = linen.initializers.lecun_normal()
    recurrent_kernel_init: Initializer = linen.initializers.orthogonal()
    bias_init: Initializer = linen.initializers.zeros_init()
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: str | None = None

    gates: ClassVar[tuple[Gate, ...]]
    num_states: ClassVar[int]

    def __post_init__(self) -> None:
        self.features = positive_int(f"{type(self).__name__}: features", self.features)
        super().__post_init__()

    def setup(self) -> None:
        """Makes the cell, which holds the parameters."""
        inits = (self.kernel_init, self.recurrent_kernel_init, self.bias_init)
        self.cell = Cell(self.features, self.gates, *inits, self.param_dtype)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Any = None,
        init_key: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Reads sequences, each from its first step to its last.

        A classifier that needs the last output alone takes it from the state (``return_carry``): nothing is computed
        then for the other outputs, which ``outputs[:, -1]`` would not give, and padding is passed over.

        Args:
            inputs: ``[*batch, time, inputs]`` floats, or ``[time, *batch, inputs]`` if ``time_major``.
            initial_carry: the state before the first step, as the layer returns it; None: zeros.
            init_key: taken for Flax's sake; no state is drawn at random.
            seq_lengths: ``[*batch]`` integers, 0…time: how many steps of each sequence count; None: all.
            return_carry: overrides the attribute where it is not None, as the following do.
            time_major: likewise.
            reverse: likewise; with ``seq_lengths`` padding stays behind.
            keep_order: likewise.

        Returns:
            The outputs, shaped as the inputs but ``features`` wide; with ``return_carry`` the state after each
            sequence's last step, ``[*batch, features]`` or a tuple of such, then the outputs. Outputs behind a
            sequence's end mean nothing: they go on from its padding, as in Flax, or are 0, from cuDNN.

        Raises:
            DataError: inputs, lengths or a state of the wrong shape or dtype.
            ConfigError: an implementation that is unknown, or that cannot do what is asked.
        """
        time_major = self.time_major if time_major is None else time_major
        keep_order = self.keep_order if keep_order is None else keep_order
        reverses = (self.reverse if reverse is None else reverse,)
        ((carry, outputs),) = read([self], inputs, [initial_carry], seq_lengths, time_major, reverses, keep_order)
        return (carry, outputs) if (self.return_carry if return_carry is None else return_carry) else outputs


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997): ``linen.RNN(linen.OptimizedLSTMCell(features))``.

    The same parameters, initial values, calls and results to rounding, with the input products of all steps in one
    matrix product before the loop, and the kernels' gradients in one each after it. The state is ``(c, h)``.

    It differs from Flax in this: the parameters are always under ``cell`` (Flax puts those of a cell made in its
    parent's ``__call__`` into the parent); gates are sigmoids and the rest tanh; the initial state is zeros unless
    given; a sequence of length 0 keeps it; ``seq_lengths`` may have several axes. On an NVIDIA GPU cuDNN computes
    what is all float32, wherever the arrays are (on the CPU of such a machine: ``with jax.default_device(cpu)``); it
    has no forward mode (``jax.jvp``), its gradients cannot be differentiated again, and under ``vmap`` its members run
    one after another: give ``implementation="hoisted"`` if any of these matters.

    From token ids nothing need be transposed: ``LSTM(64, time_major=True)(Embed(20_000, 128)(ids.T))``. The attributes
    are `Recurrent`'s.
    """

    gates = (Gate("i", False, True), Gate("f", False, True), Gate("g", False, True), Gate("o", False, True))
    num_states = 2


class GRU(Recurrent):
    """Gated recurrent unit (Cho et al., 2014, arXiv:1406.1078): ``linen.RNN(linen.GRUCell(features))``.

    The same parameters, initial values, calls and results to rounding. The state is ``h``. What `LSTM` says of
    itself holds, but for cuDNN, which JAX gives no GRU.
    """

    gates = (Gate("r", True, False), Gate("z", True, False), Gate("n", True, True))
    num_states = 1


def _concatenate(forward: jax.Array, backward: jax.Array) -> jax.Array:
    return jnp.concatenate([forward, backward], axis=-1)


class Bidirectional(linen.Module):
    """Reads sequences in both directions and merges the outputs (Schuster and Paliwal, 1997): ``linen.Bidirectional``.

    The same parameters and results to rounding: ``Bidirectional(LSTM(64), LSTM(64))``. Two layers alike are run
    together: as two loops side by side on CPU, where small batched products are slow, as one loop or by one call of
    cuDNN on a GPU. The layers' own ``implementation`` says otherwise; their other options are overridden.

    Attributes:
        forward_rnn: an `LSTM` or a `GRU`.
        backward_rnn: likewise; if it is the same object, they share their parameters.
        merge_fn: of the two directions' outputs; by default they stand side by side.
        time_major: as the layers'.
        return_carry: as the layers'; the state is the pair of both layers'.
    """

    forward_rnn: Recurrent
    backward_rnn: Recurrent
    merge_fn: Callable[[jax.Array, jax.Array], jax.Array] = _concatenate
    time_major: bool = False
    return_carry: bool = False

    def __post_init__(self) -> None:
        for layer in (self.forward_rnn, self.backward_rnn):
            if not isinstance(layer, Recurrent):
                raise ConfigError(
                    f"Bidirectional takes jaxnn's LSTM or GRU, not {type(layer).__name__}: "
                    "use flax.linen.Bidirectional for it."
                )
        super().__post_init__()

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Any = None,
        init_key: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
    ) -> Any:
        """Reads sequences; arguments, results and errors are the layers', with a pair of states."""
        time_major = self.time_major if time_major is None else time_major
        carries = one_for_each("Bidirectional", initial_carry, 2)
        layers = (self.forward_rnn, self.backward_rnn)
        together = [(0, 1)] if _alike(*layers) else [(0,), (1,)]
        results: list[tuple[Any, jax.Array]] = []
        for group in together:
            members, states = [layers[k] for k in group], [carries[k] for k in group]
            reverses = [k == 1 for k in group]
            results += read(members, inputs, states, seq_lengths, time_major, reverses, keep_order=True)
        (forward_carry, forward), (backward_carry, backward) = results
        outputs = self.merge_fn(forward, backward)
        wants_carry = self.return_carry if return_carry is None else return_carry
        return ((forward_carry, backward_carry), outputs) if wants_carry else outputs


def read(
    layers: Sequence[Recurrent],
    inputs: jax.Array,
    initial_carries: Sequence[Any],
    seq_lengths: jax.Array | None,
    time_major: bool,
    reverses: Sequence[bool],
    keep_order: bool,
) -> list[tuple[Any, jax.Array]]:
    """Runs one layer, or two alike in both directions, over the same inputs: each one's state and outputs."""
    first, name = layers[0], type(layers[0]).__name__
    sequences, batch = time_first(name, inputs, time_major)
    lengths = flat_lengths(name, seq_lengths, batch)
    directions = [
        recurrence.Direction(
            layer.cell(inputs.shape[-1]),
            flat_carry(name, carry, layer.num_states, (*batch, layer.features), layer.param_dtype),
            reverse,
        )
        for layer, carry, reverse in zip(layers, initial_carries, reverses, strict=True)
    ]
    chosen = implementations.choose(_OPERATION, first.implementation, _obstacles(first, sequences, directions))
    with implementations.scope(_OPERATION, chosen):
        results = recurrence.run(chosen, sequences, directions, lengths, first.dtype, keep_order)
    return [as_given(carry, outputs, batch, time_major) for carry, outputs in results]


def _obstacles(
    layer: Recurrent, sequences: jax.Array, directions: Sequence[recurrence.Direction]
) -> dict[str, str | None]:
    dtypes = [leaf.dtype for leaf in jax.tree.leaves((sequences, [(d.weights, d.carry) for d in directions]))]
    dtypes += [] if layer.dtype is None else [layer.dtype]
    return {
        "cudnn": cudnn_lstm.obstacle(dtypes) if isinstance(layer, LSTM) else "JAX offers cuDNN's LSTM alone",
        "paired": "there is one direction" if len(directions) == 1 else None,
    }


def _alike(forward: Recurrent, backward: Recurrent) -> bool:
    """Whether both can be computed as one."""
    names = ("features", "dtype", "param_dtype", "implementation")
    same = all(getattr(forward, name) == getattr(backward, name) for name in names)
    return same and type(forward) is type(backward)
