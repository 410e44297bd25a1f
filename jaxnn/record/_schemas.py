"""What the files of a record hold, as data, and the check of each of their fields."""

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxnn._json import NAMES


class Span(NamedTuple):
    """A number of a record: how errors call it, and its range."""

    what: str
    least: float
    most: float
    whole: bool = True
    names: tuple[str, ...] = ()  # words that are allowed too

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is such a number."""
        if isinstance(value, str):
            return value in self.names
        return type(value) in ((int,) if self.whole else (int, float)) and self.least <= value <= self.most


FORMAT = "jaxnn record 2"  # version 1 had other files for a run and for a sweep
MOST = sys.float_info.max
MOST_DIGITS = sys.float_info.max_10_exp  # a whole number with as many digits is within the range of floats
COUNT, POSITIVE = Span("a whole number from 0", 0, 2**31 - 1), Span("a whole number from 1", 1, 2**31 - 1)
AMOUNT = Span("a number from 0", 0, MOST, whole=False)
METRIC = Span("a number", -MOST, MOST, whole=False, names=NAMES)

# What a file holds, as data. A mapping has the fields that are named, and others that are not looked at; `name?` may be
# absent or null, and `*` are all others. A list of one kind has any number of it, a tuple one item of each kind, and a
# set has the allowed words.
DIRECTIONS = {"*": {"min", "max"}}
DEVICES = {"backend": str, "devices": [{"platform": str, "kind": str}], "versions": dict}
OPTIONS = {"device?": str, "strategy?": str, "mesh?": str, "stop?": str, "writers?": [str], "probes?": [str]}
OPTIONS |= {"monitor?": str, "order?": str, "shard?": str, "checkpoint_every?": COUNT}
OPTIONS["devices?"] = Span("a whole number from 1, or all", 1, 2**31 - 1, names=("all",))
FINGERPRINT = {"data?": str, "start?": str, "program?": str, "batches?": str, "evaluation?": str}
ARRAYS = {"*": {"rows": COUNT, "block": POSITIVE, "sum": str, "digests": str}}
STALLS = [{"where": str, "step": COUNT, "seconds": AMOUNT}]
SUMMARY = {
    **{"seconds?": {"*": AMOUNT}, "stalls?": STALLS, "members?": {"*": COUNT}, "num_compilations?": COUNT},
    **{"member_steps?": AMOUNT, "member_steps_per_second?": AMOUNT, "examples_per_second?": AMOUNT},
    "lanes_in_use?": AMOUNT,
    **{"throughput?": {"steps_per_second": AMOUNT, "spread": AMOUNT, "num_windows": COUNT}, "compiler?": [str]},
    **{"first_step_seconds?": {"*": AMOUNT}, "compilations?": {"*": AMOUNT}, "peak_bytes?": (AMOUNT, str)},
}
# Members that share one program; what it was opened with is absent before.
GROUP = {
    **{"members": [COUNT], "static": dict, "traced": [str], "closed?": bool, "steps_per_call?": POSITIVE},
    **{"seconds_per_step_measured?": dict, "fingerprint?": FINGERPRINT, "checkpoints?": [COUNT], "examples?": dict},
    **{
        "arrays?": ARRAYS,
        "implementations?": {"*": [str]},
        "precision?": dict,
        "layout?": {"strategy": str, "mesh?": {"*": POSITIVE}},
    },
    "vmap?": {
        **{"size": POSITIVE, "steps_per_call": POSITIVE, "block": POSITIVE, "note?": str},
        "trials": [{"size": POSITIVE, "seconds": AMOUNT, "per_second": AMOUNT, "temporary_bytes": AMOUNT}],
    },
}
CODE = {"digest": str, "bytes": COUNT, "cut": bool}
RECORD = {
    **{"format": {FORMAT}, "name": str, "status": str, "started": str, "config": dict, "options": OPTIONS},
    **{"monitored": str, "higher_is_better": bool, "directions": DIRECTIONS, "data?": str, "command?": [str]},
    **{"devices": DEVICES, "jax_flags": dict, "git?": dict, "code?": CODE, "groups": [GROUP], "summary?": SUMMARY},
    **{"axes": [{"name": str, "values": list, "scale": {"log", "linear", "nominal"}}], "points": [dict]},
    **{"search?": {"name": str}, "origin?": {"member": COUNT, "num_steps": POSITIVE}},
    "resumed?": [{"step": COUNT, "changed": [str], "damaged": [str], "before": dict}],
}
MEMBER = {
    **{"member": COUNT, "point": dict, "config": dict, "status": str, "step": COUNT, "final": {"*": METRIC}},
    **{"best": {"*": METRIC}, "error?": str},
}
LINE = {"step": COUNT, "member": COUNT, "digest?": str, "*": METRIC}
# The checkpoint.json of a checkpoint, and the writers.json beside it: by writer and member.
CHECKPOINT: dict[str, Any] = {"step": COUNT, "metrics": {"*": METRIC}, "log?": {"lines": COUNT, "sha256": str}}
# Of a search: the number of its events, the members in the rows of each group, in lanes, and by their status.
SEARCHED: dict[str, Any] = {"events": COUNT, "members": {"*": [COUNT]}, "by_status": {"*": [COUNT]}}
SEARCHED["steps"] = {"*": COUNT}
SEARCHED["lanes"] = {"*": [Span("a whole number from -1", -1, 2**31 - 1)]}
CHECKPOINT["search?"] = SEARCHED
IDS = {"*": {"*": {"id": str, "sent": COUNT}}}
SHOWN: Mapping[Any, str] = {str: "text", bool: "true or false", dict: "a mapping", list: "a list"}


def check(value: Any, kind: Any, name: str = "") -> None:
    """Raises ValueError unless ``value``, the field ``name`` of a file, is of ``kind``: a type, `Span` or table."""
    base: Any = next((one for one in (list, dict, tuple) if type(kind) is one), kind)
    if base is tuple:
        right, shown = isinstance(value, list) and len(value) == len(kind), f"a list of {len(kind)}"
    elif isinstance(base, Span):
        right, shown = base.holds(value), base.what
    elif isinstance(base, set):
        right, shown = isinstance(value, str) and value in base, " or ".join(sorted(base))
    else:
        right, shown = type(value) is base, SHOWN[base]
    if not right:
        raise ValueError(f"{f'its {name}' if name else 'it'} is {value!r:.60} and must be {shown}")
    if base in (list, tuple) and kind is not base:
        for number, item in enumerate(value):
            check(item, kind[0 if base is list else number], f"{name}[{number}]")
    for key, part in kind.items() if isinstance(kind, dict) else ():
        field = key.removesuffix("?")
        if key == "*":
            others = {name: value[name] for name in value if name not in kind and f"{name}?" not in kind}
            for field in others if not (isinstance(part, Span) and all(map(part.holds, others.values()))) else ():
                check(value[field], part, f"{name}.{field}".lstrip("."))
        elif field in value and not (value[field] is None and key != field):
            check(value[field], part, f"{name}.{field}".lstrip("."))
        elif key == field:
            raise ValueError(f"it lacks {f'{name}.{field}'.lstrip('.')!r}")


def parse(content: bytes, kind: Any) -> Any:
    """The value of JSON ``content``; raises ValueError if it is none, or not of ``kind``."""
    try:
        value = _DECODER.decode(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    check(value, kind)
    return value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)  # json.loads makes one for each line
