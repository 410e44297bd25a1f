"""Tables as aligned text, HTML and Markdown, and text that a terminal shows as it is: what the library prints with."""

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple


def text_table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None) -> str:
    """Returns left-aligned columns two spaces apart, one line per row; an empty string for no rows and no header.

    >>> print(jn.observe.text_table([("adam", "0.97"), ("sgd", "0.9")], header=("optimizer", "accuracy")))
    optimizer  accuracy
    adam       0.97
    sgd        0.9
    """
    table = [*([header] if header else []), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """Returns a Markdown table; ``|`` in cells is escaped.

    >>> print(jn.observe.markdown_table([("a", "1")], ("name", "x")))
    | name | x |
    | --- | --- |
    | a | 1 |
    """
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '\\|') for cell in line)} |" for line in lines)


class Table(NamedTuple):
    """A table that displays itself, with notes below: as aligned text in a terminal, as HTML in a notebook."""

    header: Sequence[str] | None  # None: each row's first cell is its heading
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return "\n".join([text_table(self.rows, self.header), *self.notes])

    def _repr_html_(self) -> str:
        rows = [[("th", cell) for cell in self.header]] if self.header else []
        rows += [[("td" if self.header or n else "th", cell) for n, cell in enumerate(row)] for row in self.rows]
        lines = ("".join(f'<{tag} style="text-align:left">{html.escape(x)}</{tag}>' for tag, x in row) for row in rows)
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table>{table}</table>" + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)


def printable(text: object, *, lines: bool = True) -> str:
    r"""Escapes control characters and lone surrogates, as ``\x1b``; line ends stay if ``lines``."""
    return "".join(
        character
        if character.isprintable() or (lines and character == "\n")
        else character.encode("unicode_escape").decode()
        for character in str(text)
    )
