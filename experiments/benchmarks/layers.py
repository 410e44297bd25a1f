"""Layer benchmarks: jaxnn's layers against those of Flax or JAX, forward and backward.

Claim     on a CPU the scanned step of a convolutional network takes at most 1.1 times the unscanned one; eight CNNs as
          a population take about the time of eight runs; 64 small MLPs train at least 4 times as fast as in sequence
Command   python experiments/benchmarks/layers.py
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import linen
from harness import describe_machine, interleaved, per_call, quantity, ratios

import jaxnn as jn
from jaxnn import models, nn

type Call = Callable[[], Any]
# Returns both sides of a comparison; created lazily, so that their memory is freed after the measurement.
type Case = Callable[[], tuple[Call, Call]]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    only: tuple[str, ...] = ()
    """Cases whose name contains one of these words; default: all."""
    rounds: int = 7
    out: Path = Path("runs/benchmarks")


def trained(module: linen.Module, *inputs: Any, **kwargs: Any) -> Call:
    """Returns the jitted forward and backward of a layer: gradients of parameters and of float inputs."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(keys, *inputs, **kwargs)
    stats = {name: value for name, value in variables.items() if name != "params"}
    floats = [value for value in inputs if jnp.issubdtype(value.dtype, jnp.floating)]
    ids = [value for value in inputs if not jnp.issubdtype(value.dtype, jnp.floating)]

    def loss(params: Any, floats: Any) -> jax.Array:
        variables = {"params": params, **stats}
        outputs, _ = module.apply(variables, *floats, *ids, **kwargs, rngs=keys, mutable=list(stats))
        return jnp.sum(jnp.square(outputs))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    params = variables.get("params", {})
    return lambda: gradient(params, floats)


def differentiated(function: Callable[..., jax.Array], *inputs: Any) -> Call:
    """Returns the jitted forward and backward of a function."""
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.square(function(*args))), argnums=tuple(range(len(inputs)))))
    return lambda: gradient(*inputs)


def normal(*shape: int) -> jax.Array:
    """Returns random floats."""
    return jax.random.normal(jax.random.key(2), shape)


def layer_cases() -> dict[str, Case]:
    """Returns jaxnn's layer and the reference, by case."""
    image, wide, small = normal(128, 26, 26, 32), normal(128, 32, 32, 16), normal(128, 8, 8, 64)
    tokens, heads = normal(12, 64, 128), normal(12, 64, 4, 32)
    words = normal(32, 100, 128)
    long = normal(1, 4096, 4, 32)
    logits, labels = normal(1024, 32_000), jnp.zeros(1024, jnp.int32)
    plain = optax.softmax_cross_entropy_with_integer_labels

    def conv(layers: Any, **kwargs: Any) -> linen.Module:
        return layers.Conv(64, (3, 3), padding="VALID", **kwargs)

    return {
        "convolution 32->64": lambda: (trained(conv(nn), image), trained(conv(linen), image)),
        "convolution, in a scan": lambda: (scanned(conv(nn), image), scanned(conv(linen), image)),
        "convolution 16->16": lambda: (trained(nn.Conv(16, (3, 3)), wide), trained(linen.Conv(16, (3, 3)), wide)),
        "max pool 2x2": lambda: (
            differentiated(lambda x: nn.max_pool(x, (2, 2), (2, 2)), wide),
            differentiated(lambda x: linen.max_pool(x, (2, 2), (2, 2)), wide),
        ),
        "LSTM 64": lambda: (trained(nn.LSTM(64), words), trained(linen.RNN(linen.OptimizedLSTMCell(64)), words)),
        "GRU 64": lambda: (trained(nn.GRU(64), words), trained(linen.RNN(linen.GRUCell(64)), words)),
        "attention, 64 long": lambda: (
            differentiated(lambda x: nn.attention(x, x, x, causal=True), heads),
            differentiated(lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True), heads),
        ),
        "attention, 4096 long": lambda: (
            differentiated(lambda x: nn.attention(x, x, x, causal=True), long),
            differentiated(lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True), long),
        ),
        "layer norm": lambda: (trained(nn.LayerNorm(), tokens), trained(linen.LayerNorm(), tokens)),
        "batch norm, 16 channels": lambda: (
            trained(nn.BatchNorm(use_running_average=False), wide),
            trained(linen.BatchNorm(use_running_average=False), wide),
        ),
        "batch norm, 64 channels": lambda: (
            trained(nn.BatchNorm(use_running_average=False), small),
            trained(linen.BatchNorm(use_running_average=False), small),
        ),
        "dropout": lambda: (
            trained(nn.Dropout(0.5), normal(128, 9216), train=True),
            trained(linen.Dropout(0.5, deterministic=False), normal(128, 9216)),
        ),
        "cross-entropy, 32,000 classes": lambda: (
            differentiated(lambda logits: nn.cross_entropy(logits, labels), logits),
            differentiated(lambda logits: plain(logits, labels), logits),
        ),
        "Adam, a table of 1.2 M x 50": lambda: (
            table_step(jn.optim.sparse_rows(optax.adam(1e-3))),
            table_step(optax.adam(1e-3)),
        ),
    }


def scanned(module: linen.Module, inputs: jax.Array, length: int = 4) -> Call:
    """Returns gradient steps of one layer in a scan."""
    params = module.init(jax.random.key(0), inputs)

    def loss(params: Any) -> jax.Array:
        outputs: Any = module.apply(params, inputs)
        return jnp.sum(jnp.square(outputs))

    @jax.jit
    def steps(params: Any) -> Any:
        def body(params: Any, _: None) -> tuple[Any, None]:
            gradient = jax.grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 1e-9 * g, params, gradient), None

        return jax.lax.scan(body, params, length=length)[0]

    return lambda: steps(params)


def training(model: linen.Module, inputs: jax.Array, tx: Any, num_classes: int = 10) -> tuple[Any, Any, jn.Batch]:
    """Returns a train step, its state and a batch."""
    task = jn.tasks.classification(model)
    labels = jnp.arange(len(inputs)) % num_classes
    batch = jn.Batch(inputs, labels, jnp.ones(len(inputs)))
    return jn.steps.make_train_step(task, tx), jn.steps.init_train_state(task, tx, jax.random.key(0), batch), batch


def stepping(step: Any, state: Any, batch: Any, length: int, *, scan: bool = False) -> Call:
    """Returns ``length`` training steps, one call each or all in one scan; the state is donated."""

    def steps(state: Any, batch: Any) -> Any:
        return jax.lax.scan(lambda state, _: (step(state, batch)[0], None), state, length=length)[0]

    compiled = jax.jit(steps if scan else lambda state, batch: step(state, batch)[0], donate_argnums=0)
    state = jax.tree.map(jnp.copy, state)

    def call() -> Any:
        nonlocal state
        for _ in range(1 if scan else length):
            state = compiled(state, batch)
        return state.step

    return call


def table_step(tx: Any) -> Call:
    """Returns a training step of averaged embeddings from a table of 1.2 million rows."""
    ids = jax.random.randint(jax.random.key(0), (32, 400), 0, 1_200_000)
    model = models.FastText(2, vocabulary_size=1_200_000, features=50)
    return stepping(*training(model, ids, tx, 2), length=1)


def mnist_cnn() -> linen.Module:
    """Returns Keras's MNIST network, without dropout."""
    return models.CNN(10, blocks=((32, 64),), padding="VALID")


def program_cases() -> dict[str, Case]:
    """Returns training steps in a scan or a population, and their reference, by case."""
    adam = optax.adam(1e-3)
    cnn = training(mnist_cnn(), normal(128, 28, 28, 1), adam)
    mlp = training(models.MLP((32, 32, 10)), normal(32, 64), adam)
    return {
        "CNN, 4 steps scanned / unscanned": lambda: (stepping(*cnn, length=4, scan=True), stepping(*cnn, length=4)),
        "8 CNNs as a population / in turn": lambda: (population(*cnn, 8, length=1), stepping(*cnn, length=8)),
        "8 CNNs as a mapped population / in turn": lambda: (
            population(*cnn, 8, length=1, width=1),
            stepping(*cnn, length=8),
        ),
        "64 MLPs as a population / in turn": lambda: (population(*mlp, 64, length=256), stepping(*mlp, 64 * 256)),
        "64 MLPs as a population / each scanned": lambda: (
            population(*mlp, 64, length=256),
            stepping(*mlp, 64 * 256, scan=True),
        ),
    }


def population(step: Any, state: Any, batch: Any, members: int, length: int, width: int | None = None) -> Call:
    """Returns ``length`` steps of members with stacked states and a shared batch; ``width`` are vmapped, or all."""
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * members), state)

    def in_turn(states: Any, batch: Any) -> Any:
        return jax.lax.map(lambda state: step(state, batch), states, batch_size=width)

    at_once = jax.vmap(step, in_axes=(0, None))
    return stepping(at_once if width is None else in_turn, states, batch, length, scan=length > 1)


def compare(ours: Call, theirs: Call, rounds: int) -> dict[str, tuple[float, ...]]:
    """Returns the seconds of each per round, after a warm-up call."""
    calls = {"ours": ours, "theirs": theirs}
    for call in calls.values():
        jax.block_until_ready(call())

    def measure(call: Call) -> Callable[[], float]:
        return per_call(lambda: jax.block_until_ready(call()), 0.0)

    return interleaved({name: measure(call) for name, call in calls.items()}, rounds=rounds)


def main(options: Options) -> None:
    """Times the cases and prints the time of the reference relative to jaxnn."""
    print(f"{describe_machine()}; medians of {options.rounds} rounds")
    results = {}
    for name, make in (layer_cases() | program_cases()).items():
        if options.only and not any(word in name for word in options.only):
            continue
        seconds = results[name] = compare(*make(), options.rounds)
        own, other = (quantity(values, "s") for values in seconds.values())
        ratio = ratios(seconds["theirs"], seconds["ours"])
        print(f"{name:<40}{own!s:>26}{other!s:>26}   {ratio} times as long", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    backend = jax.default_backend()
    written = json.dumps({**describe_machine()._asdict(), "seconds": results}, indent=1)
    (options.out / f"layers_{backend}.json").write_text(written)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
