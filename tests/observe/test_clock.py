"""Spans of the clock add up to wall time; throughput is a median with its spread."""

import pytest

from jaxnn.observe import Clock, Window, steady_throughput


class Time:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_an_inner_span_pauses_the_outer_one() -> None:
    time = Time()
    clock = Clock(time)
    with clock.span("compute"):
        time.seconds += 1.0
        with clock.span("evaluation"):
            time.seconds += 2.0
            with clock.span("checkpoint"):
                time.seconds += 4.0
        time.seconds += 8.0
    time.seconds += 16.0  # outside every span: nobody's
    with clock.span("evaluation"):
        time.seconds += 32.0
    # compute 1 + 8, evaluation 2 + 32, checkpoint 4; together 63 - 16.
    assert clock.seconds == {"compute": 9.0, "evaluation": 34.0, "checkpoint": 4.0}


def test_an_open_span_counts_up_to_now_and_once_within_its_own_name() -> None:
    time = Time()
    clock = Clock(time)
    with clock.span("data"), clock.span("data"):
        time.seconds += 1.0
        assert clock.seconds == {"data": 1.0}
        time.seconds += 2.0
    assert clock.seconds == {"data": 3.0}


def test_the_outer_span_resumes_after_an_error() -> None:
    time = Time()
    clock = Clock(time)
    with clock.span("compute"):
        with pytest.raises(KeyError), clock.span("data"):
            time.seconds += 1.0
            raise KeyError
        time.seconds += 2.0
    assert clock.seconds == {"data": 1.0, "compute": 2.0}


def test_current_has_the_open_span_and_its_start() -> None:
    time = Time()
    clock = Clock(time)
    assert clock.current == (None, None, 100.0)
    with clock.span("compute"):
        time.seconds += 1.0
        with clock.span("data"):
            time.seconds += 2.0
            assert clock.seconds["data"] == 2.0
            assert clock.current == ("data", None, 101.0), "reading the seconds starts no span"
        assert clock.current == ("compute", None, 103.0)
    assert clock.current == (None, None, 103.0)


def test_throughput_is_the_median_with_the_interquartile_range() -> None:
    # Rates 10, 20, 30, 40, 50: median 30, quartiles 20 and 40, spread (40 - 20) / 30.
    windows = [Window(10 * k, 1.0) for k in (3, 1, 5, 2, 4)]
    assert steady_throughput(windows) == (30.0, pytest.approx(2 / 3), 5)
    assert steady_throughput([Window(0, 50.0), Window(100, 0.5)]) == (200.0, 0.0, 1)


@pytest.mark.parametrize("windows", [[], [Window(0, 1.0)], [Window(10, 0.0)]])
def test_no_throughput_without_steps_and_time(windows: list[Window]) -> None:
    assert steady_throughput(windows) is None
