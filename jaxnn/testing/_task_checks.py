"""Checks of tasks and training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxnn.parallel import Layout
from jaxnn.steps import init_train_state, make_evaluate_step, make_train_step
from jaxnn.tasks import averaged_over
from jaxnn.testing._agreement import BFLOAT16_TOLERANCE, LeftOut, at, cast, difference, moved, run_checks, stacked
from jaxnn.types import Batch, ConfigError, Metrics, Task, TrainState, TrainStep, is_key, named_leaves

STEP_CHECKS = ("jit", "trace", "vmap", "parameters")
"""The checks of `check_step`."""
TASK_CHECKS = (*STEP_CHECKS, "padding", "sums", "bfloat16", "devices", "pmap")
"""The checks of `check_task` by default; `padded step` is another one."""
NUM_STEPS = 3


def check_task(
    task: Task,
    batch: Batch,
    *,
    optimizer: Any = None,
    state: TrainState | None = None,
    checks: Sequence[str] = TASK_CHECKS,
    num_devices: int = 2,
    tolerance: float = 1e-5,
) -> dict[str, str]:
    """Checks that ``task`` computes the same however jaxnn runs it, on ``batch`` of at least four examples.

    - ``jit``: a training step and an evaluation without `jax.jit` equal those with it;
    - ``trace``: three steps are traced once;
    - ``vmap``: two members, mapped over scanned steps, equal a loop;
    - ``parameters``: each gets a gradient that is finite and not zero everywhere;
    - ``padding``: an example whose mask is 0 adds nothing to an evaluation;
    - ``padded step``, not by default: nor does it change a training step, for tasks whose loss heeds the mask;
    - ``sums``: evaluations of parts of a batch add up to that of all, in a shorter batch too;
    - ``bfloat16``: parameters and inputs in bfloat16 give a finite loss near that in float32;
    - ``devices``: a step on ``num_devices`` devices equals that of one, by strategy ``data``;
    - ``pmap``: the same by strategy ``pmap``, where a device sees its rows alone.

    ``optimizer`` is Optax's SGD with momentum by default, ``state`` what `steps.init_train_state` returns for it.
    Numbers may differ by ``tolerance``, relative or absolute. Returns ``"passed"``, or why it was left out, by check.
    Raises ConformanceError with a line for each failed check, ConfigError for an unknown check or too small a batch.

    >>> task = jn.tasks.classification(jn.models.MLP((8, 10)))
    >>> jn.testing.check_task(task, batch, checks=("padding", "sums"))
    {'padding': 'passed', 'sums': 'passed'}
    """
    if not isinstance(task, Task):
        raise ConfigError(
            f"check_task needs a Task, as jn.tasks.classification(model) returns, not a {type(task).__name__}."
        )
    _check_batch("check_task", batch)
    if len(batch.mask) < 4:
        raise ConfigError(f"check_task needs a batch of at least 4 examples, not {len(batch.mask)}.")
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    if state is None:
        state = jax.jit(partial(init_train_state, task, optimizer))(jax.random.key(0), batch)
    evaluate = None if task.evaluate is Task(task.init).evaluate else make_evaluate_step(task)
    trained = _Trained(make_train_step(task, optimizer), evaluate, state, batch, tolerance)
    found = {
        **trained.step_checks,
        "padding": lambda: trained.padding()[1] if evaluate else _without_evaluate(),
        "padded step": lambda: trained.padding()[0],
        "sums": lambda: trained.sums(evaluate) if evaluate else _without_evaluate(),
        "bfloat16": lambda: trained.narrow_loss(task),
        "devices": lambda: trained.on_devices(task, optimizer, "data", num_devices),
        "pmap": lambda: trained.on_devices(task, optimizer, "pmap", num_devices),
    }
    return run_checks("check_task", found, checks)


def check_step(
    step: TrainStep,
    state: TrainState,
    batch: Batch,
    *,
    checks: Sequence[str] = STEP_CHECKS,
    tolerance: float = 1e-5,
) -> dict[str, str]:
    """Checks that a training step computes the same however jaxnn runs it: `jit`, `trace`, `vmap`, `parameters`.

    ``step(state, batch) -> (state, metrics)`` is what the experiment's ``step`` makes of a task and an optimizer. See
    `check_task` for the checks, arguments, results and errors; ``parameters`` here means: each moves and stays finite.

    >>> task, optimizer = jn.tasks.classification(jn.models.MLP((8, 10))), optax.sgd(0.1)
    >>> state = jn.steps.init_train_state(task, optimizer, jax.random.key(0), batch)
    >>> jn.testing.check_step(jn.steps.make_train_step(task, optimizer), state, batch, checks=("jit", "parameters"))
    {'jit': 'passed', 'parameters': 'passed'}
    """
    if not isinstance(state, TrainState):
        raise ConfigError(
            f"check_step needs a state, as jn.steps.init_train_state returns, not a {type(state).__name__}."
        )
    _check_batch("check_step", batch)
    return run_checks("check_step", _Trained(step, None, state, batch, tolerance).step_checks, checks)


class _Trained:
    """A training step and perhaps an evaluation, one program of both, and the states after a few steps.

    Batches and all but the keys of states are NumPy's arrays: nothing is compiled for them.
    """

    def __init__(
        self,
        step: TrainStep,
        evaluate: Callable[..., Metrics] | None,
        state: TrainState,
        batch: Batch,
        tolerance: float,
    ) -> None:
        self.step = step
        self.evaluate = evaluate
        self.start: TrainState = jax.tree.map(_on_host, state)
        self.batch = jax.device_get(batch)
        self.tolerance = tolerance
        self.traces = 0

    def both(self, state: TrainState, batch: Batch) -> Any:
        """A step, and the sums of an evaluation."""
        self.traces += 1
        return self.step(state, batch), {} if self.evaluate is None else self.evaluate(state, batch)

    @cached_property
    def compiled(self) -> Callable[[TrainState, Batch], Any]:
        """`both` as one program."""
        program = jax.jit(self.both)
        return lambda state, batch: jax.device_get(program(state, batch))

    @cached_property
    def batches(self) -> list[Batch]:
        """The batch, and others that have its rows in another order."""
        return [jax.tree.map(lambda rows, k=k: np.roll(rows, k, axis=0), self.batch) for k in range(NUM_STEPS)]

    @cached_property
    def starts(self) -> list[TrainState]:
        """The first states of two members, whose parameters differ."""
        start = self.start
        return [start, start._replace(params=moved(start.params, 0.1), key=jax.random.split(start.key)[0])]

    @cached_property
    def loops(self) -> list[list[Any]]:
        """The results of the step of each batch after those before it, by member."""
        results = []
        for state in self.starts:
            steps = list[Any]()
            for batch in self.batches:
                steps.append(self.compiled(state, batch)[0])
                state = steps[-1][0]
            results.append(steps)
        return results

    @property
    def step_checks(self) -> dict[str, Callable[[], str | None]]:
        """The checks of a training step, by name."""
        return {
            "jit": self.without_jit,
            "trace": self.traced_once,
            "vmap": self.mapped_steps,
            "parameters": self.moved_parameters,
        }

    def without_jit(self) -> str | None:
        stepped, sums = self.compiled(self.start, self.batch)
        with jax.disable_jit():
            found, found_sums = self.both(*jax.tree.map(jnp.asarray, (self.start, self.batch)))
        self.traces -= 1  # that was none
        by_jit, without = {**_named(stepped), "evaluate": sums}, {**_named(found), "evaluate": found_sums}
        return difference(without, by_jit, self.tolerance, "without jit")

    def traced_once(self) -> str | None:
        after = self.loops[0][-1][0]
        jax.eval_shape(partial(jax.lax.scan, self.step), self.start, stacked(*self.batches))
        if self.traces > 1:
            return f"{NUM_STEPS} steps were traced {self.traces} times"
        counted, expected = {"step": after.step}, {"step": self.start.step + NUM_STEPS}
        return difference(counted, expected, 0, f"after {NUM_STEPS} steps")

    def mapped_steps(self) -> str | None:
        loops = self.loops
        scan = jax.jit(jax.vmap(partial(jax.lax.scan, self.step), (0, None)))
        found = scan(stacked(*self.starts), stacked(*self.batches))
        ends = stacked(*(loop[-1][0] for loop in loops))
        metrics = stacked(*(stacked(*(one for _, one in loop)) for loop in loops))
        return difference(_named(found), _named((ends, metrics)), self.tolerance, "in two members, mapped")

    def moved_parameters(self) -> str | None:
        after = self.loops[0][-1][0]
        named = named_leaves(self.start.params).items()
        for (name, old), new in zip(named, jax.tree.leaves(after.params), strict=True):
            if not np.isfinite(np.float32(new)).all():
                return f"parameter {name} is not finite after {NUM_STEPS} steps"
            if np.array_equal(old, new):
                return f"no step changes parameter {name}"
        return None

    def padding(self) -> list[str | None]:
        """What an example whose mask is 0 changes in a training step and in an evaluation."""
        index = np.arange(len(self.batch.mask))
        padded = _masked(self.batch, index < len(index) - 1)
        inputs, targets = jax.tree.map(lambda rows: np.concatenate([rows[:-1], rows[:1]]), tuple(self.batch[:2]))
        other = padded._replace(inputs=inputs, targets=targets)
        pairs = zip(self.compiled(self.start, other), self.compiled(self.start, padded), strict=True)
        return [difference(*pair, self.tolerance, "if an example whose mask is 0 is another one") for pair in pairs]

    def sums(self, evaluate: Callable[..., Metrics]) -> str | None:
        batch, size = self.batch, len(self.batch.mask)
        index, half = np.arange(size), size // 2
        first, second, whole = (
            self.compiled(self.start, _masked(batch, counts))[1]
            for counts in (index < half, index >= half, index < size)
        )
        added = jax.tree.map(np.add, first, second)
        if (fault := difference(added, whole, 4 * self.tolerance, "as the sum of two halves of a batch")) is not None:
            return fault
        short = jax.jit(evaluate)(self.start, _masked(at(batch, slice(half)), np.ones(half)))
        return difference(short, first, 4 * self.tolerance, "in a batch without padding")

    def narrow_loss(self, task: Task) -> str | None:
        program = jax.jit(lambda state, batch: task.loss(state.params, state.model_state, batch, state.key)[0])
        wide = program(self.start, self.batch)
        state, inputs = cast((self.start, self.batch.inputs), jnp.bfloat16)
        narrow = program(state._replace(opt_state=self.start.opt_state), self.batch._replace(inputs=inputs))
        return difference(np.float32(narrow), np.float32(wide), BFLOAT16_TOLERANCE, "in bfloat16")

    def on_devices(self, task: Task, optimizer: Any, strategy: str, num_devices: int) -> str | None:
        if jax.local_device_count() < num_devices:
            wanted = f"set JAX_NUM_CPU_DEVICES={num_devices}"
            raise LeftOut(f"left out: there are fewer than {num_devices} devices; {wanted}")
        layout = Layout.make(strategy, num_devices)
        rows = len(self.batch.mask) // num_devices * num_devices
        same = at(self.batch, slice(rows))
        step = make_train_step(averaged_over(task, layout.axis_name), optimizer)

        def sharded(state: TrainState, batch: Batch) -> Any:
            return step(state, layout.local_shard(layout.constrain(batch)))

        found = jax.jit(layout.wrap(sharded))(*jax.device_put((self.start, same), layout.replicated))
        whole = rows == len(self.batch.mask)
        expected = self.compiled(self.start, same)[0] if whole else jax.jit(self.step)(self.start, same)
        return difference(_named(found), _named(expected), 10 * self.tolerance, f"on {num_devices} devices")


def _on_host(leaf: Any) -> Any:
    """A NumPy array; of keys, which have none, the same on the default device."""
    if not is_key(leaf):
        return jax.device_get(leaf)
    return jax.random.wrap_key_data(jax.device_get(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))


def _without_evaluate() -> None:
    raise LeftOut("left out: the task has no evaluate")


def _check_batch(name: str, batch: Any) -> None:
    if not isinstance(batch, Batch) or batch.mask is None:
        raise ConfigError(f"{name} needs a batch jn.Batch(inputs, targets, mask), not a {type(batch).__name__}.")


def _named(results: Any) -> dict[str, Any]:
    """The results of a step, by name."""
    return dict(zip(("state", "metrics"), results, strict=True))


def _masked(batch: Batch, counts: Any) -> Batch:
    return batch._replace(mask=np.asarray(counts, np.float32))
