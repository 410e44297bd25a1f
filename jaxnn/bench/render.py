"""A page's blocks as Markdown and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from jaxnn.bench.page import Block, Heading, Paragraph, Picture, Table

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:left}img{max-width:100%}"
)


def to_markdown(blocks: Sequence[Block]) -> str:
    """GitHub's Markdown."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """A page that needs nothing but its pictures."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(map(_html, blocks))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Picture(file, alt):
            return f"![{alt}]({file})"
        case Table(header, rows):
            lines = [header, ("---",) * len(header), *rows]
            return "\n".join(f"| {' | '.join(cell.replace('|', '\\|') for cell in line)} |" for line in lines)


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Picture(file, alt):
            return f'<p><img src="{html.escape(file)}" alt="{html.escape(alt)}"></p>'
        case Table(header, rows):
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
            body = "\n".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
