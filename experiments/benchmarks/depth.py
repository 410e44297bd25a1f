"""Memory and time of a deep network with rematerialization and with a scan over its layers.

python experiments/benchmarks/depth.py --rounds 3

For a training step of ViT-Ti/16 (12 layers, 224x224 images): the temporary memory that XLA reserves, the time to
compile, and the time of a step. Variants alternate; medians with minimum and maximum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
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


def compiled(variant: str, images: jax.Array) -> tuple[float, Any, Callable[[], Any]]:
    """Returns seconds to compile, the program, and a function that runs a step."""
    model = jn.models.create("vit_ti_16", **VARIANTS[variant])
    optimizer, labels = optax.adam(1e-3), jnp.zeros(len(images), int)
    params = linen.unbox(jax.jit(model.init)(jax.random.key(0), images))["params"]

    def step(params: Any, state: Any, images: jax.Array) -> tuple[Any, Any]:
        loss = lambda params: jn.nn.cross_entropy(model.apply({"params": params}, images), labels).mean()  # noqa: E731
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    lowered = jax.jit(step).lower(params, state, images)
    start = time.perf_counter()
    program = lowered.compile()
    return time.perf_counter() - start, program, lambda: jax.block_until_ready(program(params, state, images))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    images = jnp.ones((options.batch_size, 224, 224, 3))
    seconds: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    memory = {}
    for _ in range(options.rounds):
        for variant, times in seconds.items():
            jax.clear_caches()
            compile_seconds, program, run = compiled(variant, images)
            memory[variant] = program.memory_analysis().temp_size_in_bytes / 2**20
            run()
            start = time.perf_counter()
            run()
            times.append((compile_seconds, time.perf_counter() - start))
    for variant, times in seconds.items():
        shown = [
            f"{statistics.median(part):.2f} ({min(part):.2f}-{max(part):.2f}) s" for part in zip(*times, strict=True)
        ]
        print(f"{variant:16} {memory[variant]:6.0f} MiB   compiled in {shown[0]}   step {shown[1]}")


if __name__ == "__main__":
    main()
