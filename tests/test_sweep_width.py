"""The planner of widths, fed with made-up machines; and what it says of this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import jaxnn as jn
from jaxnn.sweeps.engine import probing
from jaxnn.sweeps.engine.probing import Trial, expected_bytes, widen
from jaxnn.sweeps.engine.width import Bench, WidthPlan, candidate_widths, plan_width
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

MEBI = 2**20


class Machine:
    """A device whose steps of ``width`` members take ``seconds(width)``, on a clock of its own."""

    def __init__(self, seconds: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = seconds
        self.tried: list[tuple[int, int, int]] = []
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def call(self, block: int, width: int, steps: int) -> Callable[[], None]:
        self.tried.append((block, width, steps))

        def run() -> None:
            self.now += steps * self.seconds(width)

        return run

    def bench(self, **facts: Any) -> Bench:
        given = {"member_bytes": 1000, "free_bytes": None, "num_steps": 10_000}
        return Bench(self.call, lambda block, width, steps: width * MEBI, **{**given, **facts})


def test_candidates_are_powers_of_four_balanced_over_their_chunks() -> None:
    assert list(candidate_widths(1)) == [1]
    assert list(candidate_widths(16)) == [1, 4, 16]
    # Ten members at width 4 need three chunks, so that 4 it is; at 16 one of ten.
    assert list(candidate_widths(10)) == [1, 4, 10]
    # Twenty at width 16 would be two chunks, of which ten each are the fuller.
    assert list(candidate_widths(20)) == [1, 4, 10, 20]


def test_members_that_share_the_cost_of_a_step_go_as_wide_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 1e-3 + 1e-6 * width, monkeypatch)
    plan = plan_width(machine.bench(), 64, 100, None, None)
    assert plan.width == 64 and [trial.size for trial in plan.trials] == [1, 4, 16, 64]
    # At width one 64 members take 64 ms a step: 0.3 s are 4 steps, less than the 16 that share a call's costs.
    assert plan.steps_per_call == 20
    assert "width   64:" in plan.lines()[-1] and plan.lines()[-1].endswith("← chosen")


def test_members_that_are_slower_together_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 1e-3 * width if width == 1 else 2e-3 * width, monkeypatch)
    plan = plan_width(machine.bench(), 64, 100, None, None)
    assert plan.width == 1 and [trial.size for trial in plan.trials] == [1, 4], "wider ones are not tried"


def test_the_number_of_chunks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nine members: at width 4 in chunks of 3 three steps of 3 ms, at width 9 one of 9.1 ms.
    machine = Machine(lambda width: 1.0e-3 * width + 1e-4 * (width == 9) - 1e-5 * (width == 3), monkeypatch)
    assert plan_width(machine.bench(), 9, 100, None, None).width == 3


def test_small_steps_make_long_calls_and_a_short_sweep_is_not_worth_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 1e-5 * width, monkeypatch)
    assert plan_width(machine.bench(), 10, 4096, None, None).steps_per_call == 1024
    # Ten members of 10 steps take 1 ms, less than one attempt.
    short = plan_width(machine.bench(num_steps=10), 10, 4096, None, None)
    assert short.width == 1 and "width 4 not tried: it would take longer" in str(short.note)


def test_what_is_given_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 1e-3, monkeypatch)
    assert plan_width(machine.bench(), 64, 100, 8, 10) == WidthPlan(8, 10, 64)
    assert plan_width(machine.bench(), 4, 100, 8, 10).width == 4
    assert not machine.tried


def test_a_width_that_would_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 1e-3, monkeypatch)
    # 64 members twice take 0.12 MiB; temporaries 1 MiB each: 16 fit into 20 MiB, 64 do not.
    plan = plan_width(machine.bench(free_bytes=20 * MEBI), 64, 100, None, None)
    assert plan.width == 16 and plan.block == 64
    assert plan.note == "width 64 would take 64.1 MiB of 20.0 MiB free: not tried"


def test_members_that_do_not_fit_at_once_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 1e-3, monkeypatch)
    bench = machine.bench(member_bytes=MEBI, free_bytes=50 * MEBI)
    plan = plan_width(bench, 64, 100, None, None)
    # 25 fit with their states twice; three rounds are needed, so 22 each.
    assert plan.block == 22 and {block for block, _, _ in machine.tried} == {22}
    assert "64 members of 2.0 MiB do not fit in 50.0 MiB at once: 22 at a time, in 3 rounds" in str(plan.note)
    with pytest.raises(jn.TrainingError, match="not one member fits: its state takes twice 1.0 MiB, and 1.5 MiB are"):
        plan_width(machine.bench(member_bytes=MEBI, free_bytes=1.5 * MEBI), 64, 100, None, None)


def test_temporaries_are_a_fixed_part_and_one_a_member() -> None:
    trials = [Trial(1, 1.0, 1.0, 30), Trial(4, 1.0, 1.0, 60)]
    assert expected_bytes(trials[:1], 4) == 120, "of one alone all may be the members'"
    assert expected_bytes(trials, 16) == 20 + 16 * 10


def test_a_size_the_device_refuses_ends_the_search() -> None:
    import jax

    def attempt(size: int) -> Trial:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    assert (
        widen([4], [Trial(1, 1.0, 1.0, 0)], attempt, lambda _: 0.0, None)
        == "4 cannot be run: it does not fit in memory"
    )


def test_being_slower_ends_the_search_above_the_least_only() -> None:
    def attempt(size: int) -> Trial:
        return Trial(size, 1.0, 10.0 / size, 0)

    trials = [Trial(1, 1.0, 10.0, 0)]
    widen([4, 16, 64], trials, attempt, lambda _: 0.0, None, least=16)
    assert [trial.size for trial in trials] == [1, 4, 16]


def test_fewer_members_are_laid_out_in_the_width_that_suits_them() -> None:
    trials = tuple(Trial(width, seconds, 0.0, 0) for width, seconds in ((1, 1.0), (4, 1.5), (16, 2.0)))
    plan = WidthPlan(16, 10, 64, trials)
    assert [plan.width_for(number) for number in (1, 2, 4, 5, 64)] == [1, 4, 4, 16, 16]


@pytest.mark.slow
def test_members_beyond_memory_are_trained_in_rounds_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    points = jn.grid(learning_rate=[0.1, 0.2, 0.3], seed=[0, 1])
    whole = jn.sweep(tiny.experiment(), points, record=False, width=2, devices=1, **tiny.HOW)
    # The linear model and its momentum take 2 · 48 bytes, its counters and key 16 more; twice of two members fit.
    monkeypatch.setattr("jaxnn.sweeps.engine.group_run.available_bytes", lambda device: 500 / probing.MEMORY_SHARE)
    rounds = jn.sweep(tiny.experiment(), points, record=False, width=2, devices=1, **tiny.HOW)
    assert list(rounds.values("test_loss")) == list(whole.values("test_loss"))


@pytest.mark.slow
def test_plan_only_says_and_trains_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    points = jn.grid(learning_rate=[0.1, 0.2], batch_size=[4, 8])
    long = tiny.experiment(num_steps=10**6)
    options = {"eval_every": 10**5, "report_every": 10**5}
    sweep = jn.sweep(long, points, plan_only=True, devices=1, run_dir=tmp_path / "sweep", **options)
    said = capsys.readouterr().out
    assert "4 in 2 groups, a compilation each" in said and said.count("member-steps/s a device") == 4
    assert "2 members, all with batch_size 4" in said and said.count("← chosen") == 2
    assert {member.status for member in sweep.members} == {"waiting"} and not (tmp_path / "sweep").exists()


def test_the_batch_size_is_planned_alike() -> None:
    plan = jn.plan_batch_size(tiny.experiment(), [4, 16, 16, 64])
    # Sizes beyond the 37 examples are left out.
    assert {trial.size for trial in plan.trials} <= {4, 16} and plan.trials[0].size == 4
    best = max(trial.per_second for trial in plan.trials)
    chosen = next(trial for trial in plan.trials if trial.size == plan.smallest)
    assert chosen.per_second >= 0.9 * best and "examples/s" in str(plan)
    with pytest.raises(jn.ConfigError, match="no batch size to try is within the 37 training examples"):
        jn.plan_batch_size(tiny.experiment(), [64])
