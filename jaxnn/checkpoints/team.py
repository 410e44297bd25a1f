"""Who saves together: one process alone, or several of which the first keeps the folder in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Team(NamedTuple):
    """The processes that save a state together, each what lies on its devices; all call the same in the same order.

    Attributes:
        leads: whether this one names and removes what they wrote.
        from_leader: gives all of them what a function gives, or raises, in the one that leads.
    """

    leads: bool
    from_leader: Callable[[Callable[[], Any]], Any]


ALONE = Team(True, lambda function: function())
