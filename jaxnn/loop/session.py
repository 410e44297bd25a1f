"""Everything one run holds while it goes on, and how it is put together before the first step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxnn.data import check_batch_size
from jaxnn.loop.allocating import Allocation, keep_from_the_start
from jaxnn.loop.checks import (
    check_alike_on_devices,
    check_data,
    check_examples,
    check_monitor,
    check_parts,
    check_patience,
    check_sums,
)
from jaxnn.loop.compiling import Programs
from jaxnn.loop.evaluating import Evaluator, make_evaluator
from jaxnn.loop.feed import make_feed
from jaxnn.loop.options import RunOptions, check_config, make_plan, resolve_cadences
from jaxnn.loop.plan import Plan, with_tails
from jaxnn.loop.programs import make_predict
from jaxnn.loop.startup import Startup
from jaxnn.loop.trials import try_out
from jaxnn.loop.tuning import Choice
from jaxnn.loop.watchdog import Flight
from jaxnn.nn import platform
from jaxnn.observe import Clock, Ledger, Placement, Window, describe_devices, observe_placement
from jaxnn.parallel import all_agree, check_divides, make_layout, process_count
from jaxnn.record import PARTS, Checkpoints, LogDigest, Record, jax_flags
from jaxnn.types import ConfigError, Experiment, Splits, TrainState


@dataclasses.dataclass
class Session:
    """A run under way.

    Attributes:
        experiment: what is computed.
        options: how; cadences are resolved.
        splits: its data.
        plan: where windows and calls end.
        programs: what is compiled, and the feed of training examples.
        state: the newest state that is not in flight.
        choice: how the steps per call were chosen.
        allocation: whether freed memory is kept.
        clock: where the time went.
        fingerprint: digests of the data and of what is computed with them, by part; empty where nobody asks for them.
        started: when, on ``time.perf_counter``'s clock.
        ready_seconds: from there to the moment the first step could run.
        evaluators: compiled evaluations by split; added to when asked for.
        lines: what was reported so far, oldest first, as in ``metrics.jsonl``.
        reported: the digest of those lines as they were written.
        windows: the speed of each window of this process.
        status: ``running``, then how it ended.
        record: the open run directory, or None.
        checkpoints: the run's checkpoints, opened at the first save, or None.
        resumed: for a resumed run, the ``step`` it goes on from, and in words what ``changed`` since and which newer
            checkpoints are ``damaged``.
        saved_at: when the last checkpoint was saved, on ``time.perf_counter``'s clock.
        flight: the calls under way, and the stalls that a watchdog saw.
    """

    experiment: Experiment[Any]
    options: RunOptions
    splits: Splits
    plan: Plan
    programs: Programs
    state: TrainState
    choice: Choice
    allocation: Allocation
    clock: Clock
    fingerprint: dict[str, str | None]
    started: float
    ready_seconds: float = 0.0
    evaluators: dict[str, Evaluator] = dataclasses.field(default_factory=dict)
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reported: LogDigest = dataclasses.field(default_factory=LogDigest)
    windows: list[Window] = dataclasses.field(default_factory=list)
    status: str = "running"
    record: Record | None = None
    checkpoints: Checkpoints | None = None
    resumed: dict[str, Any] | None = None
    saved_at: float = dataclasses.field(default_factory=time.perf_counter)
    flight: Flight = dataclasses.field(default_factory=Flight)

    @property
    def held_out(self) -> str | None:
        """The split looked at while training, or None."""
        return self.splits.held_out

    @property
    def monitored(self) -> str:
        """The metric that decides which checkpoint is best, as reports name it."""
        return f"{self.held_out}_{self.options.monitor}"

    @property
    def monitored_values(self) -> list[float]:
        """The monitored metric of every evaluation so far, oldest first."""
        return [line[self.monitored] for line in self.lines if self.monitored in line]

    def evaluate(self, split: str, state: TrainState | None = None) -> dict[str, float]:
        """Exact metrics of ``state``, or the current one, over a split, compiling if it was never asked for."""
        sources = self.splits.named()
        if split not in sources:
            raise ConfigError(f"there is no split {split!r} to evaluate: the data have {', '.join(sources)}.")
        if split not in self.evaluators:
            with self.clock.span("compile"):
                self.evaluators[split] = self.compile_evaluator(split)
        return self.evaluators[split](self.state if state is None else state)

    def compile_evaluator(self, split: str) -> Evaluator:
        """The evaluation of ``split``, compiled anew."""
        source = self.splits.named()[split]
        if not self.evaluators:
            check_sums(self.programs, source, lambda: self.state, self.options.eval_batch_size)
        return make_evaluator(
            self.experiment,
            source,
            self.programs.shapes,
            batch_size=self.options.eval_batch_size or 2 * self.experiment.config.batch_size,
            resident=self.programs.feed.resident,
            layout=self.programs.layout,
            state_shardings=self.programs.shardings,
            ledger=self.programs.ledger,
            name=split,
        )

    @functools.cached_property
    def predict(self) -> Callable[[TrainState, Any], Any]:
        """The model's outputs for a batch of inputs, compiled once a shape."""
        return jax.jit(make_predict(self.experiment, self.splits.train))

    def placement(self) -> Placement:
        """Where the parts of the run sit now."""
        trees: dict[str, Any] = {"parameters": self.state.params}
        if self.state.model_state:
            trees["model_state"] = self.state.model_state
        trees["optimizer_state"] = self.state.opt_state
        if self.programs.feed.resident:
            trees["data"] = self.programs.feed.prepare(0, 1)
        return observe_placement(**trees)


def prepare_session(
    experiment: Experiment[Any],
    options: RunOptions,
    stack: contextlib.ExitStack,
    steps_per_call: int | None = None,
    startup: Startup | None = None,
) -> Session:
    """Loads data, compiles, and chooses the steps per call: all that precedes the first step.

    Args:
        experiment: what to run.
        options: how; cadences may be open.
        stack: gets what is to be undone when the run ends.
        steps_per_call: a length chosen before, by the run that is being resumed.
        startup: where the start is reported; None: nowhere.

    Raises:
        ConfigError, DataError: what is asked for cannot be run; nothing was written.
    """
    startup = startup or Startup()
    started, clock = time.perf_counter(), startup.clock
    config = experiment.config
    check_config(config)
    options = resolve_cadences(options, config.num_steps)
    layout = make_layout(options.strategy, options.devices, options.mesh, options.device)
    check_divides(config.batch_size, layout.data_size)
    if options.eval_batch_size is not None:
        check_divides(options.eval_batch_size, layout.data_size, "eval_batch_size")
    startup.device(layout.num_devices)
    keep_from_the_start(options.allocator, stack)
    with clock.span("load", "loading the data"):
        splits = experiment.data(config)
        check_data(splits)
        check_parts(experiment)
        check_batch_size(splits.train, config.batch_size)
        feed = make_feed(splits, config.seed, config.batch_size, resident=options.resident, layout=layout)
    stack.callback(feed.close)
    programs = Programs(experiment, splits.train, feed, Ledger(), clock, layout)
    check_examples(programs, splits)
    fingerprint = _fingerprint(programs, splits) if options.record or process_count() > 1 else {}
    check_alike_on_devices(programs, splits)
    plan = make_plan(options, config.num_steps)
    given = options.steps_per_call or steps_per_call
    with clock.span("measure", "measuring steps per call"):
        allocation, choice = try_out(programs, plan, given, options.allocator, stack)
    plan = with_tails(plan._replace(steps_per_call=choice.steps_per_call))
    for length in plan.call_lengths():
        programs.compile_train(length, "start" if length == choice.steps_per_call else "window's end")
    state = programs.init()
    session = Session(
        experiment, options, splits, plan, programs, state, choice, allocation, clock, fingerprint, started
    )
    _prepare_evaluation(session)
    session.placement().check(platform())
    session.ready_seconds = time.perf_counter() - started
    return session


def _fingerprint(programs: Programs, splits: Splits) -> dict[str, str | None]:
    """What tells a run from others, once all processes are known to have the same.

    Raises:
        ConfigError: some process computes something else, or on other data.
    """
    fingerprint = programs.fingerprint(splits)
    named = {told: str(fingerprint[part])[:8] for part, told in {**PARTS, "data": "the data"}.items()}
    all_agree("code or data", named | describe_devices()["versions"] | jax_flags())
    return fingerprint


def _prepare_evaluation(session: Session) -> None:
    """Compiles the evaluation on held-out data, once it is known to give what is asked of it."""
    held_out = session.held_out
    check_patience(session.options.patience, held_out)
    if held_out is None:
        return
    check_monitor(session.options.monitor, session.programs.evaluation_metrics())
    with session.clock.span("compile", f"compiling the program to evaluate {held_out}"):
        session.evaluators[held_out] = session.compile_evaluator(held_out)
