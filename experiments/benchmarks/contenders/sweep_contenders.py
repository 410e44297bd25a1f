"""The contenders of the sweep benchmark on JAX: each measures itself for some seconds."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sweep_networks import members

import jaxnn as jn
from jaxnn.engine import CALLS_AHEAD, Population, Shape, Trainer, load_data
from jaxnn.sweeps import plan_sweep
from jaxnn.types import Examples

# Nothing is written or printed.
SILENT: dict[str, Any] = {"record": False, "progress": "none"}


class Measured(NamedTuple):
    """One measurement.

    Attributes:
        rate: member-steps/s of all members in training.
        wall: seconds per member from call to result, with compilation and evaluation; None: not measured.
    """

    rate: float
    wall: float | None = None


type Measure = Callable[[float], Measured]


def opened(experiment: jn.Experiment, num_members: int, vmap_size: int | None, devices: int = 1) -> Trainer:
    """Returns a population on this many devices; its vmap size is chosen unless it is given."""
    options = jn.SweepOptions(vmap_size=vmap_size, devices=devices, **SILENT)
    plan = plan_sweep(experiment, members(experiment, num_members), options)
    return plan.trainer(plan.groups[0])


def laid_out(trainer: Trainer, shape: Shape) -> Population:
    """Returns all members of a population before their first step, on the devices."""
    alive, slots = np.ones(len(trainer.logs), np.bool_), shape.arrange(range(len(trainer.logs)))
    return trainer.programs.lay_out(trainer.host_states(), slots, alive, 0)


def population(trainer: Trainer) -> Measure:
    """Returns a measure of the engine's training program, without reports, evaluation and files."""
    programs, num_steps, shape = trainer.programs, trainer.plan.steps_per_call, trainer.shape(trainer.block)
    assert shape is not None
    zeros = programs.zeros(shape)

    def train(state: Any, num_calls: int) -> tuple[Any, float]:
        program = programs.train(shape, num_steps, "to measure")
        started = time.perf_counter()
        for index in range(num_calls):
            state, totals = program(state, zeros, programs.spec.feed.prepare(index * num_steps, num_steps))
            if index % CALLS_AHEAD == 0:
                jax.block_until_ready(totals)
        jax.block_until_ready(state)
        return state, time.perf_counter() - started

    def measure(seconds: float) -> Measured:
        state, _ = train(laid_out(trainer, shape), 1)
        state, once = train(state, 1)
        num_calls = max(1, round(seconds / once))
        _, taken = train(state, num_calls)
        return Measured(num_calls * num_steps * len(trainer.logs) / taken)

    return measure


def first_losses(experiment: jn.Experiment, num_steps: int) -> float:
    """Returns the mean loss of the first steps of the first of four vmapped members."""
    trainer = opened(experiment, 4, vmap_size=4)
    programs, shape = trainer.programs, trainer.shape(trainer.block)
    assert shape is not None
    program: Any = programs.train(shape, num_steps, "to check")
    _, totals = program(laid_out(trainer, shape), programs.zeros(shape), programs.spec.feed.prepare(0, num_steps))
    return float(np.asarray(totals.sums["loss"])[0, 0]) / num_steps


def swept(experiment: jn.Experiment, num_members: int, devices: int) -> Measure:
    """Returns a measure of complete sweeps."""

    def measure(seconds: float) -> Measured:
        started = time.perf_counter()
        sweep = jn.sweep(experiment, members(experiment, num_members), devices=devices, **SILENT)
        wall = (time.perf_counter() - started) / num_members
        return Measured(sweep.summary["member_steps_per_second"], wall)

    return measure


def fitted(experiment: jn.Experiment) -> Measure:
    """Returns a measure of sequential runs, each with its own compilation and evaluations."""
    seeds = itertools.count()

    def one() -> Measured:
        started = time.perf_counter()
        run = jn.fit(experiment.replace(seed=next(seeds)), record=False, progress="none")
        wall = time.perf_counter() - started
        return Measured(experiment.config.num_steps / run.metrics["seconds"].sum(), wall)

    def measure(seconds: float) -> Measured:
        until, runs = time.perf_counter() + seconds, [one()]
        while time.perf_counter() < until:
            runs.append(one())
        return Measured(*(statistics.mean(values) for values in zip(*runs, strict=True)))

    return measure


def looped(experiment: jn.Experiment) -> Measure:
    """Returns a measure of a handwritten loop: NumPy gathers a batch on the host, a jitted step trains on it."""
    config = experiment.config
    source = load_data(experiment).train
    inputs, targets = source.read(np.arange(source.num_examples))
    task, optimizer = experiment.task(config), experiment.optimizer(config)
    update = jn.steps.make_train_step(task, optimizer)
    per_epoch = source.num_examples // config.batch_size

    def batch(inputs: Any, targets: Any) -> jn.Batch:
        return source.gather(Examples(inputs, targets), jnp.arange(config.batch_size))

    init = jax.jit(lambda key: jn.steps.init_train_state(task, optimizer, key, batch(inputs, targets)))
    step = jax.jit(lambda state, *rows: update(state, batch(*rows)), donate_argnums=0)

    def epoch(state: Any, number: int) -> Any:
        order = np.random.default_rng(number).permutation(source.num_examples)
        history = []
        for rows in order[: per_epoch * config.batch_size].reshape(per_epoch, -1):
            state, metrics = step(state, inputs[rows], targets[rows])
            history.append(metrics["loss"])
        np.mean(jax.device_get(history))  # what a user prints after each epoch
        return state

    def measure(seconds: float) -> Measured:
        state = jax.block_until_ready(epoch(init(jax.random.key(config.seed)), 0))
        epochs, started = 0, time.perf_counter()
        while not epochs or time.perf_counter() - started < seconds:
            epochs += 1
            state = epoch(state, epochs)
        jax.block_until_ready(state)
        return Measured(epochs * per_epoch / (time.perf_counter() - started))

    return measure
