"""Tables as aligned text, HTML and Markdown, and text that a terminal shows as it is: what the library prints with."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple


def text_table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None, *, first_width: int = 0) -> str:
    """Returns left-aligned columns two spaces apart, one line per row; an empty string for no rows and no header.

    Args:
        rows: cells, the same number in each row.
        header: names of the columns; None for a table without a header line.
        first_width: least width of the first column, in characters; aligns tables that are printed one by one.
    """
    table = [*([header] if header else []), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    widths[:1] = [max(first_width, width) for width in widths[:1]]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def html_table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None) -> str:
    """Returns an HTML table for notebooks; cells are escaped.

    Args:
        rows: cells. Without a header the first cell of each row is the row's heading.
        header: names of the columns, or None.
    """

    def row(tags: Iterable[str], cells: Sequence[str]) -> str:
        styled = zip(tags, cells, strict=True)
        return "".join(f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for tag, cell in styled)

    lines = [row(["th"] * len(header), header)] if header else []
    first = "td" if header else "th"
    lines += [row([first, *["td"] * (len(cells) - 1)], cells) for cells in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def markdown_table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """Returns a Markdown table; ``|`` in cells is escaped."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '\\|') for cell in line)} |" for line in lines)


class Table(NamedTuple):
    """A table that displays itself: as aligned text where it is printed, as HTML in a notebook.

    Attributes:
        header: names of the columns.
        rows: cells.
        notes: lines below the table.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return "\n".join([text_table(self.rows, self.header), *self.notes])

    def _repr_html_(self) -> str:
        return html_table(self.rows, self.header) + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)


def printable(text: object, *, lines: bool = True) -> str:
    r"""Escapes control characters and lone surrogates, as ``\x1b``: records and other hosts may contain any text.

    Args:
        text: what is to be printed.
        lines: whether line ends stay; False for one value among others.
    """
    return "".join(
        character
        if character.isprintable() or (lines and character == "\n")
        else character.encode("unicode_escape").decode()
        for character in str(text)
    )
