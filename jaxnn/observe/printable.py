"""Text that a terminal shows as it is: what is read from records, scripts and other hosts may hold its commands."""

from __future__ import annotations


def printable(text: object, *, lines: bool = True) -> str:
    r"""``text`` with control characters and lone surrogates escaped, as ``\x1b``.

    Args:
        text: what is to be printed.
        lines: whether line ends stay; not where it is one value of many.
    """
    return "".join(
        character
        if character.isprintable() or (lines and character == "\n")
        else character.encode("unicode_escape").decode()
        for character in str(text)
    )
