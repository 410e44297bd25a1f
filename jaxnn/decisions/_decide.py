"""``jn.decide``: whether one experiment is better than another, with as many seeds as it takes."""

from __future__ import annotations

import dataclasses
import datetime
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxnn._disk import make_room
from jaxnn._fields import check_config, option, with_changes, with_fields
from jaxnn._fingerprints import text_fingerprint
from jaxnn._json import json_line, leaf_fields
from jaxnn._provenance import file_name_of, file_names_of
from jaxnn._text import say_error, short_path
from jaxnn.decisions._decision import Decision, Pair
from jaxnn.decisions._ledger import UNDECIDED, Ledger
from jaxnn.decisions._sides import Side
from jaxnn.sweeps import SweepOptions, show_field
from jaxnn.tasks import check_direction
from jaxnn.types import ConfigError, Experiment, TrainingError

BLOCK, GROWTH = 8, 1.5  # pairs of the first look, which divides the later ones, and the growth to the next
_ASKED = ("metric", "alpha", "min_effect", "test", "session", "direction")  # options that make another decision
_OWN = ("resume", "plan_only", "shard", "lanes", "member", "name")  # options of a sweep that a decision sets


class DecisionInterrupted(TrainingError):
    """A decision was interrupted; it continues when it is asked again."""


@dataclasses.dataclass(frozen=True)
class DecideOptions(SweepOptions):
    """Options of `decide`, besides those of a sweep; flags of every script's ``decide`` command.

    >>> DecideOptions(alpha=0.01, max_seeds=128).alpha
    0.01
    """

    budget: str | None = option()
    """Time after which no further pairs are trained, such as "10 min"; default: as long as it takes."""
    metric: str | None = None
    """What is compared: the value at the end of training; default: the monitored one, such as test_loss."""
    alpha: float = option(0.05, most=0.5, positive=True)
    """The error rate: of a decision, or the share of false discoveries in a session."""
    min_effect: float | None = option(positive=True)
    """The smallest difference that matters: allows the verdict that there is none; default: any matters."""
    max_seeds: int = option(64, least=2)
    """The most pairs that are trained."""
    max_steps: int | None = option(least=2)
    """The most steps that the pairs may take together; default: as many as max_seeds have."""
    test: Literal["t", "ranks"] = option("t", choices=("t", "ranks"))
    """t: of the mean difference, for metrics without outliers; ranks: of its centre, for any distribution."""
    direction: Literal["auto", "min", "max"] = option("auto", choices=("auto", "min", "max"))
    """Whether less or more of the metric is better; auto: as the task states it, or as its name is known."""
    session: str | None = None
    """Name of a series of decisions whose share of false discoveries is held at alpha; default: each is on its own."""
    both: tuple[str, ...] = ()
    """Fields of both sides in the shell, such as num_steps=500."""
    json: bool = option(False, choices=(True, False))
    """Print JSON in the shell."""
    picture: Path | None = None
    """File for a picture in the shell, such as decision.png: evidence and interval against pairs."""

    def __post_init__(self) -> None:
        if given := [name for name in _OWN if getattr(self, name) != getattr(SweepOptions, name)]:
            raise ConfigError(f"{given[0]} is no option of decide, which names and continues its sweeps itself.")
        if self.session is not None and not (self.record and self.session):
            raise ConfigError("a session needs a name and its record: what was decided before is read from there.")
        super().__post_init__()


def decide(
    a: Experiment[Any],
    b: Experiment[Any] | Mapping[str, Any],
    metric: str | None = None,
    options: DecideOptions | None = None,
    **changes: Any,
) -> Decision:
    """Decides whether ``b`` is better than ``a``, by pairs of members with equal seeds, as many as it takes.

    Pairs are trained in growing blocks, each side's as one population. After each block the evidence of their
    differences is looked at, which stays valid at every look: without a difference the verdict is keep or discard with
    a probability of at most ``alpha``, whenever training stops. Verdicts:

    | verdict | the interval of the difference of B, at level 1 - ``alpha`` |
    |---|---|
    | ``keep`` | is on the better side of 0 |
    | ``discard`` | is on the worse side of 0 |
    | ``no difference`` | lies within ± ``min_effect`` |
    | ``undecided`` | holds 0 when seeds, steps or time end |

    Decisions and members are recorded in ``runs/NAME/decisions``, or ``run_dir``. A decision that was made is answered
    from there, an interrupted or undecided one continues, and members of the baseline serve all its candidates.

    Evidence is an e-value: by t the one of Pérez-Ortiz, Lardy, de Heide and Grünwald 2024, "E-statistics, group
    invariance and anytime-valid testing", for differences without strong skew; by ranks one of Vovk and Wang 2024,
    "Nonparametric e-tests of symmetry", for symmetric differences, which two equal experiments always have. A session
    is judged by e-LOND of Xu and Ramdas 2024, "Online multiple testing with e-values".

    Args:
        a: the baseline.
        b: the candidate, an experiment, or fields of the config of ``a`` with other values, ``{"dropout": 0.1}``.
        metric: what is compared, at the end of training; default: the monitored one.
        options: see `jaxnn.decisions.DecideOptions`.
        **changes: single options, such as ``max_seeds=128`` or ``session="augmentation"``.

    Raises:
        ConfigError: A and B compute the same, or the metric or its direction is unknown.
        DecisionInterrupted: a signal ended it; it continues when it is asked again.
        TrainingError: all members of a side diverged.

    >>> jn.decide(experiment, {"learning_rate": 0.001}, max_seeds=8, record=False)
    discard: B is worse
    ...
    """
    for name, side in (("a", a), ("b", b)):
        if not isinstance(side, Experiment) and (name == "a" or not isinstance(side, Mapping)):
            wanted = "an experiment" if name == "a" else "an experiment, or a mapping of config fields"
            raise ConfigError(f"{name} is {side!r:.60}, and must be {wanted}.")
    other = b if isinstance(b, Experiment) else _changed(a, b)
    changes |= {} if metric is None else {"metric": metric}
    options = with_changes(options or DecideOptions(), changes, a.config)
    check_config(a.config)
    if a.config.seed + options.max_seeds > 2**32:
        raise ConfigError(f"seeds from {a.config.seed} on are {options.max_seeds}, and must be below 2**32.")
    if not options.record:
        with tempfile.TemporaryDirectory(prefix="jaxnn-decide-") as temporary:
            return dataclasses.replace(_decided(a, other, options, Path(temporary)), folder=None)
    folder = Path(options.run_dir or f"runs/{file_name_of(a) or 'notebook'}/decisions").absolute()
    return _decided(a, other, options, folder)


def _changed(a: Experiment[Any], fields: Mapping[str, Any]) -> Experiment[Any]:
    """The experiment with other values of fields, whose names may be dotted."""
    known = {name for name, _ in leaf_fields(a.config)}
    plain = {name: value for name, value in fields.items() if name not in known}
    config = with_fields(a.config, {name: value for name, value in fields.items() if name in known})
    return dataclasses.replace(a, config=config).replace(**plain)


def _decided(a: Experiment[Any], b: Experiment[Any], options: DecideOptions, folder: Path) -> Decision:
    sides, most, first = _sides(a, b, options, folder), _most_pairs(a, b, options), a.config.seed
    make_room(folder)  # not for a question that is refused
    asked = {name: getattr(options, name) for name in _ASKED}
    key = text_fingerprint(json_line({"sides": [side.key for side in sides], "first": first, **asked}))[:16]
    ledger = Ledger.read(folder)
    known = ledger.find(key)
    if known is not None and (known["verdict"] != UNDECIDED or len(known["pairs"]) >= most):
        return Decision.of_entry(known, folder, ledger)
    level = ledger.level(options.session, key, options.alpha)
    entry: dict[str, Any] = {"key": key, "level": level, **asked, "names": _names(a, b, options.both)}
    entry["pairing"] = _pairing(*sides)
    for count in _looks(most):
        seeds = range(first, first + count)
        if _exceeds(sides, seeds, options.budget_seconds):
            entry["why"] = entry["why"] or f"the budget of {options.budget} ended"
            break
        if not all(side.train(seeds) for side in sides):
            again = f"ask again to continue it from {short_path(folder)}" if options.record else "nothing was recorded"
            raise DecisionInterrupted(f"the decision was interrupted: {again}.")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry |= {**_measured(sides, seeds, options), "verdict": UNDECIDED, "why": "", "time": now}
        found = Decision.of_entry(entry, folder, ledger)
        entry["verdict"], entry["why"] = found.judged()
        if options.progress != "none":
            say_error(f"decide: {found.progress()}")
        if entry["verdict"] != UNDECIDED:
            break
    else:
        entry["why"] = entry["why"] or f"{most} pairs were trained"
    ledger.add(entry)
    return dataclasses.replace(Decision.of_entry(entry, folder, Ledger.read(folder)), repeated=False)


def _sides(a: Experiment[Any], b: Experiment[Any], options: DecideOptions, folder: Path) -> tuple[Side, Side]:
    """A and B with the members that are recorded of them; ConfigError if they are the same."""
    names = {field.name for field in dataclasses.fields(SweepOptions)} - {"run_dir", "budget", *_OWN}
    given = {name: value for name, value in options.explicit().items() if name in names}
    if not given.keys() & {"eval_every", "patience", "stop"}:
        given["eval_every"] = 0  # what is compared is the value at the end
    how = with_changes(SweepOptions(), {**given, "record": True, "progress": "none"})
    left, right = (Side(one, how, folder, options.metric) for one in (a, b))
    if left.key == right.key:
        raise ConfigError("A and B are the same: their configs, data and programs are equal.")
    return left, right


def _most_pairs(a: Experiment[Any], b: Experiment[Any], options: DecideOptions) -> int:
    """The number of pairs that seeds and steps allow."""
    if options.max_steps is None:
        return options.max_seeds
    most: int = options.max_steps // (a.config.num_steps + b.config.num_steps)
    if most < 2:
        raise ConfigError(f"max_steps is {options.max_steps:,}, which is less than two pairs take: give more.")
    return min(options.max_seeds, most)


def _exceeds(sides: Sequence[Side], seeds: Sequence[int], budget: float) -> bool:
    """Whether the members of ``seeds`` that are missing would take longer than is left of ``budget`` seconds."""
    missing = sum(len(side.missing(seeds)) for side in sides)
    trained, seconds = sum(side.trained for side in sides), sum(side.seconds for side in sides)
    return trained > 0 and missing > 0 and seconds * (1 + missing / trained) > budget


def _looks(most: int) -> list[int]:
    """The numbers of pairs at which the evidence is looked at: 8, 16, 24, 32, 48, 72 and so on.

    The first four blocks have one size: a population of another is compiled again, which may take longer than it.
    """
    counts, count = list[int](), BLOCK
    while count < most:
        counts.append(count)
        count = max(count + BLOCK, int(count * GROWTH) // BLOCK * BLOCK)
    return [*counts, most]


def _measured(sides: Sequence[Side], seeds: Sequence[int], options: DecideOptions) -> dict[str, Any]:
    """The pairs of ``seeds`` and those that were lost, the metric and its direction."""
    one = sides[0].sweep
    assert one is not None
    metric, (left, right) = options.metric or one.monitor, (side.members for side in sides)
    known = one.direction(metric) if options.direction == "auto" else options.direction
    direction = check_direction(metric, known, "direction")
    pairs, lost = list[Pair](), [0, 0]
    for seed in seeds:
        members = left[seed], right[seed]
        a, b = (one.final.get(metric, math.nan) if one.complete else math.nan for one in members)
        lost = [lost[0] + (not math.isfinite(a)), lost[1] + (not math.isfinite(b))]
        pairs += [Pair(seed, a, b)] if math.isfinite(a) and math.isfinite(b) else []
    if not pairs:
        raise TrainingError(
            f"no pair has a result in {metric}: of {len(seeds)} members A lost {lost[0]} and B {lost[1]}, which "
            "diverged or failed: train one alone to see why."
        )
    return {"measured": metric, "better": direction, "pairs": pairs, "lost": lost}


def _names(a: Experiment[Any], b: Experiment[Any], both: Sequence[str]) -> list[str]:
    """What A and B are: their files, the fields in which B differs, and the words of ``both`` for other fields."""
    pairs = [*zip(file_names_of(a), file_names_of(b), strict=True)]
    # Those of the config classes, or of functions if B, in another file, imports the class of A.
    files = [name or "experiment" for name in next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])]
    left, right = (dict(_flat(one.config)) for one in (a, b))
    changed = [name for name in left if left[name] != right.get(name) and name != "seed"]
    ends = [name.rpartition(".")[2] for name in changed]
    words = [word for word in both if word.partition("=")[0].rpartition(".")[2].replace("-", "_") not in ends]
    common = f", with {' '.join(words)}" if words else ""
    if left.keys() != right.keys():
        return [file + common for file in files]
    names = []
    for file, values in zip(files, (left, right), strict=True):
        text = ", ".join(f"{name} {show_field(values[name])}" for name in changed)
        names.append((text if text and files[0] == files[1] else f"{file} {text}".strip()) + common)
    return names


def _flat(config: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(owner, name.rpartition(".")[2])) for name, owner in leaf_fields(config)]


def _pairing(a: Side, b: Side) -> str:
    """What members of a pair have in common."""
    if a.prints["start"] == b.prints["start"]:
        start = "the same initial parameters"
    elif a.shapes == b.shapes:
        start = "initial parameters of the same shapes from the same seed"
    else:
        start = "initial parameters of other shapes"
    if a.prints["data"] != b.prints["data"]:
        return f"{start}, and other data"
    return f"{start} and {'the same batches' if a.prints['batches'] == b.prints['batches'] else 'other batches'}"
