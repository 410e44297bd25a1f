"""A group trained up to a step: block after block, its members watched one by one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.loop import Closed, Flight, Interruption, finished, run_windows, stops_early, with_tails
from jaxnn.sweeps.engine.group_run import GroupRun
from jaxnn.sweeps.engine.layout import EMPTY, arrange, bring_back
from jaxnn.sweeps.engine.logs import RUNNING


class GroupReport(NamedTuple):
    """One window of one block.

    Attributes:
        run: the group.
        step: updates that its living members have done.
        lines: what each living member reports, by row.
        member_steps: updates of all of them together in the window.
        seconds: what it took.
        saveable: whether the group's states on the host are as of this step.
    """

    run: GroupRun
    step: int
    lines: dict[int, dict[str, Any]]
    member_steps: int
    seconds: float
    saveable: bool


class Block:
    """Members that are on the devices together.

    Attributes:
        run: their group.
        rows: who they are.
        shape: how they lie.
        slots: ``[chunks, lanes]``, which row lies where.
        until: the step they are trained to.
    """

    def __init__(self, run: GroupRun, rows: Sequence[int], until: int) -> None:
        self.run = run
        self.until = until
        self.rows = list(rows)
        self.settle(int(run.start().states.step[self.rows[0]]))

    def settle(self, step: int) -> None:
        """Lays out those that are still running, as many side by side as is fastest for their number."""
        self.rows = self.living()
        self.shape = self.run.shape(len(self.rows))
        self.slots = arrange(self.rows, self.shape)
        alive = np.array([log.status == RUNNING for log in self.run.logs])
        self.population = self.run.programs.lay_out(self.run.start(), self.slots, alive, step)

    def living(self) -> list[int]:
        """The rows that are still running."""
        return [row for row in self.rows if self.run.logs[row].status == RUNNING]

    def bring_back(self) -> None:
        """Copies the states to the group's rows on the host."""
        self.run.host = bring_back(self.run.start(), self.population, self.slots)


def train_group(
    run: GroupRun, until: int, interruption: Interruption, flight: Flight, saves: Callable[[int], bool]
) -> Generator[GroupReport]:
    """Trains the running members of a group to the step ``until``, in blocks that fit in memory.

    Each window is yielded once its numbers are there; ``run`` then holds them. Members that diverge or stop early are
    taken out at the next evaluation, and the others move together.

    Args:
        run: the group.
        until: the step to stop at; all members are evaluated there.
        interruption: asked at the end of each window whether to stop.
        flight: gets the calls, for who looks on.
        saves: ``(step) -> bool``: whether the states are wanted on the host after it.
    """
    steps = run.start().states.step
    # Members of one block go in step: those that an interruption left behind go first, together.
    todo = sorted((row for row in run.running() if steps[row] < until), key=lambda row: (steps[row], row))
    while todo and interruption.signum is None:
        rows = [row for row in todo if steps[row] == steps[todo[0]]][: run.block]
        todo = [row for row in todo if row not in rows]
        for row in rows:
            run.logs[row].status = RUNNING
        yield from _train_block(Block(run, sorted(rows), until), interruption, flight, saves)


def _train_block(
    block: Block, interruption: Interruption, flight: Flight, saves: Callable[[int], bool]
) -> Generator[GroupReport]:
    run = block.run
    plan = with_tails(run.plan._replace(num_steps=block.until))
    step = int(block.population.step)

    def drains(step: int) -> bool:
        return plan.evaluates(step) or plan.saves(step) or interruption.signum is not None

    while block.rows:
        train = {length: run.programs.train(block.shape, length, "start") for length in plan.call_lengths()}
        windows = run_windows(
            train,
            plan,
            run.programs.formula.feed,
            block.population,  # type: ignore[arg-type]
            run.programs.zeros(block.shape),
            drains=drains,
            clock=run.programs.solo.clock,
            flight=flight,
        )
        for closed in windows:
            step = closed.step
            report = _process(block, closed, plan.evaluates(step))
            if closed.state is None:
                yield report
                continue
            thinner = len(block.living()) < len(block.rows)
            ending = interruption.signum is not None or step == block.until
            if ending or thinner or saves(step):
                block.bring_back()
            yield report._replace(saveable=ending or saves(step))
            if ending:
                return
            if thinner:
                # Who is left moves together: chunks without a member are not computed.
                block.rows = block.living()
                break
        if block.rows:
            block.settle(step)


def _process(block: Block, closed: Closed, evaluated: bool) -> GroupReport:
    """What a closed window says of each living member."""
    run = block.run
    if closed.state is not None:
        block.population = closed.state  # type: ignore[assignment]
    held_out = _evaluate(block) if evaluated and closed.state is not None else {}
    lines: dict[int, dict[str, Any]] = {}
    for place in zip(*np.nonzero(block.slots != EMPTY), strict=True):
        row = int(block.slots[place])
        if run.logs[row].status != RUNNING:
            continue
        line: dict[str, Any] = {"step": closed.step}
        line |= {name: float(values[place]) for name, values in closed.metrics.items()}
        bad_step = int(closed.bad_step[place])
        if bad_step < 0:
            line |= _finished(run, {name: means[place] for name, means in held_out.items()})
        line["seconds"] = closed.seconds
        run.logs[row].lines.append(line)
        lines[row] = line
        run.logs[row].status = status_of(run, row, diverged=bad_step >= 0)
    return GroupReport(run, closed.step, lines, closed.num_steps * len(lines), closed.seconds, False)


def status_of(run: GroupRun, row: int, *, diverged: bool) -> str:
    """What has become of a member: a function of its reports, so that a resumed sweep decides alike."""
    log = run.logs[row]
    if diverged:
        return "diverged"
    if log.step == run.plan.num_steps:
        return "finished"
    return "stopped early" if stops_early(log.lines, run.monitored, run.options) else RUNNING


def _evaluate(block: Block) -> dict[str, np.ndarray]:
    """The mean of each metric over the eval split, ``[chunks, lanes, ...]``; nothing where there is none."""
    run = block.run
    name = run.splits.held_out
    if name is None:
        return {}
    clock = run.programs.solo.clock
    batch_size = run.options.eval_batch_size or 2 * run.programs.formula.experiment.config.batch_size
    with clock.span("evaluation"):
        evaluate = run.programs.evaluator(block.shape, name, run.splits.named()[name], batch_size)
        return evaluate(block.population)


def _finished(run: GroupRun, means: dict[str, np.ndarray]) -> dict[str, float]:
    """The means of one member as its solo run reports them."""
    if not means:
        return {}
    return {f"{run.splits.held_out}_{name}": value for name, value in finished(run.programs.task, means).items()}
