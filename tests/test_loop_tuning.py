"""Steps per call chosen by an imagined clock, the wish to stop, and early stopping."""

import dataclasses
import math
import signal
import threading
import types
from collections.abc import Callable

import pytest
from jaxnn.loop import tuning
from jaxnn.loop.signals import Interruption, interruptible
from jaxnn.loop.stopping import evaluations_since_best, should_stop


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


def choose(monkeypatch: pytest.MonkeyPatch, window: int, call_seconds: Callable[[int], float], wary: bool = False):
    machine = Machine(call_seconds)
    monkeypatch.setattr(tuning, "time", types.SimpleNamespace(perf_counter=lambda: machine.now))
    return tuning.choose_steps_per_call(machine.make_call, window, wary=wary), machine


def test_many_steps_where_dispatch_dominates(monkeypatch) -> None:
    # 200 µs to dispatch a call and 10 µs a step: alone a step costs 210 µs, among a hundred 12.
    choice, machine = choose(monkeypatch, 400, lambda n: 200e-6 + 10e-6 * n)
    assert choice.steps_per_call >= 100
    assert 400 % choice.steps_per_call == 0
    assert choice.seconds_per_step[1] == pytest.approx(210e-6)
    expected = (200e-6 + 10e-6 * choice.steps_per_call) / choice.steps_per_call
    assert choice.seconds_per_step[choice.steps_per_call] == pytest.approx(expected)


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


def test_the_first_signal_is_a_wish_and_the_second_stops_at_once() -> None:
    with interruptible() as interruption, interruption.finishing("the window"):
        assert interruption.signum is None
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signum == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back_whatever_happens() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), interruptible():
        assert signal.getsignal(signal.SIGINT) != before[0]
        raise RuntimeError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_thread_that_cannot_catch_signals_runs_all_the_same() -> None:
    seen: list[Interruption] = []

    def work() -> None:
        with interruptible() as interruption:
            seen.append(interruption)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [interruption.signum for interruption in seen] == [None]


NAN = math.nan


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
def test_evaluations_since_the_best(values: list[float], higher: bool, expected: int) -> None:
    assert evaluations_since_best(values, higher_is_better=higher) == expected


@pytest.mark.parametrize(
    ("values", "patience", "higher", "expected"),
    [
        ([], 1, False, False),
        ([1.0, 2.0, 3.0], None, False, False),
        ([1.0, 2.0], 2, False, False),
        ([1.0, 2.0, 3.0], 2, False, True),
        ([1.0, 2.0, 3.0], 2, True, False),
        ([1.0, NAN, NAN], 2, False, True),
        ([NAN], 1, False, True),
        ([2.0, 3.0, 1.0], 2, False, False),
    ],
)
def test_patience(values: list[float], patience: int | None, higher: bool, expected: bool) -> None:
    assert should_stop(values, patience, higher_is_better=higher) is expected
