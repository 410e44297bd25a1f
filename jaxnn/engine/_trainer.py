"""Training a population of one or more members that share one program.

A run is a population of one, which takes the plain path: no ``vmap``, no axes of members. Whatever happens to a member
in training happens here: windows, evaluation, early stopping, divergence, checkpoints, interruption.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.engine._compiler import Programs
from jaxnn.engine._options import RunOptions, metric_writer, stopping_rule
from jaxnn.engine._states import HostStates, Shape, shape_of
from jaxnn.engine._store import Store
from jaxnn.engine._tuning import (
    Choice,
    VmapPlan,
)
from jaxnn.engine._windows import Flight, Plan
from jaxnn.observe import Clock, Placement, Window, observe_placement
from jaxnn.parallel import broadcast_from_primary, is_primary
from jaxnn.record import final_metrics
from jaxnn.tasks import derived_metrics
from jaxnn.types import ConfigError, Experiment, PyTree, Splits, TrainState

WAITING, RUNNING = "waiting", "running"
# By default a population saves at evaluations, and no more often than this.
SECONDS_BETWEEN_SAVES = 60.0


@dataclasses.dataclass
class MemberLog:
    """What has become of one member.

    Attributes:
        status: ``waiting``, ``running``, or how it ended: ``finished``, ``stopped early``, ``diverged``, ...
        lines: what it reported, oldest first, as in ``metrics.jsonl``.
        error: what went wrong, or None.
    """

    status: str = WAITING
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str | None = None

    @property
    def unfinished(self) -> bool:
        """Whether it is still to be trained."""
        return self.status in (WAITING, RUNNING)

    @property
    def step(self) -> int:
        """The number of updates done, as far as was reported."""
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def final(self) -> dict[str, float]:
        """The last value of each metric."""
        return final_metrics(self.lines)

    def values(self, metric: str) -> list[float]:
        """A metric at every line that has it, oldest first."""
        return [line[metric] for line in self.lines if metric in line]


@dataclasses.dataclass
class Trainer:
    """A population under way.

    Attributes:
        options: how it is run; cadences are resolved.
        splits: its data.
        programs: what is compiled.
        plan: where windows and calls end.
        choice: how the steps per call were chosen, of a run; or the vmap size too, of a population.
        logs: what became of each member, by row.
        clock: where the time went.
        state: the newest state that is not in flight: on the devices for a run; on the host for a population, None
            before it is made.
        numbers: those of the members, for the column ``member`` of their lines; None: a run, without it.
        store: where metrics and checkpoints go, or None.
        flight: the calls under way, and the stalls that a watchdog saw.
        windows: the speed of each window of this process.
    """

    options: RunOptions
    splits: Splits
    programs: Programs
    plan: Plan
    choice: Choice | VmapPlan
    logs: list[MemberLog]
    clock: Clock
    state: Any = None
    numbers: tuple[int, ...] | None = None
    store: Store | None = None
    flight: Flight = dataclasses.field(default_factory=Flight)
    windows: list[Window] = dataclasses.field(default_factory=list)

    @property
    def experiment(self) -> Experiment[Any]:
        """That of a run, or of the first member."""
        return self.programs.spec.experiment

    @property
    def monitored(self) -> str:
        """The metric that ranks members and checkpoints, as reports name it; a training one without an eval split."""
        return f"{self.splits.held_out or 'train'}_{self.options.monitor}"

    @functools.cached_property
    def fingerprint(self) -> dict[str, str | None]:
        """Digests of the data and of what the first member computes with them, by part."""
        return self.programs.fingerprint()

    @property
    def vmapped(self) -> VmapPlan | None:
        """How members are arranged; None for a run."""
        return self.choice if isinstance(self.choice, VmapPlan) else None

    @property
    def block(self) -> int:
        """The number of members that are on the devices at a time, at most."""
        plan = self.vmapped
        return 1 if plan is None else min(len(self.logs), plan.block * self.programs.spec.num_devices)

    def shape(self, num_members: int) -> Shape | None:
        """How this many members of a block are arranged: in the fastest vmap size that was tried for their number.

        There are always chunks for a whole block, so that one program serves any number that is left of it.
        """
        if (plan := self.vmapped) is None:
            return None
        num_devices = self.programs.spec.num_devices
        return shape_of(self.block, plan.size_for(-(-num_members // num_devices)), num_devices)

    def unfinished(self) -> list[int]:
        """The rows of the members that are still to be trained."""
        return [row for row, log in enumerate(self.logs) if log.unfinished]

    def host_states(self) -> HostStates:
        """The states of a population, made if they were not yet."""
        if self.state is None:
            self.state = self.programs.initial
        states: HostStates = self.state
        return states

    def evaluate(self, split: str, state: TrainState | None = None) -> dict[str, float]:
        """Exact metrics over a split of ``state``, by default that of a run; compiles if it was never asked for.

        Raises:
            ConfigError: the data have no such split.
        """
        if split not in (known := self.splits.named()):
            raise ConfigError(f"there is no split {split!r} to evaluate: the data have {', '.join(known)}.")
        means = self.programs.evaluator(None, split)(self.state if state is None else state)
        return derived_metrics(self.programs.task, means)

    def placement(self) -> list[Placement]:
        """Where the parts of a run are stored now."""
        trees: dict[str, Any] = {"parameters": self.state.params}
        if self.state.model_state:
            trees["model_state"] = self.state.model_state
        trees["optimizer_state"] = self.state.opt_state
        if self.programs.spec.feed.resident:
            trees["data"] = self.programs.spec.feed.prepare(0, 1)
        return observe_placement(**trees)

    def report(self, lines: Mapping[int, Mapping[str, Any]]) -> None:
        """Hands what members reported, by row, to the record and to further metric writers."""
        column = [{} if self.numbers is None else {"member": number} for number in self.numbers or (0,)]
        written = [column[row] | dict(line) for row, line in lines.items()]
        if not written:  # all members are over, and the device is yet to be asked for their states
            return
        with self.clock.span("record"):
            if self.store is not None:
                self.store.report(written)
            for writer in self.options.writers if is_primary() else ():
                metric_writer(writer).write(written)

    def restore(
        self, where: str, check: Callable[[int | None], None] = lambda step: None
    ) -> tuple[int | None, list[str]]:
        """Continues from the newest whole checkpoint of the store, and cuts the metrics to it.

        Args:
            where: what is restored, for messages.
            check: gets the step of the checkpoint, None if there is none, before anything is changed.

        Returns:
            The step of the checkpoint, None if there is none, and a description of each damage found.

        Raises:
            RecordError: all checkpoints are damaged, or they hold no state of this experiment.
        """
        assert self.store is not None
        plain = self.vmapped is None
        restored = self.store.restore(self.state if plain else self.programs.host_shapes())
        check(restored and restored.step)
        damaged = self.store.set_aside(restored)
        if restored is not None:
            where = f"step {restored.step}" if plain else f"the checkpoint of {where}"
        if restored is None:
            ends = [0] * len(self.logs)
        elif plain:
            self.state, ends = restored.state, [restored.step]
        else:
            # Copies, as rows are on the host, whatever the checkpoint returns.
            states = self.state = jax.tree.map(np.array, restored.state)
            # The state of a member that diverged is that before the call that went wrong; it reported nothing after.
            ends = [
                self.plan.num_steps if bad_step >= 0 else int(step)
                for step, bad_step in zip(states.states.step, states.bad_step, strict=True)
            ]
        lines, damage = self.store.rewind(ends.__getitem__, restored, where)
        for row, log in enumerate(self.logs):
            log.lines = lines[row]
            if restored is None:
                log.status = WAITING
            elif log.status != "pruned":
                # Of the state, since reports may be lost.
                step = restored.step if plain else int(self.state.states.step[row])
                self.settle(row, step, diverged=not plain and int(self.state.bad_step[row]) >= 0)
        return restored and restored.step, damaged + damage

    def settle(self, row: int, step: int, *, diverged: bool) -> None:
        """Decides what has become of a member after ``step``, by its reports: a resumed run decides the same."""
        log = self.logs[row]
        if diverged:
            log.status = "diverged"
        elif step >= self.plan.num_steps:
            log.status = "finished"
        else:
            log.status = "stopped early" if self._stops(log) else RUNNING

    def _stops(self, log: MemberLog) -> bool:
        if not log.lines or self.monitored not in log.lines[-1]:
            return False
        # Without an eval split every report has the metric; the state is at hand where an evaluation would be.
        if self.splits.held_out is None and not self.plan.evaluates(log.step):
            return False
        patience, rule = self.options.patience, stopping_rule(self.options.stop)
        if patience is not None and self.evaluations_since_best(log) >= patience:
            return True
        return rule is not None and bool(rule(log.lines))

    def evaluations_since_best(self, log: MemberLog) -> int:
        """The number of evaluations after the first best one (Prechelt 1998, "Early stopping")."""
        values = log.values(self.monitored)
        return evaluations_since_best(values, higher_is_better=self.options.higher_is_better)

    def save_due(self, step: int, *, ending: bool) -> bool:
        """Whether the state after ``step`` is to be saved: by its number, by the clock, as the last or as a new best.

        The best is looked for if training stops when nothing improves: it would be over by the time that is known.
        """
        every = self.options.checkpoint_every
        if self.store is None or every == 0:
            return False
        # A member of a population keeps the state from before it diverged; that of a run is of no use, finite or not.
        if self.vmapped is None and self.logs[0].status == "diverged":
            return False
        if ending or self.plan.saves(step):
            return True
        if every is not None or not self.plan.evaluates(step):
            return False
        saved_at, log = self.store.saved_at, self.logs[0]
        best = self.vmapped is None and self.options.patience is not None
        best = best and bool(log.values(self.monitored)) and self.evaluations_since_best(log) == 0
        # Clocks differ between processes, and all must save or none.
        return best or broadcast_from_primary(lambda: time.perf_counter() - saved_at > SECONDS_BETWEEN_SAVES)

    def save(self, step: int) -> None:
        """Starts saving the newest state; a member with parameters that are not finite has diverged instead.

        Raises:
            RecordError: the disk refused.
        """
        if self.store is None or self.state is None:
            return
        with self.clock.span("checkpoint"):
            if self.vmapped is not None:
                self._note_bad_parameters(step)
                # Some member has done a step since the last one, so that the sum of them grows.
                self.store.save(int(self.state.states.step.sum(dtype=np.int64)), self.state, {})
            elif bool(_all_finite(self.state.params)):
                newest = self.logs[0].lines[-1] if self.logs[0].lines else {"step": -1}
                self.store.save(step, self.state, metrics_at(newest, step))
            else:
                self.logs[0].status = "diverged"
                self.logs[0].error = f"the parameters are no longer finite after step {step}"

    def _note_bad_parameters(self, step: int) -> None:
        for row, log in enumerate(self.logs):
            params = jax.tree.map(lambda leaf, row=row: leaf[row], self.state.states.params)
            if log.status == RUNNING and not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
                log.status, self.state.bad_step[row] = "diverged", step


def evaluations_since_best(values: Sequence[float], *, higher_is_better: bool) -> int:
    """The number of ``values``, oldest first, after the first best one; NaN is never best."""
    sign = -1.0 if higher_is_better else 1.0
    ranked = [(sign * value, index) for index, value in enumerate(values) if value == value]
    return len(values) - 1 - min(ranked)[1] if ranked else len(values)


def metrics_at(line: Mapping[str, Any], step: int) -> dict[str, float]:
    """The metrics of a line if it is that of ``step``, else none."""
    return final_metrics([line]) if line["step"] == step else {}


@jax.jit
def _all_finite(tree: PyTree) -> jax.Array:
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.bool_(True)
