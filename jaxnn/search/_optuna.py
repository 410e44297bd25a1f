"""Optuna's samplers as a searcher: TPE, Gaussian processes, CMA-ES, and a user's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxnn.search._distributions import Distribution, check_space, described_space
from jaxnn.search._searchers import Propose, Reached, Searcher, Verdict
from jaxnn.types import ConfigError, check_int


class _Study(NamedTuple):
    """The state: Optuna's study, which remembers trials by itself, and what identifies them here."""

    study: Any
    trials: tuple[Any, ...] = ()  # of each member


def optuna(space: Mapping[str, Any], num: int, key: int = 0, *, sampler: Any = None) -> Searcher:
    """Returns a search whose next points Optuna chooses from the results so far.

    Members that are in training are pending trials, so that many can be asked for at once. A member that pauses, as
    under `asha`, counts with the value it has; a promoted one with both. A resumed search asks and tells a new study
    the same again, which needs a sampler of equal draws: one with a seed.

    >>> space = {"learning_rate": jn.search.log_uniform(1e-4, 1e-1), "depth": jn.search.integers(1, 4)}
    >>> searcher = jn.search.asha(jn.search.optuna(space, num=64))

    Args:
        space: by field a distribution, or a function of the fields that are drawn before, a dict, to a distribution or
            a value.
        num: the number of members.
        key: the seed of the default sampler.
        sampler: a function ``key -> optuna.samplers.BaseSampler``; default: TPE for several fields together, with
            pending trials taken for bad ones (``multivariate``, ``group``, ``constant_liar``).

    Raises:
        ConfigError: Optuna is not installed, ``num`` or ``key`` is not as above, or a field is a list.
    """
    try:
        import optuna as library
    except ImportError as error:
        raise ConfigError('search.optuna needs Optuna, which is not installed: pip install "jaxnn[optuna]".') from error
    check_int("optuna: num", num)
    check_int("optuna: key", key, 0, 2**32 - 1)
    if sampler is not None and not callable(sampler):
        raise ConfigError(f"optuna: sampler is {sampler!r:.40}, and must be a function of the key to Optuna's sampler.")
    scales = check_space("optuna", space)
    library.logging.set_verbosity(library.logging.WARNING)

    def init() -> _Study:
        if sampler is not None:
            made = sampler(key)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", library.exceptions.ExperimentalWarning)
                made = library.samplers.TPESampler(seed=key, multivariate=True, group=True, constant_liar=True)
        return _Study(library.create_study(sampler=made))

    def drawn(trial: Any) -> dict[str, Any]:
        point: dict[str, Any] = {}
        for name, axis in sorted(space.items(), key=lambda one: callable(one[1])):
            found = axis(dict(point)) if callable(axis) else axis
            point[name] = _suggest(trial, name, found) if isinstance(found, Distribution) else found
        return {name: point[name] for name in space}

    def ask(state: _Study, count: int) -> tuple[_Study, list[Propose]]:
        new = [state.study.ask() for _ in range(min(count, num - len(state.trials)))]
        points = [drawn(trial) for trial in new]
        return state._replace(trials=(*state.trials, *new)), list(map(Propose, points))

    def tell(state: _Study, reports: Sequence[Reached]) -> tuple[_Study, list[Verdict]]:
        kinds = library.trial.TrialState
        known = state.study.get_trials(deepcopy=False)
        for report in reports:
            trial = state.trials[report.member]
            kind = kinds.PRUNED if report.share < 1 and not report.over else kinds.COMPLETE
            if not math.isfinite(report.value):
                kind = kinds.FAIL
            value = report.value if kind is not kinds.FAIL else None
            seen = known[trial.number]
            if seen.state is kinds.RUNNING:
                if kind is kinds.PRUNED:
                    trial.report(value, step=round(1000 * report.share))
                state.study.tell(trial, value if kind is kinds.COMPLETE else None, state=kind)
            elif value is not None:
                again = {"params": seen.params, "distributions": seen.distributions}
                state.study.add_trial(library.trial.create_trial(state=kinds.COMPLETE, value=value, **again))
        return state, ["continue"] * len(reports)

    settings = {
        "num": num,
        "key": key,
        "space": described_space(space),
        "sampler": getattr(sampler, "__qualname__", None),
    }
    return Searcher("optuna", init, ask, tell, scales=scales, num=num, settings=settings, learns=True)


def _suggest(trial: Any, name: str, axis: Distribution) -> Any:
    if axis.kind == "integers":
        return trial.suggest_int(name, int(axis.low), int(axis.high))
    if axis.kind == "choice":
        # Optuna's own values are plain ones; others are chosen by their place.
        return axis.values[trial.suggest_categorical(name, range(len(axis.values)))]
    return trial.suggest_float(name, axis.low, axis.high, log=axis.kind == "log_uniform")
