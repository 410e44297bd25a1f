"""What a compiled program does, read from its optimized HLO: memory traffic, kernels and collectives."""

from __future__ import annotations

import collections
import itertools
import math
import re
from typing import NamedTuple

from jaxnn.observe._compiler_options import RECORDED

_ARRAY = re.compile(r"\b(pred|token|[a-z]+?(\d+)[a-z0-9]*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
# These move no data, or only name it.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
_FREE |= {"opt-barrier", "add-dependency"}
# A program's text does not show CUDA graphs, since XLA forms them later, of at least this many kernels that follow each
# other and are of the kinds `RECORDED`.
MIN_GRAPH = 5
# Seconds of a kernel in a graph, the least seen on an H200: a step of 33, some of which overlap, took 28 µs.
GRAPH_SECONDS = 0.8e-6
LAUNCH_SECONDS = 7e-6  # of one outside: the average of ResNet-20, whose convolutions were in no graph there
# Library calls by their targets; others, such as LSTMs and sorts, break a graph, as do loops, branches and collectives.
_KINDS = {"__cublas$lt": "CUBLASLT", "__cublas$": "CUBLAS", "__cudnn$conv": "CONVOLUTION", "__cudnn$": "CUDNN"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Work(NamedTuple):
    """What a program does each time that it runs, on each device."""

    bytes: float  # read and written by kernels, at least: caches of a kernel are not counted
    launches: float  # of kernels and of calls to libraries, which may launch several
    calls: dict[str, float]  # to libraries, by target
    collectives: dict[str, tuple[float, float]]  # number and bytes of results, by kind
    sent: float = 0.0  # bytes that each device must at least send for them
    alone: float = 0.0  # launches outside of CUDA graphs

    @staticmethod
    def of(hlo: str) -> Work:
        """Reads the text of an optimized HLO module. Loops count as often as they run, if XLA knows; otherwise once."""
        computations = _computations(hlo)
        entry = next((name for name in computations if name.startswith("ENTRY ")), None)
        counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", hlo.partition("\n\n")[0])
        num_devices = math.prod(map(int, counts))
        return Work(0, 0, {}, {}) if entry is None else _work(computations[entry], computations, num_devices)

    @property
    def launch_seconds(self) -> float:
        """The seconds on a GPU that its launches take at least."""
        return (self.launches - self.alone) * GRAPH_SECONDS + self.alone * LAUNCH_SECONDS

    def plus(self, other: Work, times: float = 1) -> Work:
        """This work and ``times`` that of ``other``."""
        calls = {name: self.calls.get(name, 0.0) + count * times for name, count in other.calls.items()}
        collectives = {}
        for kind, (count, size) in other.collectives.items():
            before = self.collectives.get(kind, (0.0, 0.0))
            collectives[kind] = before[0] + count * times, before[1] + size * times
        moved, sent = self.bytes + other.bytes * times, self.sent + other.sent * times
        launches, alone = self.launches + other.launches * times, self.alone + other.alone * times
        return Work(moved, launches, self.calls | calls, self.collectives | collectives, sent, alone)


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str  # operands and attributes as text


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    for line in hlo.splitlines():
        if header := re.match(r"^(ENTRY )?%(\S+) .*\{$", line):
            body = found.setdefault(f"{header[1] or ''}{header[2]}", [])
        elif match := _INSTRUCTION.match(line):
            name, shape, opcode, rest = match.groups()
            # They end at the parenthesis that closes the instruction.
            depths = itertools.accumulate((character == "(") - (character == ")") for character in rest)
            end = next((index for index, depth in enumerate(depths) if depth < 0), None)
            body.append(_Instruction(name, shape, opcode, _NAME.findall(rest[:end]), rest))
    return found


def size_of(shape: str) -> float:
    """The bytes of an HLO shape such as ``f32[8,64]{1,0}``, or of all arrays of a tuple."""
    total = 0.0
    for dtype, bits, axes in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape)):
        # Complex numbers are named by the bits of both parts; a token has no bytes.
        size = int(bits) / 8 if bits else float(dtype == "pred")
        total += size * math.prod(int(axis) for axis in axes.split(",") if axis)
    return total


def _work(body: list[_Instruction], computations: dict[str, list[_Instruction]], num_devices: int) -> Work:
    shapes, total = {one.name: one.shape for one in body}, Work(0, 0, {}, {})
    runs = [0]  # lengths of sequences of kernels that can be in one graph
    for one in body:
        called = [computations[name] for name in _called(one.rest) if name in computations]
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            continue
        if one.opcode in ("while", "call", "conditional", "async-start"):
            runs.append(0)
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
            works = [_work(inner, computations, num_devices) for inner in called]
            if one.opcode == "conditional" and works:  # no branch does less; calls are those of the shortest
                fewest = min(works, key=lambda work: work.launches)
                sent = min(work.sent for work in works)
                works = [fewest._replace(bytes=min(work.bytes for work in works), sent=sent)]
            for inner_work in works:
                total = total.plus(inner_work, int(trips[1]) if trips else 1)
            continue
        fused = called[0] if one.opcode == "fusion" and called else []
        # XLA puts calls whose operands are slices, as in a loop over members, into fusions; so with collectives.
        calls = re.findall(r'custom_call_target="([^"]+)"', " ".join(part.rest for part in (one, *fused)))
        exchanges = (_exchange(part, {each.name: each.shape for each in fused}, num_devices) for part in fused)
        kind, result, sent = next(filter(None, (_exchange(one, shapes, num_devices), *exchanges)), ("", 0.0, 0.0))
        collectives = {kind: (1.0, result)} if kind else {}
        moved = _fused_bytes(one, fused, shapes) if fused else _bytes(one, shapes)
        total = total.plus(Work(moved, 1, dict(collections.Counter(calls)), collectives, sent))
        if not kind and all(map(_is_recorded, calls)):
            runs[-1] += 1
        else:
            runs += [1, 0]
    return total._replace(alone=total.alone + sum(run for run in runs if run < MIN_GRAPH))


def _is_recorded(target: str) -> bool:
    """Whether XLA records calls of ``target`` into graphs."""
    return next((kind for prefix, kind in _KINDS.items() if target.startswith(prefix)), "") in RECORDED


def _exchange(one: _Instruction, shapes: dict[str, str], num_devices: int) -> tuple[str, float, float] | None:
    """The kind of a collective, the bytes of its results, and those that a device must send; None for others."""
    kind = one.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    operands, result = sum(size_of(shapes.get(name, "")) for name in one.operands), size_of(one.shape)
    if kind not in ("all-gather", "reduce-scatter"):
        result = operands
    elif one.opcode != kind:  # the shape of an asynchronous form has its operands too
        result -= operands
    size, share = max(operands, result), 1 - 1 / _group_size(one.rest, num_devices)
    return kind, result, size * {"all-reduce": 2 * share, "collective-permute": 1}.get(kind, share)


def _group_size(rest: str, num_devices: int) -> int:
    """The number of devices that exchange data: in each of ``replica_groups``, or all."""
    if (found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest)) is not None:
        return found[1].count(",") + 1
    if (found := re.search(r"replica_groups=\[\d+,(\d+)\]", rest)) is not None:
        return int(found[1])
    if (found := re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", rest)) is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))  # mesh['data'=2,'model'=4] {'model'}
        return math.prod(int(part or sizes[name]) for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2]))
    return max(num_devices, 1)


def _bytes(one: _Instruction, shapes: dict[str, str]) -> float:
    """Bytes that an instruction outside of fusions reads and writes."""
    operands, kind = [size_of(shapes.get(name, "")) for name in one.operands], one.opcode.removesuffix("-start")
    if one.opcode == "custom-call":
        # Without what the library needs as room for its work: scratch memory, and what an LSTM keeps for its gradient.
        room = {"cudnn_rnn_ffi": r"f32\[\d+\]", "cudnn_rnn_bwd_ffi": r"f32\[\d+\]\{0\}\)$"}
        target = re.search(r'custom_call_target="([^"]+)"', one.rest)
        scratch = room.get(target[1] if target else "", r"[su]8\[\d+\]")
        return sum(operands) + size_of(re.sub(scratch, "", one.shape) if one.shape.startswith("(") else one.shape)
    if (exchange := _exchange(one, shapes, 1)) is not None:
        return sum(operands) + exchange[1]
    if kind in ("dynamic-slice", "gather"):
        return 2 * size_of(one.shape) + sum(operands[1:])
    if kind == "dynamic-update-slice":  # in place
        return 2 * operands[1] + sum(operands[2:])
    return sum(operands) + size_of(one.shape)


def _called(rest: str) -> list[str]:
    """The computations that an instruction runs: a loop's body without its condition, all branches."""
    found = re.findall(
        r"(?:calls|body|to_apply|(?:branch|called|true|false)_computations?)=\{?([^,}]*(?:, %[^,}]*)*)", rest
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

    def returned(one: _Instruction) -> bool:  # and not computed with
        return all(user.opcode in ("bitcast", "tuple") and returned(user) for user in users[one.name])

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
                elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name and returned(user):
                    update = size_of(own.get(user.operands[-1 if user.opcode == "scatter" else 1], ""))
                    reads += update
                    written -= max(0.0, size_of(user.shape) - update)
                else:
                    reads += full
        total += min(full, reads)
    return total + max(0.0, written)
