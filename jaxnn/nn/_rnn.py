"""Recurrent layers with Flax's results: LSTM and GRU, in one or both directions."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxnn.kernels import Size, choose, lstm, scope
from jaxnn.nn._recurrences import Weights, cudnn_obstacle, flip, run_cudnn, run_fused_inputs
from jaxnn.types import ConfigError, DataError, check_int

_PREFERRED = {
    "cpu": ("native", "fused_inputs", "cudnn"),
    "gpu": ("cudnn", "fused_inputs"),
    "other": ("fused_inputs", "cudnn"),
}


class Recurrent(linen.Module):
    """Base class of `LSTM` and `GRU`.

    Attributes:
        features: width of the state and of the outputs.
        time_major: whether inputs and outputs are ``[time, *batch, features]`` instead of ``[*batch, time, features]``,
            which saves transposing them.
        return_carry: whether the state after the last step is returned too.
        reverse: whether sequences are processed, and outputs returned, from end to start; padding stays at the end.
        keep_order: whether the outputs of ``reverse`` are returned in the order of the inputs.
        kernel_init, recurrent_kernel_init, bias_init: initializers.
        dtype: of the products; None: that of the promoted operands. A float32 state stays float32.
        param_dtype: of the parameters and of the default initial state.
        implementation: ``"fused_inputs"``, ``"native"`` (on CPUs), ``"cudnn"``, or None for the fastest.
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

    cell_type: ClassVar[type[linen.RNNCellBase]]
    gates: ClassVar[str]

    def __post_init__(self) -> None:
        self.features = check_int(f"{type(self).__name__}: features", self.features)
        super().__post_init__()

    def setup(self) -> None:
        """Makes Flax's cell, which holds the parameters."""
        names = ("features", "kernel_init", "recurrent_kernel_init", "bias_init", "param_dtype")
        self.cell = self.cell_type(**{name: getattr(self, name) for name in names})

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
        """Runs the layer over sequences.

        For the last output only, use the state (``return_carry``) and not ``outputs[:, -1]``: gradients of the other
        outputs are then not computed, and padding is skipped.

        Args:
            inputs: ``[*batch, time, inputs]`` floats, or ``[time, *batch, inputs]`` if ``time_major``.
            initial_carry: the state before the first step, as the layer returns it; None: zeros.
            init_key: unused, for compatibility with Flax: the initial state is never random.
            seq_lengths: ``[*batch]`` integers, 0…time: the number of steps of each sequence; None: all.
            return_carry: overrides the attribute if not None, as the following do.
            time_major: likewise.
            reverse: likewise.
            keep_order: likewise.

        Returns:
            The outputs, shaped as the inputs but ``features`` wide; with ``return_carry`` first the state after each
            sequence's last step, ``[*batch, features]`` or a tuple of such. Outputs past a sequence's end are
            undefined: computed from its padding, as in Flax, or 0 from cuDNN.

        Raises:
            DataError: inputs, lengths or a state of the wrong shape or dtype.
        """
        time_major = self.time_major if time_major is None else time_major
        keep_order = self.keep_order if keep_order is None else keep_order
        reverses = (self.reverse if reverse is None else reverse,)
        ((carry, outputs),) = _run([self], inputs, [initial_carry], seq_lengths, time_major, reverses, keep_order)
        return (carry, outputs) if (self.return_carry if return_carry is None else return_carry) else outputs


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997): ``linen.RNN(linen.OptimizedLSTMCell(features))``.

    The same parameters, initializers, calls and results to rounding, with one matrix product of all inputs before the
    loop, and one for each kernel's gradient after it. The state is ``(c, h)``.

    Differences to Flax: parameters are always under ``cell`` (Flax puts those of a cell made in its parent's
    ``__call__`` into the parent); activations are fixed; the initial state is zeros unless given; a sequence of length
    0 keeps it; ``seq_lengths`` may have several axes. On an NVIDIA GPU, cuDNN is used if all arrays are float32 (to use
    the CPU of such a machine: ``with jax.default_device(cpu)``); it has no forward mode (``jax.jvp``) and no second
    derivatives, and runs the members of ``vmap`` one after another: pass ``implementation="fused_inputs"`` if any of
    these matters. For the attributes see the base class, `Recurrent`.

    >>> ids = jnp.zeros((8, 20), int)  # transposing ids is cheaper than transposing embeddings
    >>> model = linen.Sequential([jn.nn.Embed(100, 16), jn.nn.LSTM(32, time_major=True)])
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), ids.T)[0].shape
    (20, 8, 32)
    """

    cell_type = linen.OptimizedLSTMCell
    gates = "ifgo"


class GRU(Recurrent):
    """Gated recurrent unit (Cho et al., 2014, arXiv:1406.1078): ``linen.RNN(linen.GRUCell(features))``.

    The same parameters, initializers, calls and results to rounding. The state is ``h``. The notes of `LSTM` apply,
    except for cuDNN, for which JAX offers no GRU.

    >>> jn.models.num_parameters(jn.nn.GRU(32), jax.ShapeDtypeStruct((8, 20, 16), "float32"))
    4736
    """

    cell_type = linen.GRUCell
    gates = "rzn"


def _concatenate(forward: jax.Array, backward: jax.Array) -> jax.Array:
    return jnp.concatenate([forward, backward], axis=-1)


class Bidirectional(linen.Module):
    """Runs layers in both directions and merges the outputs (Schuster and Paliwal, 1997): ``linen.Bidirectional``.

    The same parameters and results to rounding. Two loops, or one call of cuDNN for two layers of the same sizes. Of
    the layers' options only ``implementation`` is used.

    >>> layer = jn.nn.Bidirectional(jn.nn.LSTM(32), jn.nn.LSTM(32))
    >>> jax.eval_shape(layer.init_with_output, jax.random.key(0), jnp.ones((8, 20, 16)))[0].shape
    (8, 20, 64)

    Attributes:
        forward_rnn: an `LSTM` or a `GRU`.
        backward_rnn: likewise; the same object shares its parameters.
        merge_fn: merges the two directions' outputs; concatenates by default.
        time_major, return_carry: as in `LSTM`; the state is the pair of both layers' states.
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
        """Runs over sequences; arguments, results and errors are those of the layers, with a pair of states."""
        time_major = self.time_major if time_major is None else time_major
        carries: Any = (None, None) if initial_carry is None else initial_carry
        if not isinstance(carries, list | tuple) or len(carries) != 2:
            raise DataError("Bidirectional needs an initial_carry of 2 states, one per layer.")
        layers = [self.forward_rnn, self.backward_rnn]
        options = [(type(x), x.features, x.dtype, x.param_dtype, x.implementation) for x in layers]
        results: list[tuple[Any, jax.Array]] = []
        # Two layers of the same kind and size run in one call of cuDNN.
        for group in [slice(2)] if options[0] == options[1] else [slice(1), slice(1, 2)]:
            reverses = [False, True][group]
            results += _run(layers[group], inputs, carries[group], seq_lengths, time_major, reverses, keep_order=True)
        (forward_carry, forward), (backward_carry, backward) = results
        outputs = self.merge_fn(forward, backward)
        with_carry = self.return_carry if return_carry is None else return_carry
        return ((forward_carry, backward_carry), outputs) if with_carry else outputs


def _check_sequences(name: str, inputs: jax.Array, time_major: bool) -> None:
    if inputs.ndim < 2 or not jnp.issubdtype(inputs.dtype, jnp.floating):
        wanted = "[time, *batch, features]" if time_major else "[*batch, time, features]"
        hint = ": embed token ids first" if jnp.issubdtype(inputs.dtype, jnp.integer) else ""
        raise DataError(f"{name} needs floats {wanted}, not {inputs.dtype} {list(inputs.shape)}{hint}.")


def _run(
    layers: Sequence[Recurrent],
    inputs: jax.Array,
    initial_carries: Sequence[Any],
    seq_lengths: jax.Array | None,
    time_major: bool,
    reverses: Sequence[bool],
    keep_order: bool,
) -> list[tuple[Any, jax.Array]]:
    """Returns state and outputs of each of ``layers``: one, or two of the same kind and size, over the same inputs."""
    first, name = layers[0], type(layers[0]).__name__
    _check_sequences(name, inputs, time_major)
    batch = inputs.shape[1:-1] if time_major else inputs.shape[:-2]
    moved = inputs if time_major else jnp.moveaxis(inputs, -2, 0)
    sequences = moved.reshape(moved.shape[0], math.prod(batch), moved.shape[-1])
    if seq_lengths is not None:
        if jnp.shape(seq_lengths) != batch or not jnp.issubdtype(jnp.result_type(seq_lengths), jnp.integer):
            raise DataError(
                f"{name} needs seq_lengths of one integer per sequence, {list(batch)}, "
                f"not {jnp.result_type(seq_lengths)} {list(jnp.shape(seq_lengths))}."
            )
        seq_lengths = jnp.asarray(seq_lengths).reshape(-1)
    directions = []
    for layer, initial_carry in zip(layers, initial_carries, strict=True):
        carry = _flat_carry(layer, initial_carry, batch)
        directions.append((_weights(layer, inputs.shape[-1], carry), carry))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves((sequences, directions))]
    dtypes += [] if first.dtype is None else [first.dtype]
    obstacles: dict[str, str | None] = {
        "cudnn": "JAX offers cuDNN's LSTM only",
        "native": "it is written only for an LSTM",
    }
    if isinstance(first, LSTM):
        (weights, carry), gates = directions[0], 4 * first.features
        dtype = jnp.result_type(sequences, weights.kernel)
        projected = jax.typeof(sequences).update(shape=(*sequences.shape[:2], gates), dtype=dtype)
        kernel = jax.ShapeDtypeStruct((first.features, gates), first.dtype or weights.recurrent_kernel.dtype)
        native = lstm.obstacle(projected, kernel, carry, requested=first.implementation is not None)
        obstacles = {"cudnn": cudnn_obstacle(dtypes), "native": native}
    num_steps, features = moved.shape[0], first.features
    size = Size(features, jnp.result_type(*dtypes), f"{num_steps} steps of {features} features")
    chosen = choose("recurrence", first.implementation, obstacles, _PREFERRED, size)
    results: list[tuple[Any, jax.Array]] = []
    with scope("recurrence", chosen):
        if chosen == "cudnn" and len(directions) == 2:
            results = run_cudnn(sequences, directions, seq_lengths)
        else:
            for direction, reverse in zip(directions, reverses, strict=True):
                flipped = flip(sequences, seq_lengths) if reverse else sequences
                if chosen == "cudnn":
                    ((carry, outputs),) = run_cudnn(flipped, [direction], seq_lengths)
                else:
                    steps = lstm.compute if chosen == "native" else None
                    carry, outputs = run_fused_inputs(flipped, *direction, seq_lengths, first.dtype, steps)
                results.append((carry, flip(outputs, seq_lengths) if reverse and keep_order else outputs))
    reshaped = []
    for carry, outputs in results:
        carry = jax.tree.map(lambda leaf: leaf.reshape(*batch, leaf.shape[-1]), carry)
        outputs = outputs.reshape(outputs.shape[0], *batch, outputs.shape[-1])
        reshaped.append((carry, outputs if time_major else jnp.moveaxis(outputs, 0, -2)))
    return reshaped


def _weights(layer: Recurrent, num_inputs: int, carry: Any) -> Weights:
    """The parameters of Flax's cell, with the gates concatenated for one matrix product."""
    if "params" not in layer.cell.variables:
        layer.cell(carry, jnp.zeros((jax.tree.leaves(carry)[0].shape[0], num_inputs), layer.param_dtype))
    params = linen.unbox(layer.cell.variables["params"])
    of_inputs, of_state = ([params[side + gate] for gate in layer.gates] for side in "ih")
    kernel, recurrent = (jnp.concatenate([gate["kernel"] for gate in side], -1) for side in (of_inputs, of_state))
    biases = [one["bias"] if "bias" in one else other["bias"] for one, other in zip(of_inputs, of_state, strict=True)]
    # If the last gate has two biases, the second is added separately.
    second = of_state[-1]["bias"] if "bias" in of_inputs[-1] else None
    return Weights(kernel, recurrent, jnp.concatenate(biases), second)


def _flat_carry(layer: Recurrent, carry: Any, batch: tuple[int, ...]) -> Any:
    """The initial state as ``[batch, features]``, or a tuple of such; zeros if ``carry`` is None."""
    expected = jax.eval_shape(lambda: layer.cell.initialize_carry(jax.random.key(0), (*batch, 1)))
    states, tree = jax.tree.flatten(expected)
    given = [jnp.zeros(x.shape, x.dtype) for x in states] if carry is None else jax.tree.leaves(carry)
    if [jnp.shape(state) for state in given] != [state.shape for state in states]:
        wanted = f"{list(states[0].shape)}" if len(states) == 1 else f"(c, h) of {list(states[0].shape)} each"
        shapes = jax.tree.map(jnp.shape, carry)
        raise DataError(f"{type(layer).__name__} needs an initial_carry {wanted}, not {shapes}.")
    flat = [jnp.asarray(state).reshape(math.prod(batch), layer.features) for state in given]
    return jax.tree.unflatten(tree, flat)
