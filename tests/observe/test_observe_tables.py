"""Tables as text, HTML and Markdown."""

from __future__ import annotations

from jaxnn.observe import Table, html_table, markdown_table, text_table

ROWS = [("a", "1"), ("longer", "<b>|")]


def test_tables_are_aligned_escaped_and_empty_ones_are_empty() -> None:
    assert text_table(ROWS) == "a       1\nlonger  <b>|"
    assert text_table(ROWS, ("name", "x")) == "name    x\na       1\nlonger  <b>|"
    assert text_table([]) == ""
    assert text_table([("a", "")]) == "a", "no trailing spaces"
    assert markdown_table(ROWS, ("name", "x")) == "| name | x |\n| --- | --- |\n| a | 1 |\n| longer | <b>\\| |"
    facts, table = html_table(ROWS), html_table(ROWS, ("name", "x"))
    assert facts.count("<th") == 2 and "&lt;b&gt;" in facts, "without a header the first cells are headings"
    assert table.count("<th") == 2 and table.count("<td") == 4 and "<b>" not in table


def test_a_table_shows_itself() -> None:
    table = Table(("name", "x"), ROWS, ["a note"])
    assert repr(table).splitlines()[-1] == "a note" and table._repr_html_().endswith("<p>a note</p>")
