"""A decision: its pairs, the evidence after each of them, the verdict, and how it is shown."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxnn._statistics import Evidence, rank_evidence, t_evidence
from jaxnn._text import short_path
from jaxnn.decisions._ledger import DISCARD, EXIT_CODES, FILE, KEEP, NO_DIFFERENCE, UNDECIDED, Ledger, Verdict
from jaxnn.types import Direction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_GAIN = 1_000.0  # of pairing, that is shown
SKEWED = 3.0  # standard errors of the skewness of symmetric differences


class Pair(NamedTuple):
    """Two members with the same seed."""

    seed: int
    a: float  # the metric of A at the end of training
    b: float


@dataclasses.dataclass(frozen=True, repr=False)
class Decision:
    """Whether B is better than A, as `decide` returns it.

    Attributes:
        verdict: ``keep``, ``discard``, ``no difference`` or ``undecided``.
        why: why it is undecided; empty otherwise.
        metric: what was compared.
        better: ``"max"`` if more of it is better, or ``"min"``.
        names: what A and B are.
        pairs: the pairs with a result, by seed.
        lost: members of A and of B without a result, which diverged or failed.
        pairing: what members of a pair have in common.
        test: ``t`` or ``ranks``, which decided.
        alpha: the error rate that was asked for.
        level: the one of this decision, less in a session.
        min_effect: the smallest difference that matters, or None.
        session: its name, or None.
        number: the place of the decision among those of its session, or of no session, from 1.
        kept: how many of them have the verdict keep.
        errors: the most wrong verdicts that are expected among them: the sum of their levels.
        time: when it was made.
        key: identifies it in the ledger.
        folder: where members and ledger are; None if nothing was recorded.
        repeated: whether it was answered from the ledger.
    """

    verdict: Verdict
    why: str
    metric: str
    better: Direction
    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    lost: tuple[int, int]
    pairing: str
    test: Literal["t", "ranks"]
    alpha: float
    level: float
    min_effect: float | None
    session: str | None
    number: int
    kept: int
    errors: float
    time: str
    key: str
    folder: Path | None
    repeated: bool = True

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any], folder: Path, ledger: Ledger) -> Decision:
        """The decision of an entry of the ledger."""
        others = ledger.session(entry["session"])
        places = [one["key"] for one in others]
        number = 1 + (places.index(entry["key"]) if entry["key"] in places else len(places))
        known = [*others, *([entry] if entry["key"] not in places else [])]
        names = "why alpha level min_effect session time key test pairing verdict".split()
        return cls(
            **{name: entry[name] for name in names},
            metric=entry["measured"],
            better=entry["better"],
            names=tuple(entry["names"]),
            pairs=tuple(Pair(*pair) for pair in entry["pairs"]),
            lost=tuple(entry["lost"]),
            number=number,
            kept=sum(one["verdict"] == KEEP for one in others),
            errors=sum(one["level"] for one in known),
            folder=folder,
        )

    @property
    def exit_code(self) -> int:
        """0 keep, 1 discard, 2 no difference, 3 undecided."""
        return EXIT_CODES[self.verdict]

    @functools.cached_property
    def differences(self) -> np.ndarray:
        """B - A of each pair ``[pairs]``."""
        return np.array([pair.b - pair.a for pair in self.pairs])

    @property
    def difference(self) -> float:
        """The mean of B - A."""
        return float(self.differences.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the difference that held at all looks at once, at level 1 - `level`."""
        return float(self.evidence.low[-1]), float(self.evidence.high[-1])

    @functools.cached_property
    def evidence(self) -> Evidence:
        """The evidence against no difference after each pair, by `test`."""
        return self.evidence_by(self.test)

    def evidence_by(self, test: Literal["t", "ranks"]) -> Evidence:
        """The evidence after each pair by another test."""
        if test == "ranks":
            return rank_evidence(self.differences, self.level)
        return t_evidence(self.differences, self.level, max(max(abs(pair.a), abs(pair.b)) for pair in self.pairs))

    @property
    def pairing_gain(self) -> float:
        """The factor of seeds that unpaired runs would need: the variances of A and B by the variance of B - A."""
        if len(self.pairs) < 2:
            return math.nan
        a, b = (np.array([pair[side] for pair in self.pairs]) for side in (1, 2))
        return float((a.var(ddof=1) + b.var(ddof=1)) / max(self.differences.var(ddof=1), np.finfo(float).tiny))

    @property
    def skewness(self) -> float:
        """The skewness of the differences in standard errors of symmetric, normal ones; NaN for fewer than three."""
        values = self.differences - self.differences.mean()
        if (n := len(values)) < 3 or not (deviation := float(values.std())):
            return math.nan
        error = math.sqrt(6 * n * (n - 1) / ((n - 2) * (n + 1) * (n + 3)))
        return float((values**3).mean()) / deviation**3 / error

    def judged(self) -> tuple[Verdict, str]:
        """The verdict of the evidence, and why it is undecided although the evidence suffices, or an empty text."""
        low, high = self.interval
        if low > high:
            return UNDECIDED, "intervals of different looks exclude each other: the differences are not of one kind"
        small = self.min_effect or 0.0
        if -small <= low and high <= small and small:
            return NO_DIFFERENCE, ""
        if low <= 0 <= high:
            return UNDECIDED, ""
        is_better = (low > 0) == (self.better == "max")
        more = self.lost[1] - self.lost[0] if is_better else self.lost[0] - self.lost[1]
        if more > 0:
            name = "B" if is_better else "A"
            return UNDECIDED, f"{name} lost {more} more of its members, so that the pairs that are left flatter it"
        return (KEEP if is_better else DISCARD), ""

    def progress(self) -> str:
        """One line about what is known so far."""
        low, high = self.interval
        return (
            f"{len(self.pairs)} pairs, {self.metric} {self.difference:+.4g} ({low:+.4g} to {high:+.4g}), "
            f"highest evidence {_size(self.evidence.log.max())} of {1 / self.level:,.0f}"
        )

    def as_json(self) -> dict[str, Any]:
        """Its content, and the evidence after each pair."""
        about = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        low, high = self.interval
        about |= {
            "skewness": self.skewness,
            "difference": self.difference,
            "interval": [low, high],
            "pairing_gain": self.pairing_gain,
        }
        path = {name: values.tolist() for name, values in self.evidence._asdict().items()}
        return {**about, "pairs": [pair._asdict() for pair in self.pairs], "evidence": path}

    def __repr__(self) -> str:
        low, high = self.interval
        lines = [f"{self.verdict}: {self.why}"]
        if self.verdict == NO_DIFFERENCE:
            less = f": B is {'better' if (low > 0) == (self.better == 'max') else 'worse'}, by less"
            lines = [f"{self.verdict} above {self.min_effect}{less if low > 0 or high < 0 else ''}"]
        elif self.verdict != UNDECIDED:
            lines = [f"{self.verdict}: B is {'better' if self.verdict == KEEP else 'worse'}"]
        lines += [f"{name}  {text}" for name, text in zip("AB", self.names, strict=True)]
        a, b = (float(np.mean([pair[side] for pair in self.pairs])) for side in (1, 2))
        count = len(self.pairs)
        lines.append(f"{self.metric}: B {b:.4g} against A {a:.4g}, {count} pair{'s' * (count != 1)}.")
        share = f"{100 * (1 - self.level):.4g}"
        enough = f"highest evidence {_size(self.evidence.log.max())}, {1 / self.level:,.0f} needed"
        lines.append(
            f"Difference {self.difference:+.4g} ({share} % interval at any look {low:+.4g} to {high:+.4g}), {enough}."
        )
        gain = self.pairing_gain
        worth = f": worth {gain:.2g} times as many unpaired seeds" if 0.1 < gain < MOST_GAIN else ""
        lines.append(f"A pair has {self.pairing}{worth}.")
        other: Literal["t", "ranks"] = "ranks" if self.test == "t" else "t"
        beside = float(self.evidence_by(other).log.max())
        name = "By signs and ranks" if other == "ranks" else "By the t statistic"
        lines.append(f"{name} the evidence is {_size(beside)}.")
        if abs(self.skewness) > SKEWED:
            lines.append("The differences are skewed, and both tests are for symmetric ones: look at them in `pairs`.")
        if any(self.lost):
            lines.append(f"Left out: {self.lost[0]} members of A and {self.lost[1]} of B diverged or failed.")
        lines.append(self._about_others())
        return "\n".join(lines)

    def _about_others(self) -> str:
        if self.session is not None:
            return (
                f"Decision {self.number} of session {self.session!r}, {self.kept} kept: at most {100 * self.alpha:g} % "
                "of the kept ones are expected to be false (e-LOND)."
            )
        text, folder = f"Error rate {100 * self.alpha:g} %", self.folder and short_path(self.folder)
        text += f", answered from {folder}." if folder and self.repeated else "."
        if self.errors > self.level:
            text += f" All decisions in {folder} together: up to {self.errors:.2g} wrong ones; "
            text += "a session bounds their share."
        return text

    def plot(self) -> Figure:
        """Draws the evidence and the interval against the number of pairs."""
        from jaxnn.decisions._decision_figure import draw_decision

        return draw_decision(self)


def _size(log: float) -> str:
    """An e-value as text."""
    return f"{math.exp(log):.3g}" if log < 25 else f"1e{log / math.log(10):.0f}"


def read_decisions(folder: Path) -> list[Decision]:
    """Returns the decisions that are recorded in ``folder``, oldest first; of a repeated one the last."""
    ledger = Ledger.read(folder)
    return [Decision.of_entry(entry, folder, ledger) for entry in ledger.last()]


def has_decisions(folder: Path) -> bool:
    """Whether decisions are recorded in ``folder``."""
    return (folder / FILE).is_file()
