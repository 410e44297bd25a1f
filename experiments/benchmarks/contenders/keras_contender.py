"""Keras on JAX and on PyTorch: compile and fit, as in its documentation."""

import os
import time
from collections.abc import Callable, Iterator

import keras
import keras_networks
from problem import Options, Problem

TRIED = 1, 16
TRIAL_STEPS = 32


def make(problem: Problem, *, dropout: bool, steps: int, options: Options) -> Callable[[], float]:
    """Returns a round of ``steps`` training steps that returns their mean loss."""
    configure(options)
    model = keras_networks.build(problem.network, problem.weights, dropout=dropout)
    count = 1
    if dropout and keras.backend.backend() == "jax":  # PyTorch's backend supports only 1
        count = fastest(model, problem)
        options.note(f"steps_per_execution {count}")
    compile_model(model, problem.learning_rate, count)
    parts = slices(problem.num_batches, steps)
    return lambda: sum(fit(model, problem, *part) for part in next(parts)) / steps


def configure(options: Options) -> None:
    """Sets the precision; on PyTorch all cores and no denormals, as for plain PyTorch."""
    keras.utils.set_random_seed(0)
    if options.dtype == "bfloat16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.set_flush_denormal(True)
        if options.device == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True


def compile_model(model: keras.Model, learning_rate: float, steps_per_execution: int) -> None:
    """Compiles with Adam and cross-entropy of logits; Keras decides on ``jit_compile``.

    Keras adds epsilon before it corrects the bias of the second moment, others after: this changes the losses of the
    first steps by some thousandths.
    """
    model.compile(
        keras.optimizers.Adam(learning_rate, beta_1=0.9, beta_2=0.999, epsilon=1e-8),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile="auto",
        steps_per_execution=steps_per_execution,
    )


def fastest(model: keras.Model, problem: Problem) -> int:
    """Returns the fastest number of steps per execution on the first batches; restores the weights."""
    before, seconds = model.get_weights(), {}
    stop = min(TRIAL_STEPS, problem.num_batches)
    for count in TRIED:
        compile_model(model, problem.learning_rate, count)
        fit(model, problem, 0, stop, shuffle=False)
        started = time.perf_counter()
        fit(model, problem, 0, stop, shuffle=False)
        seconds[count] = time.perf_counter() - started
    model.set_weights(before)
    return min(seconds, key=seconds.__getitem__)


def fit(model: keras.Model, problem: Problem, start: int, stop: int, shuffle: bool) -> float:
    """Trains on the batches from ``start`` to ``stop`` and returns the sum of their losses."""
    rows = slice(start * problem.batch_size, stop * problem.batch_size)
    inputs, targets = problem.inputs[rows], problem.targets[rows]
    history = model.fit(inputs, targets, batch_size=problem.batch_size, shuffle=shuffle, verbose=0)
    return history.history["loss"][0] * (stop - start)


def slices(num_batches: int, steps: int) -> Iterator[list[tuple[int, int, bool]]]:
    """Yields for each round: first batch, last batch, whether shuffled, each within one epoch."""
    done = 0
    while True:
        parts, left = [], steps
        while left:
            passes, start = divmod(done, num_batches)
            count = min(left, num_batches - start)
            parts.append((start, start + count, passes > 0))
            done, left = done + count, left - count
        yield parts
