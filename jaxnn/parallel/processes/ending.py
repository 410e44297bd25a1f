"""How a process of a run ended, for those who go on without it."""

from __future__ import annotations

from typing import NamedTuple

# The exit status of a process that lost another: sysexits' EX_TEMPFAIL, "try again later", as what was saved is kept.
LOST = 75


class Ending(NamedTuple):
    """The end of one process before the others.

    Attributes:
        rank: which process.
        status: the exit status that it means for the others.
        sentence: what became of it.
    """

    rank: int
    status: int
    sentence: str


def gone(rank: int, host: str, how: str) -> str:
    """The sentence for a process that ended without a word."""
    return f"process {rank} on {host} is gone ({how})"


def failed(rank: int, sentence: str) -> str:
    """The sentence for a process that said why it ended."""
    return f"process {rank} failed: {sentence}"
