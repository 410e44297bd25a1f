"""What is measured for advice: the parts of a step, batch sizes, and members under one ``vmap``."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxnn import engine
from jaxnn.observe import available_bytes, format_bytes, text_table
from jaxnn.parallel import computing_on, find_devices
from jaxnn.sweeps import SweepOptions, grid, plan_sweep
from jaxnn.types import Batch, ConfigError, Experiment, Splits

# A size with this share of the best throughput is as good, and leaves more updates for the same examples.
NEARLY = 0.9
# The search goes up to this many times the config's own size.
MOST = 64
# If a call of fewer is short, its own cost would count as the steps'.
MANY_STEPS = 256


class BatchSizePlan(NamedTuple):
    """The speed of an experiment at several batch sizes on this machine.

    Attributes:
        trials: the sizes that were tried, smallest first; ``per_second`` is of examples.
        smallest: the smallest size that reaches nine tenths of the best throughput.
        note: why larger ones were not tried, if memory forbade it.
    """

    trials: tuple[engine.Trial, ...]
    smallest: int
    note: str | None

    def __str__(self) -> str:
        rows = [
            (
                str(trial.size),
                f"{trial.per_second:,.0f}",
                f"{1e3 * trial.seconds:.3g}",
                format_bytes(trial.temporary_bytes),
                "← the smallest that is nearly as fast as any" if trial.size == self.smallest else "",
            )
            for trial in self.trials
        ]
        table = text_table(rows, ("batch size", "examples/s", "ms/step", "temporaries", ""))
        return f"{table}\nbatch size {self.note}" if self.note else table

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plan_batch_size(
    experiment: Experiment[Any], batch_sizes: Sequence[int] | None = None, device: str | None = None
) -> BatchSizePlan:
    """Measures examples per second at several batch sizes, and the memory they take; nothing is trained or written.

    It shows how the machine is filled, not what learns best: a larger batch may need another learning rate.

    Args:
        experiment: what would be run.
        batch_sizes: the sizes to try, ascending; default: doubling from a quarter of the config's until it is no
            faster, no longer fits, or is 64 times that.
        device: the kind of device, ``cpu``, ``gpu`` or ``tpu``; None: JAX's default.

    Raises:
        ConfigError, DataError: it cannot be run.
    """
    config = experiment.config
    with computing_on(device):
        engine.check_config(config)
        splits = experiment.data(config)
        engine.check_data(splits)
        engine.check_parts(experiment)
        for size in batch_sizes or ():
            engine.check_count("batch_size", size, 1)
        doubling = [max(1, config.batch_size // 4)]
        while 2 * doubling[-1] <= config.batch_size * MOST:
            doubling.append(2 * doubling[-1])
        sizes = [size for size in sorted(set(batch_sizes or doubling)) if size <= splits.train.num_examples]
        if not sizes:
            raise ConfigError(f"no batch size to try is within the {splits.train.num_examples} training examples.")
        free = available_bytes(find_devices(device)[0])

        def attempt(size: int) -> engine.Trial:
            programs = engine.programs_of(experiment.replace(batch_size=size), splits)
            make_call = engine.make_calls(programs, "to plan the batch size")
            for num_steps in (engine.ENOUGH_STEPS, MANY_STEPS):
                call = make_call(num_steps)
                trial = engine.try_size(size, num_steps, call, programs.temporary_bytes(None, num_steps))
                if trial.seconds * num_steps > engine.PROBE_SECONDS:
                    break
            return trial

        trials = [attempt(sizes[0])]
        # The config's own is what others are compared with.
        memory = None if free is None else engine.MEMORY_SHARE * free
        note = engine.widen(sizes, trials, attempt, free_bytes=memory, least=config.batch_size)
    best = max(trial.per_second for trial in trials)
    smallest = next(trial.size for trial in trials if trial.per_second >= NEARLY * best)
    return BatchSizePlan(tuple(trials), smallest, note)


def plan_members(experiment: Experiment[Any], num_members: int, kind: str) -> tuple[engine.Trial, ...]:
    """Measures up to ``num_members`` members under one vmap, which differ in their seed; raises as a sweep does."""
    options = SweepOptions(devices=1, record=False, progress="none", plan_only=True)
    with computing_on(kind):
        plan = plan_sweep(experiment, grid(seed=range(num_members)), engine.with_changes(options, {"device": kind}))
        chosen = plan.trainer(plan.groups[0]).vmapped
    assert chosen is not None
    return chosen.trials


class StepParts(NamedTuple):
    """The seconds of one step that is a call of its own, on a batch that is on the device."""

    call: float  # a call that computes next to nothing
    forward: float  # from the batch to the loss
    backward: float  # from the loss to the gradient of all parameters
    update: float  # from the gradient to the next state


def measure_parts(experiment: Experiment[Any], splits: Splits, kind: str) -> StepParts:
    """Times programs that do more and more of a step on a ``kind`` of device; a part is what it adds, at least 0."""

    def loss(params: Any, state: Any, batch: Any) -> Any:
        task = experiment.task(experiment.config)
        return task.loss(params, state.model_state, batch, state.key)

    parts: list[Callable[[Any, Any], Any]] = [
        lambda state, batch: state.step + 1,
        lambda state, batch: loss(state.params, state, batch),
        lambda state, batch: jax.value_and_grad(loss, has_aux=True)(state.params, state, batch),
        engine.make_step(experiment),
    ]
    with computing_on(kind):
        programs = engine.programs_of(experiment, splits, resident=False)
        state, batch = programs.init(), splits.train.as_batch(programs.first_examples)

        def seconds(part: Callable[[Any, Any], Any]) -> float:
            # The mask is closed over: like a run's step, the program is to know that the batch is full.
            program = jax.jit(lambda state, inputs, targets: part(state, Batch(inputs, targets, batch.mask)))
            return engine.try_size(1, 1, lambda: program(state, batch.inputs, batch.targets), 0).seconds

        call, forward, gradient, step = map(seconds, parts)
    forward, gradient, step = max(forward, call), max(gradient, forward, call), max(step, gradient, forward, call)
    return StepParts(call, forward - call, gradient - forward, step - gradient)
