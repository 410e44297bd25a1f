"""Windows and calls as pure functions of the step, how many steps a call has, and the status of a member."""

import itertools
import math
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn import engine
from jaxnn._clock import Clock
from jaxnn.engine import Plan, RunOptions, with_tails
from jaxnn.parallel import Layout
from jaxnn.tasks import direction_of
from jaxnn.types import TrainingError
from tests import tiny

NAN = math.nan

# num_steps, report_every, eval_every, checkpoint_every, steps_per_call: coprime, absent, equal, longer than the run.
NUMBERS = itertools.product((1, 23, 60), (1, 7, 100), (0, 10), (0, 4, 100), (1, 3, 16))
PLANS = [with_tails(Plan(*numbers)) for numbers in NUMBERS]


def windows(plan: Plan, step: int = 0) -> list[tuple[int, int]]:
    """The first step and the end of each window."""
    return walked(plan, step, plan.window_end)


def calls(plan: Plan, step: int = 0) -> list[tuple[int, int]]:
    """The first step and the end of each call."""
    return walked(plan, step, lambda step: step + plan.call_length(step))


def walked(plan: Plan, step: int, end_of: Callable[[int], int]) -> list[tuple[int, int]]:
    found = []
    while step < plan.num_steps:
        found.append((step, end_of(step)))
        step = found[-1][1]
    return found


def test_windows_partition_the_run_and_end_when_something_is_due():
    for plan in PLANS:
        # Derived independently: every multiple of a cadence below the end, and the end.
        every = [number for number in (plan.report_every, plan.eval_every, plan.checkpoint_every) if number]
        due = {step for step in range(1, plan.num_steps) if any(step % number == 0 for number in every)}
        assert [end for _, end in windows(plan)] == sorted(due | {plan.num_steps}), plan


def test_calls_fill_each_window_with_few_lengths():
    for plan in PLANS:
        for start in range(0, plan.num_steps, 5):  # a longer run may go on in the middle of a window
            assert {end - step for step, end in calls(plan, start)} <= set(plan.call_lengths(start)), (plan, start)
        made = calls(plan)
        assert {end for _, end in windows(plan)} <= {end for _, end in made}, plan
        lengths = {end - step for step, end in made}
        assert lengths <= set(plan.call_lengths()) and 1 <= min(lengths) <= max(lengths) <= plan.steps_per_call, plan
        # Steps per call, and at most three tails or the powers of two below it: 16 needs 1, 2, 4, 8.
        assert len(plan.call_lengths()) <= 1 + max(3, (plan.steps_per_call - 1).bit_length()), plan


def test_the_plan_of_a_resumed_run_is_the_rest_of_the_plan():
    for plan in PLANS:
        for index, (_, end) in enumerate(windows(plan), start=1):
            assert windows(plan, end) == windows(plan)[index:], plan
            assert calls(plan, end) == [call for call in calls(plan) if call[0] >= end], plan


def test_default_cadences_fit_any_number_of_steps():
    for num_steps in (1, 2, 7, 23, 60, 100, 997, 4_000, 100_003):
        options = RunOptions().with_cadences(tiny.Config(num_steps=num_steps))
        plan = Plan(num_steps, options.report_every or 0, options.eval_every or 0, 0)
        evaluations = sum(plan.evaluates(end) for _, end in windows(plan))
        assert min(num_steps, 5) <= evaluations <= 20, num_steps
        assert min(num_steps, 25) <= len(windows(plan)) <= 110, num_steps
    assert [step for step in range(1, 26) if Plan(25, 5, 0, 0).evaluates(step)] == [25], "at the end without a cadence"


DIRECTIONS = {
    "min": ("loss", "test_loss", "mae", "validation_rmse", "nll", "wer", "perplexity", "train_mean_absolute_error"),
    "max": ("accuracy", "test_top_5_accuracy", "auc", "f1", "validation_ndcg@10", "recall_at_5", "probe_own/f1"),
    None: ("my_mae", "lossless_share", "probe_own/my_f1", "gradient_norm", "test_gain"),
}


def test_directions_of_metrics_are_stated_or_known_by_their_whole_names():
    for direction, names in DIRECTIONS.items():
        assert {direction_of(name) for name in names} == {direction}
    assert direction_of("test_gain", {"gain": "min"}) == direction_of("gain", {"gain": "min"}) == "min"
    assert direction_of("test_loss", {"loss": "max"}) == "max"


@pytest.mark.parametrize(
    ("values", "higher", "expected"),
    [
        ([3.0], False, 0),
        ([3.0, 2.0, 2.5, 2.6], False, 2),
        ([3.0, 2.0, 2.5, 2.6], True, 3),
        ([0.5, 0.9, 0.9, 0.9], True, 2),  # as good as before is not better
        ([NAN, 2.0, NAN, 3.0], False, 2),
        ([2.0, NAN], True, 1),
        ([NAN, NAN], False, 2),
        ([2.0, -math.inf], False, 0),
    ],
)
def test_evaluations_since_best(values, higher, expected):
    log = engine.MemberLog(lines=[{"loss": value} for value in values])
    assert log.evaluations_since_best("loss", higher_is_better=higher) == expected


def settled(lines: list[dict[str, float]], **options: object) -> str:
    """The status of a member of 10 steps that reported ``lines``."""
    resolved = RunOptions(**options).with_cadences(tiny.Config(num_steps=10))  # type: ignore[arg-type]
    log, plan = engine.MemberLog("running", lines), resolved.plan(10)  # type: ignore[arg-type]
    programs = types.SimpleNamespace(task=jn.tasks.classification(tiny.MODEL))  # nothing is computed
    trainer = engine.Trainer(resolved, tiny.splits(), programs, plan, [log], Clock())  # type: ignore[arg-type]
    trainer.settle(0, log.step, diverged=False)
    return log.status


def test_only_evaluations_stop_and_the_last_step_finishes():
    lines: list[dict[str, float]] = [{"step": 1, "test_loss": 1.0}, {"step": 2, "test_loss": 2.0}]
    assert settled(lines, patience=1) == settled(lines, stop=lambda lines: lines[-1]["step"] == 2) == "stopped early"
    assert settled([*lines, {"step": 3}], patience=1, stop=lambda lines: True) == "running"
    assert settled([*lines, {"step": 10, "test_loss": 2.0}], patience=1, stop=lambda lines: True) == "finished"


def test_training_metrics_stop_at_evaluations_without_an_eval_split():
    # Windows end after steps 5 and 15 too, while the next one is under way.
    experiment = tiny.experiment(data=jn.data.arrays(tiny.points(37)))
    run = tiny.fit(experiment, stop=lambda lines: lines[-1]["train_loss"] < 100)
    assert run.summary.status == "stopped early" and run.summary.step == int(run.state.step) == 10


class Machine:
    """A machine whose call of ``n`` steps takes ``call_seconds(n)``; lists what it compiled and called."""

    def __init__(self, call_seconds: Callable[[int], float]) -> None:
        self.call_seconds, self.now = call_seconds, 0.0
        self.compiled: list[int] = []
        self.calls: list[int] = []

    def make_call(self, length: int) -> Callable[[], object]:
        self.compiled.append(length)

        def call() -> object:
            self.calls.append(length)
            self.now += self.call_seconds(length)
            return ()

        return call

    def choose(self, window: int, first: int = 1, **how: Any) -> tuple[int, dict[int, float]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", lambda: self.now)
            return engine.choose_steps_per_call(self.make_call, window, first, **how)


def dispatched(n: int) -> float:
    """200 µs to dispatch a call and 10 µs per step: 210 µs for a step alone, 12 among a hundred."""
    return 200e-6 + 10e-6 * n


def slow_in_loops(alone: float = 5e-3, looped: float = 0.15) -> Machine:
    """A convolution's gradient on a CPU: 5 ms alone, 150 ms in a scan."""
    return Machine(lambda n: alone if n == 1 else looped * n)


@pytest.mark.parametrize("wary", [False, True])
def test_many_steps_if_dispatch_dominates(wary):
    machine = Machine(dispatched)
    steps, measured = machine.choose(400, wary=wary)
    assert steps >= 100 and 400 % steps == 0
    assert measured[1] == pytest.approx(210e-6)
    assert measured[steps] == pytest.approx(dispatched(steps) / steps)
    assert len(machine.compiled) == 3


def test_first_call_is_the_only_one_compiled_if_it_is_short_and_one_step_if_scanned_ones_are_slow():
    machine, slow = Machine(lambda n: 20e-6 * n), slow_in_loops()
    assert machine.choose(100, first=100)[0] == 100 and machine.compiled == [100]
    assert slow.choose(100, first=100)[0] == 1 and slow.compiled[:2] == [100, 1]
    machine = slow_in_loops()
    assert machine.choose(100)[0] == 1 and machine.now < 5.0
    assert sum(length > 1 for length in machine.calls) == 1, "a slow scan is run once"


@pytest.mark.parametrize(("alone", "looped"), [(0.071, 0.95), (5e-3, 0.15), (1e-4, 3e-3)])
@pytest.mark.parametrize("window", [100, 25, 2])
def test_if_wary_one_call_of_two_steps_shows_a_slow_loop(window, alone, looped):
    machine = slow_in_loops(alone, looped)
    assert machine.choose(window, wary=True)[0] == 1 and max(machine.calls) <= window
    assert [length for length in machine.calls if length > 1] == [2]


@pytest.mark.parametrize("step_seconds", [1e-6, 1e-4, 1e-2, 1.0])
def test_one_step_if_a_scan_is_a_little_slower_and_measuring_is_short(step_seconds):
    slower = Machine(lambda n: step_seconds * n * (1.0 if n == 1 else 1.3))
    assert slower.choose(100)[0] == 1 and len(slower.compiled) == (2 if step_seconds < 1 else 1)
    equal = Machine(lambda n: step_seconds * n)
    equal.choose(1000)
    assert equal.now < 6 and len(equal.compiled) <= 3


def test_measuring_takes_a_tenth_of_the_first_minute():
    for alone, compile_seconds, tried in ((5.0, 1.0, [1]), (0.5, 20.0, [1]), (0.2, 1.0, [1, 4])):
        machine = Machine(lambda n, alone=alone: alone * n)
        machine.choose(100, compile_seconds=compile_seconds)
        assert machine.compiled == tried and machine.now <= 6


def test_more_steps_are_tried_if_a_few_already_pay():
    # The first probe of a step of 50 ms has few steps; page faults of 20 ms per call make sixteen worth trying.
    machine = Machine(lambda n: 20e-3 + 30e-3 * n)
    assert machine.choose(160)[0] == 16 and machine.compiled[-1] == 16


def test_members_that_do_not_fit_are_trained_in_rounds_of_one_size():
    assert engine.fitting_block(100, None, 9) == (9, None) and engine.fitting_block(100, 1800, 9) == (9, None)
    block, note = engine.fitting_block(100, 1799, 9)  # eight fit, each with its state twice
    assert block == 5 and note is not None and note.endswith("at once: 5 at a time, in 2 rounds")
    assert engine.fitting_block(100, 200, 9)[0] == 1
    with pytest.raises(TrainingError, match="not one member fits: its state takes twice 100 B, and 199 B are free"):
        engine.fitting_block(100, 199, 9)


# Member-steps/s by vmap size, and seconds of the launches of a step, on an H200 (2026-11-27, d1a419e).
H200 = {
    "mlp": ({1: 35.6e3, 4: 142e3, 16: 519e3, 64: 1.99e6, 256: 6.42e6, 1024: 11.9e6}, 42 * 1.5e-6),
    "cnn": ({1: 3.46e3, 4: 6.18e3, 16: 6.59e3, 64: 11.9e3, 256: 11.6e3}, 60 * 1.5e-6),
}


def narrowed(network: str, sizes: Sequence[int], fitting: int = 1024, steps: float = 1e9) -> Any:
    """The sizes that are tried on an H200 where at most ``fitting`` fit, the fastest behind them; and a note."""
    (curve, launches), tried = H200[network], list[int]()

    def attempt(size: int) -> tuple[engine.Trial, float]:
        tried.append(size)
        if size > fitting:
            raise MemoryError
        return engine.Trial(size, size / curve[size], curve[size], 0), launches

    trials, note = engine.narrow(sizes, attempt, steps)
    assert [trial.size for trial in trials] == sorted(size for size in tried if size <= fitting)
    return [*tried, max(trials, key=lambda trial: trial.per_second).size], note


def test_an_accelerator_tries_all_members_together_first():
    sizes = [1, 4, 16, 64, 256]
    # Most of a step is launches, which a smaller size would not share.
    assert narrowed("mlp", [*sizes, 1024]) == ([1024, 1024], None)
    # They are next to nothing: a smaller size may be as good, and is, or not.
    assert narrowed("cnn", sizes[:4]) == ([64, 16, 64], None)
    assert narrowed("cnn", sizes)[0] == [256, 64, 16, 64]
    assert narrowed("cnn", sizes, steps=0)[0] == [256, 256], "not worth another compilation"


def test_an_accelerator_tries_what_fits_in_memory():
    tried, note = narrowed("mlp", [1, 4, 16, 64, 256, 1024], fitting=64)
    assert tried == [1024, 256, 64, 64] and note == "vmap size 1024 does not fit in memory"
    with pytest.raises(MemoryError):
        narrowed("mlp", [256, 1024], fitting=64)


@pytest.mark.needs_cpu
def test_an_accelerator_compiles_nothing_to_measure_and_starts_on_the_cpu(monkeypatch, tmp_path):
    # The first device is taken for an accelerator, and the last for the CPU beside it.
    local_devices, how = jax.local_devices, {"progress": "none", "report_every": 10, "eval_every": 20}
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "platform", "gpu")
        patch.setattr(jax, "local_devices", lambda **which: local_devices(**which)[::-1])
        run = jn.fit(tiny.experiment(), run_dir=tmp_path / "run", **how)
        sweep = jn.sweep(tiny.experiment(), jn.grid(seed=range(5)), devices=1, run_dir=tmp_path / "sweep", **how)
    programs = tiny.read(tmp_path / "run", "compiles.json")["compilations"]
    assert {(one["name"], one["cause"]) for one in programs} == {
        *(("initialise", "start"), ("train 10 steps", "start"), ("evaluate test", "start"))
    }
    (group,) = tiny.read(tmp_path / "sweep")["groups"]
    assert group["vmap"]["size"] == 5
    assert {device.id for leaf in jax.tree.leaves(run.state) for device in leaf.devices()} == {0}
    # A CPU's random numbers.
    for found, seed in ((run, 0), (sweep.run(3), 3)):
        right = tiny.fit(tiny.experiment(seed=seed), steps_per_call=10)
        jax.tree.map(np.testing.assert_array_equal, found.state.params, right.state.params)
