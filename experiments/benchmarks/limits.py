"""Roofline of training: measured peaks, the work of each network, the lower bound of a step, and the distance to it.

Claim     none: it shows what bounds each network, and how far jaxnn is from the bound
Command   python experiments/benchmarks/limits.py

The lower bound of a step is the longer of two times: its matrix products and convolutions at the best rate that XLA,
NumPy or oneDNN reaches in a large one on this device, and its unavoidable bytes at the memory bandwidth. The bytes are
parameters and Adam's two moments, read and written once, and all residuals of the forward pass, written and read once.
Caches are faster than memory, so the second is not a strict bound for small networks.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from harness import describe_machine, interleaved, per_call
from jax.extend import core

import jaxnn as jn
from jaxnn.observe import text_table

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
import flax_networks
import jax_contender
import problem as problem_files
import problems

ADAM_PASSES = 6  # p, m and v, each read and written
CHANNELS_LAST: Any = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    networks: tuple[str, ...] = tuple(name for name in problems.SETTINGS if name != "gpt2_124m")
    rounds: int = 5
    out: Path = Path("runs/benchmarks")


def fastest(call: Callable[[], Any], repeats: int = 10) -> float:
    """Returns the seconds of the fastest of some calls, after a warm-up."""
    jax.block_until_ready(call())
    return min(interleaved({0: per_call(lambda: jax.block_until_ready(call()), 0.0)}, rounds=repeats)[0])


def product_rates() -> dict[str, float]:
    """Returns FLOP/s of the best large float32 product of each library that is here, by its name."""
    rates: dict[str, float] = {}
    for size in (512, 1024, 2048):
        square = np.ones((size, size), np.float32)
        calls = {"XLA": functools.partial(jax.jit(jnp.matmul), *jax.device_put((square, square)))}
        if jax.default_backend() == "cpu":
            calls["NumPy"] = functools.partial(np.matmul, square, square)
        for name, call in calls.items():
            rates[name] = max(rates.get(name, 0), 2 * size**3 / fastest(call))
    if importlib.util.find_spec("jaxnn_native") is not None:
        images, kernel = jnp.ones((256, 10, 10, 128)), jnp.ones((3, 3, 128, 128))
        convolve = jax.jit(functools.partial(jn.nn.conv_general_dilated, implementation="native", **CHANNELS_LAST))
        rates["oneDNN"] = 2 * 256 * 8 * 8 * kernel.size / fastest(lambda: convolve(images, kernel))
    return rates


def memory_rate() -> float:
    """Returns bytes/s, read and written, of an addition to an array larger than any cache."""
    array = jnp.ones(2**26)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def call() -> jax.Array:
        nonlocal array
        array = add(array)
        return array

    return 2 * array.nbytes / fastest(call)


def work(problem: Any) -> tuple[float, int]:
    """Returns the FLOPs in products, and the unavoidable bytes, of one training step of the plain network."""
    task = task_of(problem)
    rows = slice(problem.batch_size)
    batch = jn.Batch(problem.inputs[rows], problem.targets[rows], np.ones(problem.batch_size, np.float32))
    key = jax.random.key(0)
    state = jax.eval_shape(lambda key: jn.steps.init_train_state(task, optax.adam(1e-3), key, batch), key)

    def backward(params: Any, model_state: Any) -> Any:
        vjp: Any = jax.vjp(lambda params: task.loss(params, model_state, batch, key)[0], params)[1]
        # Without the parameters, which the optimizer's passes count.
        return vjp.opaque_residuals, vjp.structured_residuals

    kept = jax.eval_shape(backward, state.params, state.model_state)
    step = jax.make_jaxpr(jn.steps.make_train_step(task, optax.adam(1e-3)))(state, batch)
    return flops(step.jaxpr), ADAM_PASSES * jn.observe.nbytes(state.params) + 2 * jn.observe.nbytes(kept)


def flops(jaxpr: Any) -> float:
    """Returns the FLOPs of the matrix products and convolutions of a program; scans count every iteration."""
    total = 0.0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(flops(inner) for inner in core.jaxprs_in_params(equation.params))
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            total += 2 * math.prod(equation.outvars[0].aval.shape) * products_each(equation)
    return total


def products_each(equation: Any) -> float:
    """Returns the multiplications per output element, without those by the zeros of dilation."""
    left, right = (operand.aval.shape for operand in equation.invars[:2])
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        return math.prod(left[axis] for axis in numbers[0][0])
    kernel = math.prod(right) / right[numbers.rhs_spec[0]]
    return kernel / math.prod(equation.params["lhs_dilation"])


def task_of(problem: Any) -> jn.Task:
    """Returns the task of the plain network."""
    make_task = jn.tasks.next_token if problem.targets.ndim == 2 else jn.tasks.classification
    return make_task(flax_networks.network(problem.network, True))


def seconds_per_step(problem: Any, steps: int, rounds: int) -> list[float]:
    """Returns the seconds per step of jaxnn's ``fit``, one value per round."""
    train = jax_contender.make(
        problem, dropout=True, steps=steps, options=problem_files.Options("jaxnn", "", "float32", print)
    )
    train()
    return [seconds / steps for seconds in interleaved({0: per_call(train, 0.0)}, rounds=rounds)[0]]


def main(options: Options) -> None:
    """Measures the device, then each network, and prints the ratios."""
    rates, bandwidth = product_rates(), memory_rate()
    rate = max(rates.values())
    listed = ", ".join(f"{name} {one / 1e9:.0f}" for name, one in rates.items())
    print(f"products {listed} GFLOP/s, memory {bandwidth / 1e9:.1f} GB/s; {describe_machine()}", flush=True)
    results, table = {}, []
    for name in options.networks:
        with tempfile.TemporaryDirectory() as folder:
            problems.write_problem(name, Path(folder))
            problem = problem_files.read(Path(folder))
            num_flops, num_bytes = work(problem)
            measured = seconds_per_step(problem, problems.SETTINGS[name].round_steps, options.rounds)
        floors = {"products": num_flops / rate, "memory": num_bytes / bandwidth}
        bound = max(floors, key=lambda kind: floors[kind])
        median = statistics.median(measured)
        work_done = f"{num_flops / 1e9:.3g}", f"{num_bytes / 1e6:.3g}"
        times = f"{1e3 * floors[bound]:.3g}", bound, f"{1e3 * median:.3g}", f"{floors[bound] / median:.0%}"
        table.append((name, *work_done, *times))
        results[name] = {"flops": num_flops, "bytes": num_bytes, "floor_seconds": floors, "seconds": measured}
    print(text_table(table, ("network", "GFLOP", "MB", "bound ms", "bound by", "jaxnn ms", "bound/jaxnn")))
    device = {"products_flops_per_second": rates, "memory_bytes_per_second": bandwidth}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"limits_{jax.default_backend()}.json"
    path.write_text(json.dumps({**describe_machine()._asdict(), **device, "networks": results}, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
