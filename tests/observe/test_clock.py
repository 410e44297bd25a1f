"""Spans of the clock add up to wall time; throughput is a median with its spread; tables are aligned and escaped."""

import pytest

from jaxnn.observe import Clock, Table, markdown_table, steady_throughput, text_table


def test_inner_spans_pause_outer_ones():
    now = [100.0]
    clock = Clock(lambda: now[0])
    assert clock.current == (None, None, 100.0)
    with clock.span("compute"):
        now[0] += 1.0
        with clock.span("evaluation", "of a test"):
            now[0] += 2.0
            assert clock.seconds["evaluation"] == 2.0, "an open span counts up to now"
            assert clock.current == ("evaluation", "of a test", 101.0), "reading the seconds starts no span"
            with pytest.raises(KeyError), clock.span("checkpoint"):
                now[0] += 4.0
                raise KeyError
        assert clock.current == ("compute", None, 107.0)
        now[0] += 8.0
    now[0] += 16.0  # outside every span
    with clock.span("evaluation"), clock.span("evaluation"):
        now[0] += 32.0
    # compute 1 + 8, evaluation 2 + 32, checkpoint 4; other 16; together 63, the wall time.
    assert clock.seconds == {"compute": 9.0, "evaluation": 34.0, "checkpoint": 4.0, "other": 16.0}


def test_throughput_is_the_median_with_the_interquartile_range():
    # Rates 10, 20, 30, 40, 50: median 30, quartiles 20 and 40, spread (40 - 20) / 30.
    assert steady_throughput([30.0, 10.0, 50.0, 20.0, 40.0]) == (30.0, pytest.approx(2 / 3), 5)
    assert steady_throughput([]) is None


def test_tables_are_aligned_and_escaped():
    rows, header = [("a", ""), ("longer", "<b>|")], ("name", "x")
    assert text_table(rows, header) == "name    x\na\nlonger  <b>|", "without trailing spaces"
    assert markdown_table(rows, header).splitlines()[1:] == ["| --- | --- |", "| a |  |", "| longer | <b>\\| |"]
    noted = Table(header, rows, ["a note"])
    assert repr(noted).endswith("\na note") and noted._repr_html_().endswith("<p>a note</p>")
    assert "&lt;b&gt;" in noted._repr_html_() and "<b>" not in Table(None, rows)._repr_html_()
