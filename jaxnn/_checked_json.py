"""JSON from files that anybody may have written: what it has to hold, as data, and the check of each field."""

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


MOST = sys.float_info.max
MOST_DIGITS = sys.float_info.max_10_exp  # a whole number with as many digits is within the range of floats
COUNT, POSITIVE = Span("a whole number from 0", 0, 2**31 - 1), Span("a whole number from 1", 1, 2**31 - 1)
AMOUNT = Span("a number from 0", 0, MOST, whole=False)
FINITE, SEED = Span("a finite number", -MOST, MOST, whole=False), Span("a seed", 0, 2**32 - 1)
METRIC = Span("a number", -MOST, MOST, whole=False, names=NAMES)
# What a file holds, as data. A mapping has the fields that are named, and others that are not looked at; `name?` may be
# absent or null, and `*` are all others. A list of one kind has any number of it, a tuple one item of each kind, and a
# set has the allowed words.
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
