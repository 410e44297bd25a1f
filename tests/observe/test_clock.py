"""Spans of the clock add up to wall time; throughput is a median with its spread; tables are aligned and escaped."""

from __future__ import annotations

import pytest

from jaxnn.observe import Clock, Table, Window, html_table, markdown_table, steady_throughput, text_table


class Time:
    """A time that is set by hand."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_inner_spans_pause_outer_ones() -> None:
    time = Time()
    clock = Clock(time)
    assert clock.current == (None, None, 100.0)
    with clock.span("compute"):
        time.seconds += 1.0
        with clock.span("evaluation", "of a test"):
            time.seconds += 2.0
            assert clock.seconds["evaluation"] == 2.0, "an open span counts up to now"
            assert clock.current == ("evaluation", "of a test", 101.0), "reading the seconds starts no span"
            with pytest.raises(KeyError), clock.span("checkpoint"):
                time.seconds += 4.0
                raise KeyError
        assert clock.current == ("compute", None, 107.0)
        time.seconds += 8.0
    time.seconds += 16.0  # outside every span
    with clock.span("evaluation"), clock.span("evaluation"):
        time.seconds += 32.0
        assert clock.seconds["evaluation"] == 34.0
    # compute 1 + 8, evaluation 2 + 32, checkpoint 4; other 16; together 63, the wall time.
    assert clock.seconds == {"compute": 9.0, "evaluation": 34.0, "checkpoint": 4.0, "other": 16.0}
    assert clock.current == (None, None, 163.0)


def test_throughput_is_the_median_with_the_interquartile_range() -> None:
    # Rates 10, 20, 30, 40, 50: median 30, quartiles 20 and 40, spread (40 - 20) / 30.
    windows = [Window(10 * k, 1.0) for k in (3, 1, 5, 2, 4)]
    assert steady_throughput(windows) == (30.0, pytest.approx(2 / 3), 5)
    assert steady_throughput([Window(0, 50.0), Window(100, 0.5)]) == (200.0, 0.0, 1)
    assert [steady_throughput(none) for none in ([], [Window(0, 1.0)], [Window(10, 0.0)])] == [None] * 3


ROWS = [("a", "1"), ("longer", "<b>|")]


def test_tables_are_aligned_and_escaped() -> None:
    assert text_table(ROWS) == "a       1\nlonger  <b>|"
    assert text_table(ROWS, ("name", "x")) == "name    x\na       1\nlonger  <b>|"
    assert text_table([]) == ""
    assert text_table([("a", "")]) == "a", "no trailing spaces"
    assert markdown_table(ROWS, ("name", "x")) == "| name | x |\n| --- | --- |\n| a | 1 |\n| longer | <b>\\| |"
    facts, table = html_table(ROWS), html_table(ROWS, ("name", "x"))
    assert facts.count("<th") == 2 and "&lt;b&gt;" in facts, "without a header the first cells are headings"
    assert table.count("<th") == 2 and table.count("<td") == 4 and "<b>" not in table
    noted = Table(("name", "x"), ROWS, ["a note"])
    assert repr(noted).splitlines()[-1] == "a note" and noted._repr_html_().endswith("<p>a note</p>")
