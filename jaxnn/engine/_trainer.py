"""A population that is trained, a run being a population of one: reports, early stopping, divergence, checkpoints."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn import record as records
from jaxnn._clock import Clock
from jaxnn._fingerprints import block_digests
from jaxnn._json import elapsed_of, final_metrics, metrics_of, reports_by_member
from jaxnn.engine._compiler import Programs
from jaxnn.engine._options import RunOptions, stopping_rule
from jaxnn.engine._states import HostStates, Shape
from jaxnn.engine._tuning import VmapPlan
from jaxnn.engine._windows import Flight, Plan
from jaxnn.observe import Placement
from jaxnn.parallel import broadcast_from_primary
from jaxnn.tasks import derived_metrics, direction_of
from jaxnn.types import ConfigError, Experiment, PyTree, Splits, TrainState

WAITING, RUNNING = "waiting", "running"


@dataclasses.dataclass
class MemberLog:
    """The status and the reports of one member."""

    status: str = WAITING  # ``waiting``, ``running``, or how it ended: ``finished``, ``stopped early``, ``diverged``, …
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # oldest first, as in ``metrics.jsonl``
    error: str | None = None  # the reason why it ended, or None
    number: int = 0  # of the member, as in the column ``member`` of ``metrics.jsonl``

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

    def latest(self, metric: str) -> float | None:
        """The last value of a metric, None if it has none."""
        return next((line[metric] for line in reversed(self.lines) if metric in line), None)

    def evaluations_since_best(self, metric: str, *, higher_is_better: bool) -> int:
        """The number of evaluations after the one with the first best ``metric`` (Prechelt 1998, "Early stopping").

        The best value is never NaN.
        """
        values = self.values(metric)
        sign = -1.0 if higher_is_better else 1.0
        ranked = [(sign * value, index) for index, value in enumerate(values) if value == value]
        return len(values) - 1 - min(ranked)[1] if ranked else len(values)


@dataclasses.dataclass
class Trainer:
    """A population in training."""

    # By default a population saves at evaluations, and no more often than this.
    SECONDS_BETWEEN_SAVES: ClassVar[float] = 60.0

    options: RunOptions  # how it is run; cadences are resolved
    splits: Splits  # its data
    programs: Programs  # what is compiled
    plan: Plan  # where windows and calls end
    logs: list[MemberLog]  # of each member, by row
    clock: Clock  # the time spent in each span
    vmapped: VmapPlan | None = None  # how members are arranged; None: a run
    seconds_per_step: Mapping[int, float] = dataclasses.field(default_factory=dict)  # of a run, by steps per call
    notes: Sequence[tuple[str, str]] = ()  # what the user should know before the first step, as name and text
    # The newest state that is not in flight: of a run on the devices, of a population on the host; None until made.
    state: Any = None
    record: records.Record | None = None  # the open directory that metrics go to, or None
    checkpoints: records.Checkpoints | None = None  # of this run or population in it, or None
    flight: Flight = dataclasses.field(default_factory=Flight)  # the calls in flight, and the stalls noticed
    writers: records.Writers = dataclasses.field(default_factory=records.Writers)  # get each line, beside the record
    # Called after each evaluation of a run, whose newest state is there: returns the metrics that probes add; or None.
    probe: Callable[[int], Mapping[str, float]] | None = None
    rates: list[float] = dataclasses.field(default_factory=list)  # steps/s in each window of this process
    reported: records.LogDigest = dataclasses.field(init=False)  # of the lines in the record
    _saved_at: float = 0.0  # when a state was saved last, by ``time.perf_counter``
    elapsed_before: float = 0.0  # seconds, in earlier processes

    @property
    def experiment(self) -> Experiment[Any]:
        """That of a run, or of the first member."""
        return self.programs.spec.experiment

    @property
    def monitored(self) -> str:
        """The metric that ranks members and checkpoints, as reports name it; a training one without an eval split."""
        monitor = self.options.monitor
        is_probe = monitor.partition("/")[0] in self.options.named_probes()
        return f"{'probe' if is_probe else self.splits.eval_split or 'train'}_{monitor}"

    @functools.cached_property
    def higher_is_better(self) -> bool:
        """Whether more of the monitored metric is better: by the option, or as its task states."""
        mode, stated = self.options.monitor_mode, self.programs.task.directions
        return (direction_of(self.monitored, stated) if mode == "auto" else mode) == "max"

    @property
    def elapsed(self) -> float:
        """Seconds from the start of the run to now, without the time between an interruption and its resume."""
        return self.elapsed_before + sum(self.clock.seconds.values())

    @functools.cached_property
    def fingerprint(self) -> dict[str, str | None]:
        """Digests of the data and of what the first member computes with them, by part."""
        return self.programs.fingerprint()

    @property
    def block(self) -> int:
        """The number of members that are on the devices at a time, at most."""
        plan = self.vmapped
        return 1 if plan is None else min(self.programs.num_members, plan.block * self.programs.spec.num_devices)

    def shape(self, num_members: int) -> Shape | None:
        """The arrangement of a block of which ``num_members`` are left, in the fastest vmap size for their number.

        There are always chunks for a whole block, so that one program serves any number.
        """
        if (plan := self.vmapped) is None:
            return None
        num_devices = self.programs.spec.num_devices
        return Shape.of(self.block, plan.size_for(-(-num_members // num_devices)), num_devices)

    def host_states(self) -> HostStates:
        """The states of a population, made if they were not yet."""
        if self.state is None:
            self.state = self.programs.initial
        return self.state  # type: ignore[no-any-return]

    def steps(self) -> list[int]:
        """The number of updates that each member has done, by row."""
        if self.vmapped is None:
            return [int(self.state.step)]
        return list(map(int, self.host_states().states.step))

    def evaluate(self, split: str, state: TrainState | None = None) -> dict[str, float]:
        """Exact metrics over a split of ``state``, by default that of a run; ConfigError if there is no such split."""
        means = self.programs.evaluate(None, split, self.state if state is None else state)
        return derived_metrics(self.programs.task, means)

    def placement(self) -> list[Placement]:
        """The devices that hold the parts of a run."""
        state, feed = self.state, self.programs.spec.feed
        trees = {"model_state": state.model_state} if state.model_state else {}
        data = {"data": feed.prepare(0, 1)} if feed.resident else {}
        return Placement.of(parameters=state.params, **trees, optimizer_state=state.opt_state, **data)

    def open_store(self, record: records.Record, folder: Path) -> None:
        """Keeps metrics in ``record`` and checkpoints in ``folder`` from now on."""
        self.record, self._saved_at = record, time.perf_counter()
        self.reported = record.digest()
        keep = self.options.keep_last, self.options.keep_best
        self.checkpoints = records.Checkpoints(folder, *keep, self.monitored, self.higher_is_better)

    def report(self, lines: Mapping[int, Mapping[str, Any]]) -> None:
        """Writes what members reported, by row, to the record and to further metric writers."""
        written = [{"member": self.logs[row].number, **line} for row, line in lines.items()]
        if not written:  # all members have ended, and their states are still on the device
            return
        with self.clock.span("record"):
            if self.record is not None:
                self.reported.add(self.record.report(*written))
            self.writers.write(written)

    def restore(
        self, where: str, check: Callable[[int | None], None] = lambda step: None
    ) -> tuple[int | None, list[str]]:
        """Restores the newest undamaged checkpoint and cuts the metrics to it; ``where`` names it in messages.

        ``check`` gets its step, or None, before anything is changed. Returns this step, and a description of each
        damage found. RecordError if all are damaged, or hold no state of this experiment.
        """
        assert self.checkpoints is not None
        plain = self.vmapped is None
        like: Any = self.state if plain else HostStates.shapes(self.programs.shapes, len(self.logs))
        restored: records.Restored[Any] | None = self.checkpoints.restore_newest(like)
        check(restored and restored.step)
        damaged, steps, diverged = [], [0] * len(self.logs), [False] * len(self.logs)
        if restored is not None:
            damaged = [self.checkpoints.set_aside(*damage) for damage in restored.damaged]
            where = f"step {restored.step}" if plain else f"the checkpoint of {where}"
            # Copies: rows are NumPy arrays, and a checkpoint may return others.
            self.state = restored.state if plain else jax.tree.map(np.array, restored.state)
            steps = self.steps()
            diverged = diverged if plain else [bad_step >= 0 for bad_step in self.state.bad_step]
        # A member that diverged has the state from before that call, and reported nothing later.
        ends = [self.plan.num_steps if bad else step for step, bad in zip(steps, diverged, strict=True)]
        damaged += self._rewind(ends, None if restored is None else restored.log, where)
        for row, log in enumerate(self.logs):
            if restored is None:
                log.status = WAITING
            else:
                # By the step of the state, since reports may be lost.
                self.settle(row, steps[row], diverged=diverged[row])
        return restored and restored.step, damaged

    def _rewind(self, ends: Sequence[int], noted: Mapping[str, Any] | None, where: str) -> list[str]:
        """Cuts metrics to the lines that a checkpoint ``noted``, at most to the steps ``ends``; describes damage."""
        assert self.record is not None
        record, rows = self.record, {log.number: row for row, log in enumerate(self.logs)}

        def rewound() -> tuple[list[dict[str, Any]], str | None]:
            # The digest stays in the process that writes.
            lines, self.reported, damage = record.rewind(
                lambda line: ends[rows[line["member"]]], noted, where, tuple(rows)
            )
            return lines, damage

        lines, damage = broadcast_from_primary(rewound)
        reports = reports_by_member(lines)
        for log in self.logs:
            log.lines = reports[log.number]
        self.elapsed_before = elapsed_of(lines)
        return [damage] if damage is not None else []

    def settle(self, row: int, step: int, *, diverged: bool) -> None:
        """Decides the status of a member after ``step`` by its reports alone: a resumed run decides the same."""
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
        # Without an eval split every report has the metric; the state is available when an evaluation is due.
        if self.splits.eval_split is None and not self.plan.evaluates(log.step):
            return False
        patience, rule = self.options.patience, stopping_rule(self.options.stop)
        if patience is not None and self._since_best(log) >= patience:
            return True
        stops = rule is not None and rule([dict(line) for line in log.lines])
        if np.ndim(stops):
            raise ConfigError(f"stop returned an array of shape {np.shape(stops)}, and must return True or False.")
        return bool(stops)

    def _since_best(self, log: MemberLog) -> int:
        return log.evaluations_since_best(self.monitored, higher_is_better=self.higher_is_better)

    def facts(self) -> dict[str, Any]:
        """How the population is computed, for a record; costs a trace of its programs."""
        programs = self.programs
        return {
            "steps_per_call": self.plan.steps_per_call,
            "seconds_per_step_measured": dict(self.seconds_per_step),
            "vmap": None if self.vmapped is None else self.vmapped.as_json(),
            "layout": programs.layout.as_json(),
            "examples": records.RecordReader.describe_data(self.splits, programs.first_examples),
            "fingerprint": self.fingerprint,
            "arrays": block_digests(self.splits),
            "precision": programs.traced_step.product_dtypes,
            "implementations": programs.traced_step.implementations,
            "start": programs.start.as_json(),
        }

    def save_due(self, step: int, *, ending: bool) -> bool:
        """Whether to save the state after ``step``: by its number, by the clock, as the last, or as a new best.

        With ``patience`` each new best is saved, because its state is gone when training stops.
        """
        every, log = self.options.checkpoint_every, self.logs[0]
        if self.checkpoints is None or every == 0:
            return False
        # A member of a population keeps the state from before it diverged; a run does not, and saves none.
        if self.vmapped is None and log.status == "diverged":
            return False
        if ending or self.plan.saves(step):
            return True
        if every is not None or not self.plan.evaluates(step):
            return False
        if self.vmapped is None and self.options.patience is not None and log.values(self.monitored):
            if self._since_best(log) == 0:
                return True
        # Clocks differ between processes, and all must save or none.
        return broadcast_from_primary(lambda: time.perf_counter() - self._saved_at > self.SECONDS_BETWEEN_SAVES)

    def save(self, step: int) -> None:
        """Starts saving the newest state, or raises RecordError; a member without finite parameters has diverged."""
        if self.record is None or self.checkpoints is None or self.state is None:
            return
        metrics: dict[str, float] = {}
        with self.clock.span("checkpoint"):
            if self.vmapped is not None:
                for row, log in enumerate(self.logs):
                    leaves = [leaf[row] for leaf in jax.tree.leaves(self.state.states.params)]
                    if log.status == RUNNING and not all(np.isfinite(leaf).all() for leaf in leaves):
                        log.status, self.state.bad_step[row] = "diverged", step
                # The sum of all members' steps grows from one checkpoint to the next.
                step = int(self.state.states.step.sum(dtype=np.int64))
            elif not _all_finite(self.state.params):
                self.logs[0].status = "diverged"
                self.logs[0].error = f"the parameters are no longer finite after step {step}"
                return
            elif self.logs[0].lines and self.logs[0].step == step:
                metrics = metrics_of(self.logs[0].lines[-1])
            self.writers.flush()
            self.checkpoints.save(step, self.state, metrics, self.reported)
            self._saved_at = time.perf_counter()


@jax.jit
def _all_finite(tree: PyTree) -> jax.Array:
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.bool_(True)
