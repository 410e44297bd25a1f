"""Checks of tasks and training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxnn.parallel import make_layout
from jaxnn.steps import init_train_state, make_evaluate_step, make_train_step
from jaxnn.tasks import averaged_over
from jaxnn.testing._agreement import BFLOAT16_TOLERANCE, LeftOut, at, cast, difference, moved, run_checks, stacked
from jaxnn.types import Batch, ConfigError, Metrics, Task, TrainState, TrainStep, named_leaves

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
    trained = _Trained(make_train_step(task, optimizer), evaluate, state, batch)
    found = {
        **_step_checks(trained, tolerance),
        "padding": lambda: _padding(trained, tolerance)[1] if evaluate else _without_evaluate(),
        "padded step": lambda: _padding(trained, tolerance)[0],
        "sums": lambda: _sums(trained, tolerance) if evaluate else _without_evaluate(),
        "bfloat16": lambda: _narrow_loss(task, trained),
        "devices": lambda: _on_devices(task, optimizer, trained, "data", num_devices, 10 * tolerance),
        "pmap": lambda: _on_devices(task, optimizer, trained, "pmap", num_devices, 10 * tolerance),
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
    return run_checks("check_step", _step_checks(_Trained(step, None, state, batch), tolerance), checks)


class _Trained:
    """A training step and perhaps an evaluation, one program of both, and the states after a few steps.

    States and batches are NumPy's arrays, and the key of a state is the numbers in it: nothing is compiled for them.
    """

    def __init__(
        self, step: TrainStep, evaluate: Callable[..., Metrics] | None, state: TrainState, batch: Batch
    ) -> None:
        self.batch = jax.device_get(batch)
        # How the keys among its arrays are made of numbers; None for other arrays.
        self._kinds = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in jax.tree.leaves(state)]
        self.start = jax.device_get(_with_numbers(state))
        self.traces = 0
        self._evaluate = evaluate
        self._step = step

    def with_numbers(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` of states whose key is numbers."""

        def call(state: TrainState, batch: Batch) -> Any:
            state, metrics = step(self.with_keys(state), batch)
            return _with_numbers(state), metrics

        return call

    def with_keys(self, state: TrainState) -> TrainState:
        """``state`` with keys in place of their numbers."""
        leaves, tree = jax.tree.flatten(state)
        pairs = zip(leaves, self._kinds, strict=True)
        wrapped = [leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind) for leaf, kind in pairs]
        return jax.tree.unflatten(tree, wrapped)  # type: ignore[no-any-return]

    @cached_property
    def step(self) -> Callable[..., Any]:
        """The training step."""
        return self.with_numbers(self._step)

    def both(self, state: TrainState, batch: Batch) -> Any:
        """A step, and the sums of an evaluation."""
        self.traces += 1
        sums = {} if self._evaluate is None else self.evaluated(state, batch)
        return self.step(state, batch), sums

    def evaluated(self, state: TrainState, batch: Batch) -> Metrics:
        """The sums of an evaluation."""
        assert self._evaluate is not None
        return self._evaluate(self.with_keys(state), batch)

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
        other = self.start._replace(params=moved(self.start.params, 0.1), key=self.start.key[::-1].copy())
        return [self.start, other]

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


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _with_numbers(state: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, state)  # type: ignore[no-any-return]


def _without_evaluate() -> None:
    raise LeftOut("left out: the task has no evaluate")


def _check_batch(name: str, batch: Any) -> None:
    if not isinstance(batch, Batch) or batch.mask is None:
        raise ConfigError(f"{name} needs a batch jn.Batch(inputs, targets, mask), not a {type(batch).__name__}.")


def _named(results: Any) -> dict[str, Any]:
    """The results of a step, by name."""
    return dict(zip(("state", "metrics"), results, strict=True))


def _step_checks(trained: _Trained, tolerance: float) -> dict[str, Callable[[], str | None]]:
    return {
        "jit": lambda: _without_jit(trained, tolerance),
        "trace": lambda: _traced_once(trained),
        "vmap": lambda: _mapped_steps(trained, tolerance),
        "parameters": lambda: _moved(trained),
    }


def _without_jit(trained: _Trained, tolerance: float) -> str | None:
    stepped, sums = trained.compiled(trained.start, trained.batch)
    with jax.disable_jit():
        found, found_sums = trained.both(*jax.tree.map(jnp.asarray, (trained.start, trained.batch)))
    trained.traces -= 1  # that was none
    by_jit, without = {**_named(stepped), "evaluate": sums}, {**_named(found), "evaluate": found_sums}
    return difference(without, by_jit, tolerance, "without jit")


def _traced_once(trained: _Trained) -> str | None:
    after = trained.loops[0][-1][0]
    jax.eval_shape(partial(jax.lax.scan, trained.step), trained.start, stacked(*trained.batches))
    if trained.traces > 1:
        return f"{NUM_STEPS} steps were traced {trained.traces} times"
    counted, expected = {"step": after.step}, {"step": trained.start.step + NUM_STEPS}
    return difference(counted, expected, 0, f"after {NUM_STEPS} steps")


def _mapped_steps(trained: _Trained, tolerance: float) -> str | None:
    loops = trained.loops
    scan = jax.jit(jax.vmap(partial(jax.lax.scan, trained.step), (0, None)))
    found = jax.device_get(scan(stacked(*trained.starts), stacked(*trained.batches)))
    ends = stacked(*(loop[-1][0] for loop in loops))
    metrics = stacked(*(stacked(*(one for _, one in loop)) for loop in loops))
    return difference(_named(found), _named((ends, metrics)), tolerance, "in two members, mapped")


def _moved(trained: _Trained) -> str | None:
    after = trained.loops[0][-1][0]
    named = named_leaves(trained.start.params).items()
    for (name, old), new in zip(named, jax.tree.leaves(after.params), strict=True):
        if not np.isfinite(np.float32(new)).all():
            return f"parameter {name} is not finite after {NUM_STEPS} steps"
        if np.array_equal(old, new):
            return f"no step changes parameter {name}"
    return None


def _masked(batch: Batch, counts: Any) -> Batch:
    return batch._replace(mask=np.asarray(counts, np.float32))


def _padding(trained: _Trained, tolerance: float) -> list[str | None]:
    """What an example whose mask is 0 changes in a training step and in an evaluation."""
    batch, index = trained.batch, np.arange(len(trained.batch.mask))
    padded = _masked(batch, index < len(index) - 1)

    def replaced(rows: Any) -> Any:
        return np.concatenate([rows[:-1], rows[:1]])

    other = padded._replace(inputs=jax.tree.map(replaced, batch.inputs), targets=jax.tree.map(replaced, batch.targets))
    pairs = zip(trained.compiled(trained.start, other), trained.compiled(trained.start, padded), strict=True)
    return [difference(*pair, tolerance, "if an example whose mask is 0 is another one") for pair in pairs]


def _sums(trained: _Trained, tolerance: float) -> str | None:
    batch, size = trained.batch, len(trained.batch.mask)
    index, half = np.arange(size), size // 2
    first, second, whole = (
        trained.compiled(trained.start, _masked(batch, counts))[1]
        for counts in (index < half, index >= half, index < size)
    )
    added = jax.tree.map(np.add, first, second)
    if (fault := difference(added, whole, 4 * tolerance, "as the sum of two halves of a batch")) is not None:
        return fault
    short = jax.jit(trained.evaluated)(trained.start, _masked(at(batch, slice(half)), np.ones(half)))
    return difference(short, first, 4 * tolerance, "in a batch without padding")


def _narrow_loss(task: Task, trained: _Trained) -> str | None:
    def loss(state: TrainState, batch: Batch) -> Any:
        state = trained.with_keys(state)
        return task.loss(state.params, state.model_state, batch, state.key)[0]

    program = jax.jit(loss)
    wide = program(trained.start, trained.batch)
    state, inputs = cast((trained.start, trained.batch.inputs), jnp.bfloat16)
    narrow = program(state._replace(opt_state=trained.start.opt_state), trained.batch._replace(inputs=inputs))
    return difference(np.float32(narrow), np.float32(wide), BFLOAT16_TOLERANCE, "in bfloat16")


def _on_devices(
    task: Task, optimizer: Any, trained: _Trained, strategy: str, num_devices: int, tolerance: float
) -> str | None:
    if jax.local_device_count() < num_devices:
        raise LeftOut(f"left out: there are fewer than {num_devices} devices; set JAX_NUM_CPU_DEVICES={num_devices}")
    layout = make_layout(strategy, num_devices)
    rows = len(trained.batch.mask) // num_devices * num_devices
    state, batch = jax.device_put((trained.start, at(trained.batch, slice(rows))), layout.replicated)
    step = trained.with_numbers(make_train_step(averaged_over(task, layout.axis_name), optimizer))

    def on_devices(state: TrainState, batch: Batch) -> Any:
        return step(state, layout.local_shard(layout.constrain(batch)))

    found = jax.jit(layout.wrap(on_devices))(state, batch)
    whole = rows == len(trained.batch.mask)
    same = at(trained.batch, slice(rows))
    expected = trained.compiled(trained.start, same)[0] if whole else jax.jit(trained.step)(trained.start, same)
    return difference(_named(found), _named(expected), tolerance, f"on {num_devices} devices")
