"""Memory and time of a deep network with rematerialization and with a scan over its layers.

python experiments/benchmarks/depth.py --rounds 3

For a training step of ViT-Ti/16 (12 layers, 224x224 images): the temporary memory that XLA reserves, and processor time
of the compilation and of a step, which other processes lengthen less than the time by the clock. Variants alternate;
medians with minimum and maximum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

import jaxnn as jn

VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "remat": {"remat": True},
    "scan": {"scan": True},
    "remat and scan": {"remat": True, "scan": True},
}


def measure(variant: str, batch_size: int) -> tuple[float, float, float]:
    """Returns MiB of temporary memory, and processor seconds of compilation and of a step."""
    model, images = jn.models.create("vit_ti_16", **VARIANTS[variant]), jnp.ones((batch_size, 224, 224, 3))
    optimizer, labels = optax.adam(1e-3), jnp.zeros(batch_size, int)
    shapes = linen.unbox(jax.eval_shape(model.init, jax.random.key(0), images))["params"]
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01), shapes)

    def step(params: Any, state: Any, images: jax.Array) -> tuple[Any, Any]:
        loss = lambda params: jn.nn.cross_entropy(model.apply({"params": params}, images), labels).mean()  # noqa: E731
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    arguments = (params, optimizer.init(params), images)
    lowered = jax.jit(step).lower(*arguments)
    start = time.process_time()
    program = lowered.compile()
    compiled = time.process_time()
    jax.block_until_ready(program(*arguments))
    stepped = time.process_time()
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes / 2**20, compiled - start, stepped - compiled


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant, rows in found.items():
            rows.append(measure(variant, options.batch_size))
    for variant, rows in found.items():
        columns = [
            f"{statistics.median(part):.1f} ({min(part):.1f}-{max(part):.1f})" for part in zip(*rows, strict=True)
        ]
        print(f"{variant:16} {columns[0]} MiB, {columns[1]} s to compile, {columns[2]} s per step")


if __name__ == "__main__":
    main()
