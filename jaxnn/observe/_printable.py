"""Text that a terminal shows as it is."""

from __future__ import annotations


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
