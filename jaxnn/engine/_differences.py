"""What differs between two recorded trainings, or between a training and its resumption."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxnn._fingerprints import PARTS, Difference, changed_implementations, changed_parts
from jaxnn._json import jsonable
from jaxnn.engine._options import RunOptions
from jaxnn.parallel import format_mesh

# Of the options that decide results, those that decide the numbers of training too.
_OF_TRAINING = ("deterministic", "order")
_MOST_SPANS = 3  # of rows that are named


class Described(NamedTuple):
    """What is recorded of a training."""

    config: Mapping[str, Any]  # its own
    facts: Mapping[str, Any]  # the content of ``record.json``
    group: Mapping[str, Any]  # of these, its group


def find_differences(a: Described, b: Described) -> list[Difference]:
    """Returns the differences of ``b`` from ``a``, the likeliest cause of other numbers first."""
    parts = (_config, _data, _program, _code, _options, _versions, _devices, _calls)
    return list(itertools.chain.from_iterable(part(a, b) for part in parts))


def changes_at_resume(before: Described, now: Described) -> list[str]:
    """Returns the differences that a resumed training has from the one ``before`` its interruption."""
    found = [one for one in find_differences(before, now) if one.part not in ("data", "code", "calls")]
    # Initial values were drawn before, and options that only decide when a training is reported may change.
    found = [one for one in found if one.text != PARTS["start"]]
    found = [one for one in found if one.part != "options" or one.text.startswith("stop ")]
    return [one.text for one in sorted(found, key=lambda one: one.part != "devices")]


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names whose values differ, and both values."""
    for name in dict.fromkeys([*a, *b]):
        if (old := a.get(name)) != (new := b.get(name)):
            yield name, f"{name} {old} → {new}"


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, jsonable(value)  # where NaN is equal to itself


def _config(a: Described, b: Described) -> Iterator[Difference]:
    changed = dict(_changed(dict(_leaves(a.config)), dict(_leaves(b.config))))
    for name in sorted(changed, key=lambda name: name == "num_steps"):  # which mostly changes the end alone
        yield Difference("config", changed[name])


def _data(a: Described, b: Described) -> Iterator[Difference]:
    prints = [one.group["fingerprint"].get("data") for one in (a, b)]
    if prints[0] == prints[1]:
        return
    before, now = a.group.get("arrays") or {}, b.group.get("arrays") or {}
    names, found = [name for name in before if name in now], False
    for name in names:
        if text := _rows_that_differ(before[name], now[name]):
            found = True
            yield Difference("data", f"{text} of {name}", decides=name.startswith("train/"))
    for name in [*(before.keys() ^ now.keys())] if before and now else []:
        found = True
        yield Difference("data", f"{name} is only in {'A' if name in before else 'B'}", name.startswith("train/"))
    if not found:
        where = "in a split that is not in memory" if before and now else "which of them is not recorded"
        yield Difference("data", f"the data, {where}")


def _rows_that_differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes which rows of an array differ, by its digests; empty: none."""
    if (rows := before["rows"]) != now["rows"] or before["block"] != now["block"]:
        return f"the number of rows, {before['rows']:,} → {now['rows']:,},"
    size, pairs = before["block"], zip(before["digests"].split(), now["digests"].split(), strict=False)
    blocks = [number for number, (one, other) in enumerate(pairs) if one != other]
    if not blocks:
        return ""
    if before["sum"] == now["sum"]:
        return "the order of the rows"
    # Blocks beside each other are named as one span.
    groups = itertools.groupby(enumerate(blocks), key=lambda one: one[1] - one[0])
    spans = [[number for _, number in group] for _, group in groups]
    ends = [(span[0] * size, min(rows, (span[-1] + 1) * size) - 1) for span in spans]
    named = ", ".join(f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in ends[:_MOST_SPANS])
    more = f" and {len(spans) - _MOST_SPANS} other places" if len(spans) > _MOST_SPANS else ""
    if size == 1:
        return f"{len(blocks):,} of {rows:,} rows ({named}{more})"
    return f"rows among {named}{more} ({len(blocks)} of {-(-rows // size)} blocks of {size:,} rows)"


def _program(a: Described, b: Described) -> Iterator[Difference]:
    # Another implementation is why the program is another.
    for text in changed_implementations(a.group.get("implementations") or {}, b.group.get("implementations") or {}):
        yield Difference("program", text)
    for text in changed_parts(a.group["fingerprint"], b.group["fingerprint"]):
        yield Difference("program", text, decides=text != PARTS["evaluation"])


def _code(a: Described, b: Described) -> Iterator[Difference]:
    commits = [str((one.facts.get("git") or {}).get("commit"))[:12] for one in (a, b)]
    if commits[0] != commits[1]:
        yield Difference("code", f"commit {commits[0]} → {commits[1]}")
    digests = [(one.facts.get("code") or {}).get("digest") for one in (a, b)]
    if None not in digests and digests[0] != digests[1]:
        yield Difference("code", "what is not committed")


def _options(a: Described, b: Described) -> Iterator[Difference]:
    before, now = (RunOptions.deciding(one.facts["options"]) | _order(one.facts["options"]) for one in (a, b))
    for name, text in _changed(before, now):
        yield Difference("options", text, decides=name in _OF_TRAINING)


def _order(options: Mapping[str, Any]) -> dict[str, Any]:
    """The order of a sweep's data; a run's is that of a member."""
    return {"order": options.get("order") or "member"}


def _versions(a: Described, b: Described) -> Iterator[Difference]:
    for _, text in _changed(a.facts["devices"]["versions"], b.facts["devices"]["versions"]):
        yield Difference("versions", text)
    for _, text in _changed(a.facts["jax_flags"], b.facts["jax_flags"]):
        yield Difference("flags", text)


def _devices(a: Described, b: Described) -> Iterator[Difference]:
    layouts = [_layout(one.group.get("layout")) for one in (a, b)]
    if None not in layouts and layouts[0] != layouts[1]:
        yield Difference("devices", f"the layout {layouts[0]} → {layouts[1]}")
    natives = [one.facts["devices"].get("native") for one in (a, b)]
    uses_native = ["native" in sum((one.group.get("implementations") or {}).values(), []) for one in (a, b)]
    if natives[0] != natives[1] and all(uses_native):
        yield Difference("devices", f"native kernels {natives[0]} → {natives[1]}")
    if (old := _device(a.facts)) != (new := _device(b.facts)):
        yield Difference("devices", f"the device {old} → {new}")


def _calls(a: Described, b: Described) -> Iterator[Difference]:
    """How steps and members are arranged in compiled programs, which may round in another way."""
    sizes = [(one.group.get("vmap") or {}).get("size") for one in (a, b)]
    if sizes[0] != sizes[1]:
        shown = ["a run alone" if size is None else f"{size} members" for size in sizes]
        yield Difference("calls", f"one program for {shown[0]} → {shown[1]}")
    steps = [one.group.get("steps_per_call") for one in (a, b)]
    if steps[0] != steps[1]:
        yield Difference("calls", f"steps_per_call {steps[0]} → {steps[1]}")


def _layout(layout: Mapping[str, Any] | None) -> str | None:
    if layout is None:
        return None
    return f"{layout['strategy']} {format_mesh(layout['mesh'])}" if layout["mesh"] else str(layout["strategy"])


def _device(facts: Mapping[str, Any]) -> str:
    """The kind of device that a process computed on; the platform if the record does not list its devices."""
    platform = facts["options"].get("device") or facts["devices"]["backend"]
    kinds = {device["kind"] for device in facts["devices"]["devices"] if device["platform"] == platform}
    return ", ".join(sorted(kinds)) or platform
