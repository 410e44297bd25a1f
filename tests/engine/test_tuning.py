"""The choice of steps per call, with a simulated clock, and of the members that fit into memory."""

import time
from collections.abc import Callable

import pytest

from jaxnn.engine import choose_steps_per_call, fitting_block
from jaxnn.types import TrainingError


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

    def choose(self, window: int, first: int = 1, *, wary: bool = False) -> tuple[int, dict[int, float]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", lambda: self.now)
            return choose_steps_per_call(self.make_call, window, first, wary=wary)


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


def test_first_call_is_the_only_one_compiled_if_it_is_short():
    machine, slow = Machine(lambda n: 20e-6 * n), slow_in_loops()
    assert machine.choose(100, first=100)[0] == 100 and machine.compiled == [100]
    assert slow.choose(100, first=100)[0] == 1 and slow.compiled[:2] == [100, 1]


def test_one_step_if_a_scanned_step_is_thirty_times_slower():
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
    assert slower.choose(100)[0] == 1 and len(slower.compiled) == 2
    equal = Machine(lambda n: step_seconds * n)
    equal.choose(1000)
    assert equal.now < max(3.0, 80 * step_seconds) and len(equal.compiled) <= 3


def test_more_steps_are_tried_if_a_few_already_pay():
    # The first probe of a step of 50 ms has few steps; page faults of 20 ms per call make sixteen worth trying.
    machine = Machine(lambda n: 20e-3 + 30e-3 * n)
    assert machine.choose(160)[0] == 16 and machine.compiled[-1] == 16


def test_first_probe_is_a_power_of_four_within_bounds():
    # 0.1 s of 100 µs steps are 1000, nearest 4^5; of 20 ms steps 5, nearest 4; of slow steps still 4.
    for seconds, probe in {100e-6: 1024, 1e-9: 1024, 20e-3: 4, 10.0: 4, 1.5e-3: 64}.items():
        machine = Machine(lambda n, seconds=seconds: seconds * n)
        machine.choose(4096)
        assert machine.compiled[1] == probe


def test_members_that_do_not_fit_are_trained_in_rounds_of_one_size():
    assert fitting_block(100, None, 9) == (9, None) and fitting_block(100, 1800, 9) == (9, None)
    block, note = fitting_block(100, 1799, 9)  # eight fit, each with its state twice
    assert block == 5 and note is not None and note.endswith("at once: 5 at a time, in 2 rounds")
    assert fitting_block(100, 200, 9)[0] == 1
    with pytest.raises(TrainingError, match="not one member fits: its state takes twice 100 B, and 199 B are free"):
        fitting_block(100, 199, 9)
