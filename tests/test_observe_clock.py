"""The stopwatch adds up to wall time."""

import pytest

from jaxnn.observe import Clock


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


def test_a_span_within_its_own_name_counts_once() -> None:
    time = Time()
    clock = Clock(time)
    with clock.span("data"), clock.span("data"):
        time.seconds += 3.0
    assert clock.seconds == {"data": 3.0}


def test_an_open_span_is_read_up_to_now_and_goes_on() -> None:
    time = Time()
    clock = Clock(time)
    with clock.span("compute"):
        time.seconds += 1.0
        assert clock.seconds == {"compute": 1.0}
        time.seconds += 1.0
    assert clock.seconds == {"compute": 2.0}


def test_a_span_left_by_an_error_gives_back_to_the_outer_one() -> None:
    time = Time()
    clock = Clock(time)
    with clock.span("compute"):
        with pytest.raises(KeyError), clock.span("data"):
            time.seconds += 1.0
            raise KeyError
        time.seconds += 2.0
    assert clock.seconds == {"data": 1.0, "compute": 2.0}


def test_another_thread_reads_what_goes_on_and_since_when() -> None:
    time = Time()
    clock = Clock(time)
    assert clock.current == (None, 100.0)
    with clock.span("compute"):
        time.seconds += 1.0
        with clock.span("data"):
            time.seconds += 2.0
            assert clock.seconds["data"] == 2.0
            assert clock.current == ("data", 101.0), "to read the seconds is no sign of life"
        assert clock.current == ("compute", 103.0)
    assert clock.current == (None, 103.0)
