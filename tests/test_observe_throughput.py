"""Throughput is a median with its spread."""

import pytest

from jaxnn.observe import Window, steady_throughput


def test_median_and_spread_by_hand() -> None:
    # Rates 10, 20, 30, 40, 50: median 30, quartiles 20 and 40, spread (40 - 20) / 30.
    windows = [Window(10 * k, 1.0) for k in (3, 1, 5, 2, 4)]
    steady = steady_throughput(windows)
    assert steady is not None
    assert steady.steps_per_second == 30.0
    assert steady.spread == pytest.approx(2 / 3)
    assert steady.num_windows == 5


def test_a_window_of_nothing_does_not_count() -> None:
    steady = steady_throughput([Window(0, 50.0), Window(100, 0.5)])
    assert steady == (200.0, 0.0, 1)


@pytest.mark.parametrize("windows", [[], [Window(0, 1.0)], [Window(10, 0.0)]])
def test_nothing_to_tell(windows: list[Window]) -> None:
    assert steady_throughput(windows) is None
