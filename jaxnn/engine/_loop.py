"""The training loop of a population: blocks, windows, evaluations, and the status of each member."""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxnn._fields import seed_for
from jaxnn.data import ArraySource
from jaxnn.engine._digests import show_digests
from jaxnn.engine._states import EMPTY, bring_back
from jaxnn.engine._trainer import RUNNING, Trainer
from jaxnn.engine._windows import WindowResult, run_windows
from jaxnn.parallel import StopVote
from jaxnn.tasks import derived_metrics
from jaxnn.types import ENDLESS, ConfigError, DataError, Splits, warn


class WindowReport(NamedTuple):
    """One window of some members."""

    step: int  # the number of updates done by each at its end
    num_steps: int  # the updates in it
    lines: dict[int, dict[str, Any]]  # what each reported, by row
    seconds: float  # wall time, without evaluation, checkpoints and the caller's own work
    evaluated: bool  # whether the eval split was evaluated
    saved: bool  # whether the states were saved


class MemberBlock:
    """Members that are on the devices together: their rows, and their ``state`` on the devices."""

    def __init__(self, trainer: Trainer, rows: Sequence[int], step: int) -> None:
        self.trainer, self.rows = trainer, list(rows)
        self.place(step)

    def place(self, step: int) -> None:
        """Puts those that are still running on the devices, in the fastest arrangement for their number."""
        self.rows = self.living()
        self.kept: dict[Any, Any] = {}  # of each split, for the next evaluation of these members
        self.shape = self.trainer.shape(len(self.rows))
        # ``slots`` hold the row of each lane; those of a run, which has no shape, are without axes.
        if self.shape is None:
            self.slots, self.state = np.zeros((), np.int64), self.trainer.state
            return
        self.slots = self.shape.arrange(self.rows)
        alive = np.array([log.status == RUNNING for log in self.trainer.logs])
        self.state = self.trainer.programs.lay_out(self.trainer.host_states(), self.slots, alive, step)

    def living(self) -> list[int]:
        """The rows that are still running."""
        return [row for row in self.rows if self.trainer.logs[row].status == RUNNING]

    def members(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """The lane and the row of each running member."""
        for place, row in np.ndenumerate(self.slots):
            if row != EMPTY and self.trainer.logs[row].status == RUNNING:
                yield place, int(row)

    def step_of(self, row: int, step: int) -> int:
        """The number of updates that a member has done when the block has done ``step``."""
        return step

    def bring_back(self) -> None:
        """Makes the block's state that of the trainer."""
        if self.shape is None:
            self.trainer.state = self.state
        else:
            self.trainer.state = bring_back(self.trainer.host_states(), self.state, self.slots)


def train(trainer: Trainer, wants_stop: Callable[[], bool], *, step_by_step: bool = False) -> Generator[WindowReport]:
    """Trains the members that are not over to their last step, in blocks that fit in memory.

    Each window is yielded once its numbers are on the host, recorded and, if due, saved; the trainer's ``state`` is
    replaced at each evaluation, checkpoint and at the end. Members that end early are taken out at the next evaluation.
    ``wants_stop`` is called at the end of each window; all processes stop at the same one. All members are evaluated at
    their last step. With ``step_by_step`` the caller may use the state after every window.
    """
    steps = trainer.steps()
    # Members of one block train together: those behind after an interruption go first.
    unfinished = [row for row, log in enumerate(trainer.logs) if log.unfinished and steps[row] < trainer.plan.num_steps]
    todo = sorted(unfinished, key=lambda row: (steps[row], row))
    with trainer.clock.span("train"):
        while todo and not wants_stop():
            step = steps[todo[0]]
            rows = [row for row in todo if steps[row] == step][: trainer.block]
            todo = [row for row in todo if row not in rows]
            for row in rows:
                trainer.logs[row].status = RUNNING
            block = MemberBlock(trainer, sorted(rows), step)
            try:
                for report in _train_block(block, step, wants_stop, step_by_step):
                    with trainer.clock.span("caller"):
                        yield report
            except GeneratorExit:
                raise
            except BaseException:
                # The last window's decisions may not be saved: a resumed population repeats them.
                for row in block.rows:
                    trainer.logs[row].status = RUNNING
                raise
    if all(log.status == "finished" for log in trainer.logs):
        _check_accumulated(trainer)


def _check_batch(trainer: Trainer, step: int) -> None:
    """Raises DataError if the batch of ``step``, of data that are only read while training, does not fit the task."""
    source, programs = trainer.programs.source, trainer.programs
    if source.examples is not None or source.num_examples == ENDLESS:
        return
    config = trainer.experiment.config
    rows = np.asarray(source.order(seed_for(config, "order"), np.array([step - 1], np.int32), config.batch_size))
    batch = Splits(ArraySource(source.read(rows.reshape(-1))))
    try:
        programs.task.check(programs.shapes.params, programs.shapes.model_state, programs.batch, batch)
    except DataError as error:
        raise DataError(f"the batch of step {step} does not fit the task: {error}") from error


def _check_accumulated(trainer: Trainer) -> None:
    """Warns of gradients that were accumulated and not applied at the end; ConfigError if none ever was."""
    state = trainer.state if trainer.vmapped is None else trainer.host_states().states
    kinds = jax.tree.leaves(state.opt_state, is_leaf=lambda part: isinstance(part, optax.MultiStepsState))
    for part in kinds:
        if isinstance(part, optax.MultiStepsState):
            left, updates = (int(np.max(jax.device_get(count))) for count in (part.mini_step, part.gradient_step))
            steps = trainer.plan.num_steps
            if not updates:
                raise ConfigError(
                    f"no parameter was updated: num_steps={steps} is less than one accumulation of gradients: raise "
                    "num_steps, which counts batches, or accumulate fewer."
                )
            if left:
                warn(
                    f"the gradients of the last {left} of {steps} steps were accumulated and not applied: make "
                    "num_steps a multiple of the steps of an accumulation."
                )


def _train_block(
    block: MemberBlock, step: int, wants_stop: Callable[[], bool], step_by_step: bool
) -> Generator[WindowReport]:
    trainer, votes, windows, stops = block.trainer, StopVote(), itertools.count(), False
    plan = trainer.plan

    def sync_after(step: int) -> bool:
        nonlocal stops
        stops = votes.poll(next(windows), wants_stop())
        return stops or step_by_step or plan.evaluates(step) or plan.saves(step)

    while block.rows:
        programs = {length: trainer.programs.train(block.shape, length, "start") for length in plan.call_lengths(step)}
        feed, zeros = trainer.programs.spec.feed, trainer.programs.zeros(block.shape)
        for result in run_windows(
            programs, plan, feed, block.state, zeros, sync_after, clock=trainer.clock, flight=trainer.flight
        ):
            step = result.step
            report = process(block, result, evaluates=plan.evaluates(step))
            living, synced = block.living(), result.state is not None
            ending = synced and (stops or not living or step == plan.num_steps)
            saves = synced and trainer.save_due(step, ending=ending)
            if saves or ending or (synced and (len(living) < len(block.rows) or block.shape is None)):
                block.bring_back()
            if saves:
                trainer.save(step)
                living = block.living()
            yield report._replace(saved=saves)
            if ending or (not living and block.shape is None):
                return
            if synced and len(living) < len(block.rows):
                # The rest are arranged again: chunks without a member are not computed.
                break
        block.place(step)


def process(block: MemberBlock, result: WindowResult, *, evaluates: bool) -> WindowReport:
    """Evaluates a finished window, if due, and reports and settles each running member."""
    trainer, splits = block.trainer, block.trainer.splits
    means: dict[str, dict[str, np.ndarray]] = {}  # by split
    if result.state is not None:
        block.state = result.state
        if evaluates:
            for split in splits.evaluated:
                with trainer.clock.span("evaluation"):
                    means[split] = trainer.programs.evaluate(
                        block.shape, split, block.state, part=True, kept=block.kept
                    )
    rate, batch_size = result.num_steps / result.seconds, trainer.experiment.config.batch_size
    speed = {"seconds": result.seconds, "steps_per_second": rate, "examples_per_second": rate * batch_size}
    speed["elapsed"] = trainer.elapsed
    lines: dict[int, dict[str, Any]] = {}
    bad_steps: dict[int, int] = {}  # -1: none
    for place, row in block.members():
        line: dict[str, Any] = {"step": block.step_of(row, result.step)}
        if line["step"] <= trainer.logs[row].step:  # it trains again what it reported, since its state was dropped
            continue
        line |= {name: float(values[place]) for name, values in result.metrics.items()}
        bad_step = int(result.bad_step[place])
        for split, found in means.items() if bad_step < 0 else ():
            derived = derived_metrics(trainer.programs.task, {name: mean[place] for name, mean in found.items()})
            line |= {f"{split}_{name}": value for name, value in derived.items()}
        digests = result.digests[place]
        lines[row] = line | speed | ({"digest": show_digests(digests)} if digests.any() else {})
        trainer.logs[row].lines.append(lines[row])
        if trainer.probe is not None and evaluates and result.state is not None and bad_step < 0:
            block.bring_back()
            with trainer.clock.span("probes"):
                lines[row] |= trainer.probe(result.step)
        bad_steps[row] = bad_step
    trainer.rates.append(rate)
    # Recorded before a stopping rule of the user's may raise an error.
    trainer.report(lines)
    for row, bad_step in bad_steps.items():
        if bad_step >= 0:
            trainer.logs[row].error = f"the loss is no longer finite at step {bad_step} of {trainer.plan.num_steps}"
            _check_batch(trainer, bad_step)
        trainer.settle(row, block.step_of(row, result.step), diverged=bad_step >= 0)
    return WindowReport(result.step, result.num_steps, lines, result.seconds, bool(means), False)
