"""Tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from jaxnn.observe import printable

# A width, in characters, that no row reaches.
UNFOLDED = 10_000


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Prints a table: on a terminal folded to its width, elsewhere a row a line, for other programs to read."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=None, title=title, title_justify="left")
    for row in rows:
        # As text: brackets are no markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else UNFOLDED).print(table)
