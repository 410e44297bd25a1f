"""Steps per call, chosen by an imagined clock."""

import dataclasses
import types
from collections.abc import Callable

import pytest

from jaxnn.engine import _tuning as tuning


@dataclasses.dataclass
class Machine:
    """A machine whose calls take imagined time.

    Attributes:
        call_seconds: from a number of steps to what a call of so many takes.
        now: its clock.
        calls: how many steps each call had that was made.
        compiled: the lengths that were compiled, in order.
    """

    call_seconds: Callable[[int], float]
    now: float = 0.0
    calls: list[int] = dataclasses.field(default_factory=list)
    compiled: list[int] = dataclasses.field(default_factory=list)

    def make_call(self, length: int) -> Callable[[], object]:
        self.compiled.append(length)

        def call() -> object:
            self.calls.append(length)
            self.now += self.call_seconds(length)
            return ()

        return call


def choose(
    monkeypatch: pytest.MonkeyPatch, window: int, call_seconds: Callable[[int], float], first: int = 1, **how: bool
):
    machine = Machine(call_seconds)
    monkeypatch.setattr(tuning, "time", types.SimpleNamespace(perf_counter=lambda: machine.now))
    return tuning.choose_steps_per_call(machine.make_call, window, first, **how), machine


def test_many_steps_where_dispatch_dominates(monkeypatch) -> None:
    # 200 µs to dispatch a call and 10 µs a step: alone a step costs 210 µs, among a hundred 12.
    choice, machine = choose(monkeypatch, 400, lambda n: 200e-6 + 10e-6 * n)
    assert choice.steps_per_call >= 100
    assert 400 % choice.steps_per_call == 0
    assert choice.seconds_per_step[1] == pytest.approx(210e-6)
    expected = (200e-6 + 10e-6 * choice.steps_per_call) / choice.steps_per_call
    assert choice.seconds_per_step[choice.steps_per_call] == pytest.approx(expected)


def test_a_short_first_call_is_the_only_one_compiled(monkeypatch) -> None:
    choice, machine = choose(monkeypatch, 100, lambda n: 20e-6 * n, first=100)
    assert (choice.steps_per_call, machine.compiled) == (100, [100])


def test_a_first_call_that_turns_out_long_is_compared_with_one_step(monkeypatch) -> None:
    choice, machine = choose(monkeypatch, 100, lambda n: 5e-3 if n == 1 else 0.15 * n, first=100)
    assert choice.steps_per_call == 1 and machine.compiled[:2] == [100, 1]


def test_one_step_where_a_scanned_step_is_thirty_times_slower(monkeypatch) -> None:
    # A convolution's gradient on a CPU: 5 ms alone, 150 ms in a scan.
    choice, machine = choose(monkeypatch, 100, lambda n: 5e-3 if n == 1 else 0.15 * n)
    assert choice.steps_per_call == 1
    assert sum(length > 1 for length in machine.calls) == 1, "a slow scan is run once, to see that it is"
    assert machine.now < 5.0


@pytest.mark.parametrize(("alone", "looped"), [(0.071, 0.95), (5e-3, 0.15), (1e-4, 3e-3)])
@pytest.mark.parametrize("window", [100, 25, 2])
def test_where_a_loop_is_feared_two_steps_show_that_it_is_slow(monkeypatch, window, alone, looped) -> None:
    choice, machine = choose(monkeypatch, window, lambda n: alone if n == 1 else looped * n, wary=True)
    assert choice.steps_per_call == 1
    assert [length for length in machine.calls if length > 1] == [2]


def test_where_a_loop_is_feared_without_cause_many_steps_are_chosen_all_the_same(monkeypatch) -> None:
    # 200 µs to dispatch and 10 µs a step, as above.
    choice, machine = choose(monkeypatch, 400, lambda n: 200e-6 + 10e-6 * n, wary=True)
    assert choice.steps_per_call >= 100
    assert len(machine.compiled) == 3


@pytest.mark.parametrize("step_seconds", [1e-5, 1e-3, 0.1])
def test_one_step_where_a_scan_is_a_little_slower(monkeypatch, step_seconds: float) -> None:
    choice, _ = choose(monkeypatch, 100, lambda n: step_seconds * n * (1.0 if n == 1 else 1.3))
    assert choice.steps_per_call == 1


@pytest.mark.parametrize("step_seconds", [1e-6, 1e-4, 1e-2, 1.0])
def test_measuring_is_short(monkeypatch, step_seconds: float) -> None:
    _, machine = choose(monkeypatch, 1000, lambda n: step_seconds * n)
    assert machine.now < max(3.0, 80 * step_seconds)
    assert len(machine.compiled) <= 3


def test_more_steps_are_tried_where_a_few_already_pay(monkeypatch) -> None:
    # A step of 50 ms asks for a probe of few; page faults of 20 ms a call then make sixteen worth trying.
    choice, machine = choose(monkeypatch, 160, lambda n: 20e-3 + 30e-3 * n)
    assert machine.compiled[-1] == 16
    assert choice.steps_per_call == 16


def test_a_window_of_two_is_never_exceeded(monkeypatch) -> None:
    _, machine = choose(monkeypatch, 2, lambda n: 1e-3 + 1e-6 * n)
    assert max(machine.calls) <= 2


def test_the_first_probe_is_a_power_of_four_within_bounds() -> None:
    # 0.1 s of 100 µs steps are 1000, nearest 4^5; of 20 ms steps 5, nearest 4; of slow steps still 4.
    assert tuning.first_probe(100e-6) == 1024
    assert tuning.first_probe(1e-9) == 1024
    assert tuning.first_probe(20e-3) == 4
    assert tuning.first_probe(10.0) == 4
    assert tuning.first_probe(1.5e-3) == 64
