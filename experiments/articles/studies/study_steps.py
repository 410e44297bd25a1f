"""Programs that scaling is measured with: training steps on several devices, and all-reduces alone."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from articles.studies.study_collectives import Collective, read_collectives
from harness import NotMeasured
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxnn as jn
from jaxnn.engine import make_step as make_train_step
from jaxnn.parallel import SINGLE_DEVICE, Layout, computing_on

# This many all-reduces per call amortize the overhead of the call.
REDUCTIONS = 8
REPLICATED, SHARDED = PartitionSpec(), PartitionSpec(None, "data")


class Step(NamedTuple):
    """A compiled training program with its arguments.

    Attributes:
        call: trains for some steps and waits.
        losses: of the first call.
        digest: of the trained parameters and model state after the first call.
        collectives: of one step.
        cores: number of busy CPU cores.
    """

    call: Callable[[], Any]
    losses: np.ndarray
    digest: str
    collectives: tuple[Collective, ...]
    cores: float


def make_step(
    experiment: jn.Experiment[Any], splits: jn.Splits, devices: Sequence[jax.Device], rows: int, steps: int, alone: bool
) -> Step:
    """Compiles training on ``devices`` with ``rows`` examples each, on batches that are already on the devices.

    Args:
        experiment: what to train, with data parallelism.
        splits: its data.
        devices: to train on.
        rows: examples per device and step.
        steps: per call.
        alone: whether each device trains its own copy on its own rows: the same step without collectives.
    """
    config, source = experiment.config, splits.train
    mesh = Mesh(np.array(devices), ("data",))
    batch_size = rows * len(devices)
    if batch_size > source.num_examples:
        raise NotMeasured(f"{batch_size} examples per step are more than the {source.num_examples} of the data")
    # Boosted trees order all rows of their table; a smaller one has the first of them.
    ordered = source.num_examples if hasattr(source, "bins") else batch_size
    order = np.asarray(source.order(config.seed, np.arange(steps), ordered))[:, :batch_size]
    batches = jax.vmap(lambda rows: source.as_batch(rows))(
        jax.tree.map(lambda a: a.reshape(steps, batch_size, *a.shape[1:]), source.read(order.reshape(-1)))
    )
    first = jax.tree.map(lambda a: a[0, : rows if alone else batch_size], batches)
    everywhere, layout = NamedSharding(mesh, REPLICATED), Layout(mesh=mesh)
    # On one device: a sum over the rows of several has another order.
    init = functools.partial(jn.steps.init_train_state, experiment.task(config), experiment.optimizer(config))
    with computing_on(devices[0].platform):
        state = jax.device_put(jax.jit(init)(jax.random.key(config.seed), first), everywhere)
    batches = jax.device_put(batches, NamedSharding(mesh, SHARDED))
    step = make_train_step(experiment, SINGLE_DEVICE if alone or len(devices) == 1 else layout)

    def train(state: Any, batches: Any) -> Any:
        return jax.lax.scan(step, state, batches)

    if alone:
        train = jax.shard_map(train, mesh=mesh, in_specs=(REPLICATED, SHARDED), out_specs=REPLICATED, check_vma=False)
    with computing_on(devices[0].platform):  # implementations are those of the platform
        compiled = jax.jit(train, donate_argnums=0, out_shardings=everywhere).lower(state, batches).compile()
    state, metrics = compiled(state, batches)
    losses, trained = np.asarray(metrics["loss"]), jax.device_get((state.params, state.model_state))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trained))).hexdigest()[:12]
    wall, work = time.perf_counter(), time.process_time()
    state, _ = jax.block_until_ready(compiled(state, batches))
    cores = (time.process_time() - work) / (time.perf_counter() - wall)

    def call() -> Any:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, batches))
        return metrics

    return Step(call, losses, digest, read_collectives(compiled.as_text() or "", len(devices), steps), cores)


def make_reduction(devices: Sequence[jax.Device], num_bytes: int) -> Callable[[], Any]:
    """Returns a call of `REDUCTIONS` consecutive all-reduces of an array of ``num_bytes``."""
    mesh = Mesh(np.array(devices), ("data",))

    def reduce(array: jax.Array) -> jax.Array:
        for _ in range(REDUCTIONS):
            # If XLA knew that the array is replicated, it would multiply instead.
            own = 0.0 * jax.lax.axis_index("data").astype(jnp.float32)
            array = jax.lax.psum(array.at[0].add(own), "data")
        return array

    program = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False))
    zeros = jax.device_put(np.zeros(max(1, num_bytes // 4), np.float32), NamedSharding(mesh, REPLICATED))
    return lambda: jax.block_until_ready(program(zeros))
