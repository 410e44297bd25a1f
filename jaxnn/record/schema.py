"""What ``run.json``, ``sweep.json`` and a line of ``members.jsonl`` hold: by key, its types and the least it may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, NamedTuple


class Fact(NamedTuple):
    """What a key holds.

    Attributes:
        types: those of JSON's types that it may have.
        least: the least that a number may be.
        most: the most that a number may be.
        needed: whether it must be there, if what it is in is; ``needed`` of a file's reader says so of the file's own.
    """

    types: tuple[type, ...]
    least: float | None = None
    most: float = 2**31 - 1
    needed: bool = True


MISSING = object()
TEXT, MAPPING, LIST = Fact((str,)), Fact((dict,)), Fact((list,))
OPTION = Fact((str, NoneType), needed=False)
STEP = Fact((int,), least=0)
MAYBE = Fact((dict, NoneType))
NUMBER = Fact((int, float, NoneType), least=0, most=float("inf"), needed=False)
# NaN and infinities have names.
METRIC = Fact((int, float))
# Keys in order, what holds others first; [] stands for each value of a list or a mapping.
RUN = {
    "name": TEXT,
    "status": TEXT,
    "started": TEXT,
    "config": MAPPING,
    "options": MAPPING,
    "options.monitor": TEXT,
    "options.monitor_mode": TEXT,
    "options.mesh": OPTION,
    "options.device": OPTION,
    "options.devices": Fact((int, str, NoneType), least=1, needed=False),
    "steps_per_call": Fact((int,), least=1),
    "seconds_per_step_measured": MAPPING,
    "fingerprint": MAPPING,
    "fingerprint.program": TEXT,
    "fingerprint.data": TEXT,
    "layout": MAPPING,
    "layout.strategy": TEXT,
    "layout.mesh": MAYBE,
    "devices": MAPPING,
    "devices.backend": Fact((str,), needed=False),
    "devices.devices": LIST,
    "devices.devices.[]": MAPPING,
    "devices.devices.[].kind": TEXT,
    "devices.devices.[].platform": Fact((str,), needed=False),
    "devices.versions": MAPPING,
    "jax_flags": MAPPING,
    "resumed": LIST,
    "resumed.[]": MAPPING,
    "resumed.[].step": STEP,
    "checkpoints": LIST,
    "checkpoints.[]": STEP,
    "summary": MAYBE,
    "summary.throughput": Fact((dict, NoneType), needed=False),
    "summary.throughput.steps_per_second": NUMBER,
}
SWEEP = {
    "name": TEXT,
    "status": TEXT,
    "started": TEXT,
    "config": MAPPING,
    "options": MAPPING,
    "options.monitor": Fact((str,), needed=False),
    "options.shard": OPTION,
    "options.mesh": OPTION,
    "options.devices": Fact((int, str, NoneType), least=1, needed=False),
    "axes": LIST,
    "axes.[]": MAPPING,
    "axes.[].name": TEXT,
    "axes.[].values": LIST,
    "axes.[].scale": TEXT,
    "points": LIST,
    "points.[]": MAPPING,
    "halving": MAYBE,
    "halving.eta": Fact((int,), least=2),
    "halving.min_fraction": Fact((int, float), least=0, most=1),
    "numbers": Fact((list, NoneType)),
    "numbers.[]": STEP,
    "groups": LIST,
    "groups.[]": MAPPING,
    "groups.[].members": LIST,
    "groups.[].members.[]": STEP,
    "groups.[].width": Fact((dict, NoneType), needed=False),
    "groups.[].width.width": Fact((int,), least=1),
    "groups.[].width.trials": LIST,
    "groups.[].width.trials.[]": MAPPING,
    "groups.[].fingerprint": Fact((dict,), needed=False),
    "groups.[].fingerprint.data": TEXT,
    "groups.[].log": Fact((dict,), needed=False),
    "groups.[].log.lines": STEP,
    "groups.[].log.sha256": TEXT,
    "monitor": TEXT,
    "higher_is_better": Fact((bool,)),
    "damaged": LIST,
    "summary": MAYBE,
    "summary.member_steps_per_second": NUMBER,
    "summary.member_steps": NUMBER,
    "summary.seconds": NUMBER,
    "summary.num_compilations": NUMBER,
    "summary.spent": Fact((dict,), needed=False),
    "summary.spent.train": NUMBER,
}
MEMBER = {
    "member": STEP,
    "point": MAPPING,
    "config": MAPPING,
    "status": TEXT,
    "step": STEP,
    "final": MAPPING,
    "final.[]": METRIC,
    "best": MAPPING,
    "best.[]": METRIC,
    "error": Fact((str, NoneType), needed=False),
    "dir": Fact((str, NoneType), needed=False),
}
WORDS = {str: "text", dict: "a mapping", list: "a list", int: "a whole number", float: "a number", NoneType: "null"}


def check_facts(facts: Any, schema: Mapping[str, Fact], needed: tuple[str, ...]) -> dict[str, Any]:
    """The same facts, once all that is needed is there and what is there is of its type.

    Args:
        facts: what was read of JSON.
        schema: the types.
        needed: the keys of ``facts`` itself that must be there.

    Raises:
        ValueError: something is not; it is named with what it is and must be.
    """
    if not isinstance(facts, dict):
        raise ValueError(f"it is {_brief(facts)} and must be a mapping")
    for key, fact in schema.items():
        head, *rest = key.split(".")
        for where, value in _found(facts, [head, *rest], ""):
            if value is MISSING:
                if head in needed if not rest else fact.needed and head in facts:
                    raise ValueError(f"it lacks {where!r}")
            elif not _fits(value, fact):
                words = " or ".join(WORDS.get(kind, kind.__name__) for kind in fact.types)
                bounds = f", {fact.least} to {fact.most}" if fact.least is not None else ""
                raise ValueError(f"its {where} is {_brief(value)} and must be {words}{bounds}")
    return facts


def _found(value: Any, keys: list[str], where: str) -> Iterator[tuple[str, Any]]:
    """Each value at ``keys``, with its place; none below null, which holds nothing."""
    if not keys:
        yield where, value
        return
    head, *rest = keys
    if head == "[]":
        for index, item in value.items() if isinstance(value, dict) else enumerate(value or ()):
            yield from _found(item, rest, f"{where}[{index}]")
    elif value is not None and value is not MISSING:
        place = f"{where}.{head}" if where else head
        if head in value:
            yield from _found(value[head], rest, place)
        elif not rest:
            yield place, MISSING


def _fits(value: Any, fact: Fact) -> bool:
    if fact is METRIC and value in ("nan", "inf", "-inf"):
        return True
    if not isinstance(value, fact.types) or (isinstance(value, bool) and bool not in fact.types):
        return False
    counts = isinstance(value, int | float) and fact.least is not None
    return not counts or fact.least <= value <= fact.most  # type: ignore[operator]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
