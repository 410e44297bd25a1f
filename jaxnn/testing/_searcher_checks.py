"""The check of a searcher: it is a function of its state alone, proposes what it may, and ends."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxnn.search import Searcher, simulate
from jaxnn.testing._agreement import run_checks
from jaxnn.types import ConfigError

SEARCHER_CHECKS = ("description", "pure", "proposals", "end", "losses")
MOST = 50_000  # calls of a curve after which a search counts as one without an end


def _distance(point: Mapping[str, Any], share: float) -> float:
    """A curve that falls, to a floor that differs between points and depends on no type of theirs."""
    return sum(map(ord, repr(sorted(point.items())))) % 97 / 97 + 0.5 / (1 + 9 * share)


def check_searcher(
    searcher: Searcher,
    curve: Callable[[Mapping[str, Any], float], float] = _distance,
    *,
    lanes: int = 4,
    checks: Sequence[str] = SEARCHER_CHECKS,
) -> dict[str, str]:
    """Checks a searcher on known learning curves, without training: seconds, before a search of hours.

    ``curve(point, share)`` is the value of a point after a ``share`` of its steps, the lower the better; members are in
    ``lanes``.

    - ``description``: ``shares`` ascend to 1, and ``settings`` are JSON;
    - ``pure``: asked and told the same again it answers the same, so that a killed search resumes to the same members;
    - ``proposals``: it proposes points of the fields of ``scales``, and promotes, forks and drops paused members only;
    - ``end``: at last it proposes nothing, and no more than ``num`` members;
    - ``losses``: it does so also if every third member diverges.

    Returns ``"passed"`` by check. Raises ConformanceError with a line for each failed check, ConfigError for an unknown
    check, or what is no searcher. A searcher of Optuna's keeps a study of its own, which is equal each time it is made.

    >>> jn.testing.check_searcher(jn.search.asha(jn.grid(seed=range(9))), checks=("pure", "end"))
    {'pure': 'passed', 'end': 'passed'}
    """
    if not isinstance(searcher, Searcher):
        raise ConfigError(f"check_searcher checks a jn.search.Searcher, not a {type(searcher).__name__}.")

    def searched(lost: int | None = None) -> Any:
        calls = itertools.count()

        def value(point: Mapping[str, Any], share: float) -> float:
            if (call := next(calls)) == MOST:
                raise ConfigError(f"after {MOST:,} reports there is no end")
            return math.inf if lost is not None and call % lost == 0 else curve(point, share)

        return simulate(searcher, value, lanes=lanes)

    def description() -> None:
        searcher.check()
        json.dumps(dict(searcher.settings))

    def pure() -> str | None:
        # Of fresh states first: what is kept elsewhere may be used up later.
        asked = [[*searcher.ask(searcher.init(), lanes)[1]] for _ in range(2)]
        if asked[0] != asked[1]:
            return "its first proposals are others the second time"
        first, second = (searched().events for _ in range(2))
        differ = next((number for number, two in enumerate(zip(first, second, strict=False)) if two[0] != two[1]), None)
        if differ is not None or len(first) != len(second):
            return f"event {differ if differ is not None else min(len(first), len(second))} is another the second time"
        return None

    def end() -> str | None:
        count = len(searched().members)
        return None if searcher.num is None or count <= searcher.num else f"{count} members, and num is {searcher.num}"

    def losses() -> None:
        searched(lost=3)

    def proposals() -> str | None:
        return None if searched().members else "it proposes no member"

    known = {"description": description, "proposals": proposals, "pure": pure, "end": end, "losses": losses}
    return run_checks("check_searcher", known, checks)
