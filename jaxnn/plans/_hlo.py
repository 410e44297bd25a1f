"""What a compiled program does, read from its optimized HLO: memory traffic, kernels and collectives."""

from __future__ import annotations

import collections
import math
import re
from typing import NamedTuple

_BYTES = {
    "pred": 1,
    "s4": 0.5,
    "u4": 0.5,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f64": 8,
    "s64": 8,
}
_BYTES |= {"u64": 8, "c64": 8, "c128": 16}
_ARRAY = re.compile(r"\b([a-z]+\d*)[a-z0-9]*\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
# These move no data, or only name it.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
_FREE |= {"opt-barrier", "add-dependency"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Work(NamedTuple):
    """What a program does each time that it runs, on each device."""

    bytes: float  # read and written by kernels, at least: caches of a kernel are not counted
    launches: float  # of kernels and of calls to libraries, which may launch several
    calls: dict[str, float]  # to libraries, by target
    collectives: dict[str, tuple[float, float]]  # number and bytes of results, by kind

    def plus(self, other: Work, times: float = 1) -> Work:
        """This work and ``times`` that of ``other``."""
        calls = collections.Counter(self.calls)
        for name, count in other.calls.items():
            calls[name] += count * times  # type: ignore[assignment]
        collectives = dict(self.collectives)
        for kind, (count, size) in other.collectives.items():
            before = collectives.get(kind, (0.0, 0.0))
            collectives[kind] = before[0] + count * times, before[1] + size * times
        return Work(self.bytes + other.bytes * times, self.launches + other.launches * times, dict(calls), collectives)


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str  # operands and attributes as text


def work_of(hlo: str) -> Work:
    """Reads the text of an optimized HLO module. Loops count as often as they run, if XLA knows; otherwise once."""
    computations = _computations(hlo)
    entry = next((name for name in computations if name.startswith("ENTRY ")), None)
    return Work(0, 0, {}, {}) if entry is None else _work(computations[entry], computations)


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    for line in hlo.splitlines():
        if header := re.match(r"^(ENTRY )?%(\S+) .*\{$", line):
            body = found.setdefault(f"{header[1] or ''}{header[2]}", [])
        elif match := _INSTRUCTION.match(line):
            name, shape, opcode, rest = match.groups()
            operands = rest[: _closing(rest)]
            body.append(_Instruction(name, shape, opcode, _NAME.findall(operands), rest))
    return found


def _closing(text: str) -> int:
    """The index of the parenthesis that closes an instruction's operands."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return index
    return len(text)


def size_of(shape: str) -> float:
    """The bytes of an HLO shape such as ``f32[8,64]{1,0}``, or of all arrays of a tuple."""
    return sum(
        _BYTES.get(dtype, 1 if dtype.startswith("f8") else 4) * math.prod(int(axis) for axis in axes.split(",") if axis)
        for dtype, axes in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape))
    )


def _work(body: list[_Instruction], computations: dict[str, list[_Instruction]]) -> Work:
    shapes, total = {one.name: one.shape for one in body}, Work(0, 0, {}, {})
    for one in body:
        called = [computations[name] for name in _called(one.rest) if name in computations]
        kind = one.opcode.removesuffix("-start")
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            continue
        if one.opcode == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
            for inner in called:
                total = total.plus(_work(inner, computations), int(trips[1]) if trips else 1)
        elif one.opcode in ("call", "conditional", "async-start"):
            for inner in called:
                total = total.plus(_work(inner, computations))
        else:
            operands = sum(size_of(shapes.get(name, "")) for name in one.operands)
            fused = one.opcode == "fusion" and called
            moved = _fused_bytes(one, called[0], shapes) if fused else operands + size_of(one.shape)
            # XLA puts calls whose operands are slices, as in a loop over members, into fusions.
            texts = [one.rest, *(part.rest for body in called for part in body if fused)]
            calls = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', " ".join(texts)))
            inner_kind = next((k for part in called for i in part for k in COLLECTIVES if i.opcode == k), None)
            reached = kind if kind in COLLECTIVES else inner_kind
            size = size_of(one.shape) / (2 if one.opcode.endswith("-start") else 1)
            exchanged = {} if reached is None else {reached: (1.0, size)}
            total = total.plus(Work(moved, 1, dict(calls), exchanged))
    return total


def _called(rest: str) -> list[str]:
    """The computations that an instruction runs: a loop's body without its condition, all branches."""
    found = re.findall(
        r"(?:calls|body|to_apply|branch_computations|called_computations)=\{?([^,}]*(?:, %[^,}]*)*)", rest
    )
    return [name for part in found for name in _NAME.findall(part)]


def _fused_bytes(fusion: _Instruction, body: list[_Instruction], shapes: dict[str, str]) -> float:
    """Bytes that a fusion moves: of operands that it only gathers from, what it takes; of updates, what it writes."""
    parameters = {int(one.rest.partition(")")[0]): one.name for one in body if one.opcode == "parameter"}
    users: dict[str, list[_Instruction]] = collections.defaultdict(list)
    for one in body:
        for operand in one.operands:
            users[operand].append(one)
    own = {one.name: one.shape for one in body}
    total, written = 0.0, size_of(fusion.shape)
    for index, operand in enumerate(fusion.operands):
        full, reads = size_of(shapes.get(operand, "")), 0.0
        pending = [parameters.get(index, "")]
        while pending:
            name = pending.pop()
            for user in users[name]:
                if user.opcode in ("bitcast", "get-tuple-element"):
                    pending.append(user.name)
                elif user.opcode in ("gather", "dynamic-slice") and user.operands[0] == name:
                    reads += size_of(user.shape)
                elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                    update = size_of(own.get(user.operands[-1 if user.opcode == "scatter" else 1], ""))
                    reads += update
                    written -= max(0.0, size_of(user.shape) - update)
                else:
                    reads += full
        total += min(full, reads)
    return total + max(0.0, written)
