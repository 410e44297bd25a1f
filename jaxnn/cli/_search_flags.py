"""The flags of a search: ``sweep --search asha --space learning_rate=log:1e-4:1e-1 --num 1024``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from jaxnn._fields import bounded, check_fields
from jaxnn.types import ConfigError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxnn.search import Points, Searcher

UNTIL_THE_BUDGET_ENDS = 10_000  # members
Search = Literal["random", "sobol", "tpe", "optuna", "halving", "asha", "patience", "extrapolated", "pbt"]
SPACE = "log:1e-4:1e-1, 0:0.5, 1:4, or values as in relu,gelu"


@dataclasses.dataclass(frozen=True)
class Design:
    """How the values of the flags make members."""

    combine: Literal["grid", "zip"] = "grid"
    """Every combination of the values, or by position."""
    search: Search | None = None
    """Draws of the space, or a searcher that compares members."""
    propose: Literal["random", "sobol", "tpe", "optuna"] | None = None
    """Where asha, halving, … get members; random if None."""
    space: tuple[str, ...] = ()
    """Fields to draw: learning_rate=log:1e-4:1e-1 dropout=0:0.5 num_layers=1:4 activation=relu,gelu."""
    num: int | None = bounded(None, least=1)
    """Number of draws of the space; with a budget 10,000."""
    key: int = bounded(0, least=0)
    """Seed of the draws."""
    eta: int | None = bounded(None, least=2)
    """One of ETA members is promoted; by default 3."""
    confirm: int | None = bounded(None, least=2)
    """Fresh seeds that compare best, runner-up and config."""

    def __post_init__(self) -> None:
        check_fields(self)

    def axes(self, fields: Mapping[str, str], value: Callable[[str, str], Any]) -> dict[str, Any]:
        """The distributions of the ``space`` by dotted names of ``fields``, which are given by flag.

        ``value(flag, word)`` is a word as a value of that field.
        """
        from jaxnn import search

        found: dict[str, Any] = {}
        for word in self.space:
            flag, _, given = word.partition("=")
            flag = flag.replace("-", "_").rpartition(".")[2]
            if flag not in fields and given:
                raise ConfigError(f"--space: the config has no field {flag!r}: {suggest(flag, fields)}.")
            if fields.get(flag) in found:
                raise ConfigError(f"--space has {flag!r} twice: give it once.")
            if not given:
                raise ConfigError(f"--space {word!r} is no FIELD=VALUES of the config: write {flag}={SPACE}.")
            kind, *ends = given.split(":") if given.startswith("log:") else ("", *given.split(":"))
            if kind and len(ends) != 2:
                raise ConfigError(f"--space {word!r} has no two numbers: write {flag}={SPACE}.")
            if len(ends) == 1:
                found[fields[flag]] = search.choice([value(flag, one) for one in given.split(",")])
                continue
            try:
                low, high = map(float, ends)
            except ValueError:
                raise ConfigError(f"--space {word!r} has no two numbers: write {flag}={SPACE}.") from None
            is_whole = isinstance(value(flag, ends[0]) if not kind else low, int)
            make: Any = search.log_uniform if kind else search.integers if is_whole else search.uniform
            found[fields[flag]] = make(low, high)
        return found

    def searched(self, points: Any, budget: str | None) -> Points | Searcher:
        """The points or the searcher that the flags ask for, of ``points``, a searcher, or a space as a dict.

        With a ``budget`` of time a searcher may propose members until it ends.
        """
        from jaxnn import search

        is_space, ways = isinstance(points, dict), {"eta": self.eta} if self.eta is not None else {}
        endless = budget is not None and is_space and self.search in ("asha", "tpe", "optuna")
        num = UNTIL_THE_BUDGET_ENDS if endless and self.num is None else self.num
        if is_space and num is None and self.search != "pbt":
            raise ConfigError("--space draws members: say how many, as in --num 64; --budget says it for asha and tpe.")
        if not is_space and num is not None:
            raise ConfigError("--num counts draws of a --space, and there is none: leave it out.")
        if self.eta is not None and self.search not in ("halving", "asha"):
            raise ConfigError("--eta is of --search halving or asha: choose one of them, or leave it out.")
        compares = self.search in ("halving", "asha", "patience", "extrapolated")
        if self.propose is not None and not compares:
            raise ConfigError("--propose is of --search halving, asha, patience or extrapolated: choose one of them.")
        # A searcher that compares draws from a space itself, unless another one proposes.
        source = self.propose if compares else self.search or ("random" if is_space else None)
        if source is not None and not is_space:
            flag = f"--{'propose' if compares else 'search'} {source}"
            raise ConfigError(f"{flag} draws from a space: give one, as in --space learning_rate={SPACE}.")
        if source in ("random", "sobol"):
            points = getattr(search, source)(num, self.key, **points)
        elif source is not None:
            points = getattr(search, source)(points, num or 16, self.key)
        if not compares:
            return points  # type: ignore[no-any-return]
        make: Any = getattr(search, str(self.search))
        return make(points, num=num if source is None else None, key=self.key, **ways)  # type: ignore[no-any-return]
