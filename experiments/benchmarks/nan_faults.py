"""Ten faults that make a loss NaN: what `jn.autopsy` says of each recorded run, and what `jax_debug_nans` says.

Claim     the autopsy names operation and line in at least 9 of 10
Command   python experiments/benchmarks/nan_faults.py
"""

import contextlib
import dataclasses
import io
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxnn as jn

FEATURES = 64


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 0.1
    batch_size: int = 16
    num_steps: int = 60
    seed: int = 0


def points(config: Config) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(256, FEATURES)).astype(np.float32)
    return inputs, (inputs.sum(axis=1) > 0).astype(np.int32)


def init(key: jax.Array, inputs: jax.Array) -> dict[str, jax.Array]:
    return {"kernel": 0.1 * jax.random.normal(key, (FEATURES, 2)), "scale": jnp.ones(())}


def linear(params: Any, inputs: jax.Array) -> jax.Array:
    return inputs @ params["kernel"]


def log_of_zero(params: Any, inputs: jax.Array) -> jax.Array:
    chance = jax.nn.softmax(params["scale"] ** 4 * 60 * linear(params, inputs))
    return jnp.log(chance)  # fault: log_of_zero


def norm_of_zero(params: Any, inputs: jax.Array) -> jax.Array:
    clipped = jnp.maximum(linear(params, inputs) - 3.5, 0)
    return linear(params, inputs) - jnp.linalg.norm(clipped, axis=-1, keepdims=True)  # fault: norm_of_zero


def half_overflow(params: Any, inputs: jax.Array) -> jax.Array:
    wide = 400 * inputs.astype(jnp.float16)
    product = wide @ (params["scale"] * 100 * params["kernel"]).astype(jnp.float16)  # fault: half_overflow
    return product.astype(jnp.float32) / 10_000


def poisoned_example(params: Any, inputs: jax.Array) -> jax.Array:
    return linear(params, inputs) - jnp.square(inputs).sum(axis=1, keepdims=True)  # fault: poisoned_example


def poisoned_weight(params: Any, inputs: jax.Array) -> jax.Array:
    return inputs @ params["kernel"]  # fault: poisoned_weight


def inside_scan(params: Any, inputs: jax.Array) -> jax.Array:
    def cell(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        grown = jnp.exp(carry)  # fault: inside_scan
        return 2 * jnp.abs(grown - 1) + row, None

    hidden, _ = jax.lax.scan(cell, jnp.zeros((len(inputs), 2)), jnp.repeat(linear(params, inputs)[None], 8, 0))
    return hidden


def under_vmap(params: Any, inputs: jax.Array) -> jax.Array:
    hidden = linear(params, inputs)
    return hidden * jnp.exp(jnp.square(hidden))  # fault: under_vmap


def donated(params: Any, inputs: jax.Array) -> jax.Array:
    hidden = linear(params, inputs)
    return hidden * jnp.sqrt(4 - jnp.abs(hidden))  # fault: donated


def native_kernel(params: Any, inputs: jax.Array) -> jax.Array:
    tokens = inputs[:, :, None, None] * jnp.ones((2, 16))
    queries = tokens * params["scale"] * 1e20
    mixed = jn.nn.attention(queries, queries, tokens)  # fault: native_kernel
    return mixed.mean((2, 3)) @ params["kernel"]


def backward_only(params: Any, inputs: jax.Array) -> jax.Array:
    cosine = jnp.minimum(linear(params, inputs) / 2, 1)
    return jnp.arccos(jnp.maximum(cosine, -0.9))  # fault: backward_only


def poison(config: Config) -> jn.Splits:
    inputs, targets = points(config)
    inputs[77, 5] = 1e25  # finite: jaxnn refuses data that are not
    return jn.data.arrays(train=(inputs, targets))


def poisoned_init(key: jax.Array, inputs: jax.Array) -> dict[str, jax.Array]:
    params = init(key, inputs)
    return params | {"kernel": params["kernel"].at[3, 1].set(jnp.nan)}


def experiment(model: Any, data: Any = None, rate: float = 0.1) -> jn.Experiment:
    return jn.Experiment(
        Config(learning_rate=rate),
        data=data or (lambda config: jn.data.arrays(train=points(config))),
        task=lambda config: jn.tasks.classification(model),
        optimizer=lambda config: optax.sgd(config.learning_rate),
    )


# By name: the experiment, and what the operation, or the input, must contain.
FAULTS: dict[str, tuple[Callable[[], jn.Experiment], str]] = {
    "log_of_zero": (lambda: experiment((init, log_of_zero)), "log of"),
    "norm_of_zero": (lambda: experiment((init, norm_of_zero)), "derivative of sqrt"),
    "half_overflow": (lambda: experiment((init, half_overflow), rate=1.0), "dot_general of float16"),
    "poisoned_example": (lambda: experiment((init, poisoned_example), poison), "square of"),
    "poisoned_weight": (lambda: experiment((poisoned_init, poisoned_weight)), "params/kernel"),
    "inside_scan": (lambda: experiment((init, inside_scan)), "exp of"),
    "under_vmap": (lambda: experiment((init, under_vmap), rate=0.5), "exp of"),
    "donated": (lambda: experiment((init, donated), rate=1.0), "sqrt of"),
    "native_kernel": (lambda: experiment((init, native_kernel)), "jaxnn_attention"),
    "backward_only": (lambda: experiment((init, backward_only)), "derivative of acos"),
}


def diverge(name: str, folder: Path) -> tuple[Any, int | None]:
    """Trains until the loss is no longer finite, and returns the record; of the sweep, a member too."""
    made = FAULTS[name][0]()
    if name == "under_vmap":
        sweep = jn.sweep(
            made, jn.grid(learning_rate=(1e-4, 0.5), seed=(0, 1)), run_dir=folder, progress="none", steps_per_call=10
        )
        return sweep.dir, next(member.index for member in sweep.members if member.status == "diverged")
    with contextlib.suppress(jn.TrainingError):
        jn.fit(made, run_dir=folder, progress="none", steps_per_call=10)
    return folder, None


def debug_nans(name: str, found: Any, step: Any) -> tuple[str, bool, bool]:
    """What `jax_debug_nans` reports of the same step, compiled alone, and whether operation and line are right."""
    run = jax.jit(step.step_function, donate_argnums=0 if name == "donated" else ())
    state = jax.tree.map(jnp.copy, step.state)
    try:
        with jax.debug_nans(True), contextlib.redirect_stderr(io.StringIO()):
            jax.block_until_ready(run(state, step.batch))
    except Exception as error:
        own = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == __file__]
        line = next((one.line or "" for one in reversed(own) if "# fault:" in (one.line or "")), "")
        said = str(error).splitlines()[0]
        # It names the step that fails, as `log`; of a kernel that it is one; of a derivative any of its operations.
        word = FAULTS[name][1].removeprefix("derivative of ").split()[0].replace("jaxnn_attention", "ffi_call")
        return f"{type(error).__name__}: {said}", word in said, f"# fault: {name}" in line
    return "nothing", False, False


def main() -> None:
    rows, num_right = [], {"autopsy": 0, "debug_nans": 0}
    for name, (made, expected) in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            record, member = diverge(name, Path(folder) / "run")
            found = jn.autopsy(record, made(), member=member)
            step = jn.replay(record, made(), found.step, member=member)
            fault = found.fault
            assert fault is not None, name
            said = fault.operation + f" of the derivative of {fault.derivative_of}" * bool(fault.derivative_of)
            said = f"{fault.leaf} {fault.rows or list(fault.index)}" if fault.kind == "input" else said
            right = expected in said, fault.line is not None and f"# fault: {name}" in fault.line.text
            other, *other_right = debug_nans(name, found, step)
            num_right["autopsy"] += all(right)
            num_right["debug_nans"] += all(other_right)
            marks = ["yes" if one else "no" for one in (*right, *other_right)]
            rows.append((name, str(found.step), said, *marks[:2], found.blame, other[:70], *marks[2:]))
            print(f"\n{name}\n{found}", flush=True)
    header = "fault", "step", "jn.autopsy", "operation", "line", "blame", "jax_debug_nans", "operation", "line"
    print(f"\n{jn.observe.text_table(rows, header)}\n")
    print(f"right: autopsy {num_right['autopsy']} of {len(FAULTS)}, jax_debug_nans {num_right['debug_nans']}")
    assert num_right["autopsy"] >= 9


if __name__ == "__main__":
    main()
