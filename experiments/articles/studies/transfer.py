"""A16, A17: the cost of transfers to a device and back, and the size from which the device is worth it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from articles.studies.study_devices import cpus_with_gpus, faster_from, shared_sizes
from articles.studies.study_pictures import draw_lines, panels
from articles.studies.study_rows import measured, rate_finding
from harness import Bench, Case, Finding, NotMeasured, Rows, Study
from jax import lax
from jax.sharding import SingleDeviceSharding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = ("host to device", "device to host")
PAGEABLE, PINNED = "pageable", "pinned"
IN_PLACE, THERE_AND_BACK = "in place", "there and back"
_PINNED_KIND = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes: transfers in bytes, ReLUs in elements, square products in rows, convolutions in images."""

    transfer: tuple[int, ...] = tuple(2**power for power in range(10, 29, 2))
    relu: tuple[int, ...] = tuple(2**power for power in range(8, 27, 2))
    matmul: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    convolution: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    rounds: int = 5
    seconds: float = 0.2
    grow_until: float = 0.002


QUICK = Settings((2**10, 2**16, 2**24), (2**8, 2**14, 2**20), (8, 64, 512), (1, 8, 64), rounds=3, seconds=0.02)


class Operation(NamedTuple):
    """An operation to run on the CPU and on another device.

    Attributes:
        name: in findings.
        unit: of its size.
        function: of arrays.
        shapes: returns the shapes of these arrays for a size.
    """

    name: str
    unit: str
    function: Callable[..., jax.Array]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]


def _convolve(pictures: jax.Array, filters: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(pictures, filters, (1, 1), "SAME", dimension_numbers=layout)


OPERATIONS: Mapping[str, Operation] = {
    "relu": Operation("ReLU", "elements", jax.nn.relu, lambda size: ((size,),)),
    "matmul": Operation("matrix product", "rows", jnp.matmul, lambda size: ((size, size), (size, size))),
    "convolution": Operation("convolution", "images", _convolve, lambda size: ((size, 32, 32, 32), (3, 3, 32, 32))),
}


def host_array(*shape: int) -> np.ndarray:
    """Returns float32 noise, 16 bytes past a multiple of 64: a CPU device uses aligned memory without a copy."""
    size = int(np.prod(shape))
    memory = np.empty(size + 32, np.float32)
    start = (-memory.ctypes.data % 64) // 4 + 4
    array = memory[start : start + size]
    np.random.default_rng(0).random(out=array, dtype=np.float32)
    return array.reshape(shape)


def fetch(array: jax.Array) -> np.ndarray:
    """Copies ``array``, which was not read before, to the host's pageable memory."""
    # A CPU's array would return its own memory.
    return np.array(array) if _on_cpu(array) else np.asarray(array)


def fetch_again(array: jax.Array) -> np.ndarray:
    """Copies ``array`` to the host's pageable memory, each time again."""
    return fetch(array if _on_cpu(array) else unread(array))


def unread(array: jax.Array) -> jax.Array:
    """Returns another array of the same memory: one that was read caches its value on the host."""
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


def _on_cpu(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def make_transfer(direction: str, memory: str, size: int, device: jax.Device) -> Callable[[], Any]:
    """Returns a call that copies ``size`` bytes.

    Args:
        direction: one of `DIRECTIONS`.
        memory: of the host: `PAGEABLE`, as NumPy's, or `PINNED`, which the system does not move.
        size: a multiple of 4.
        device: the target or the source.
    """
    array = host_array(size // 4)
    on_device = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    if memory == PINNED:
        pinned = SingleDeviceSharding(device, memory_kind=_PINNED_KIND)
        source, target = (pinned, on_device) if direction == DIRECTIONS[0] else (on_device, pinned)
        ready = jax.block_until_ready(jax.device_put(array, source))
        return lambda: jax.block_until_ready(jax.device_put(ready, target))
    if direction == DIRECTIONS[0]:
        return lambda: jax.block_until_ready(jax.device_put(array, on_device))
    ready = jax.block_until_ready(jax.device_put(array, on_device))
    return lambda: fetch_again(ready)


def make_computation(operation: Operation, form: str, size: int, device: jax.Device) -> Callable[[], Any]:
    """Returns a call that computes ``operation`` on ``device``.

    Args:
        operation: one of `OPERATIONS`.
        form: `IN_PLACE`, with arguments and result on the device, or `THERE_AND_BACK`, with both on the host.
        size: in the operation's unit.
        device: to run on.
    """
    arrays = [host_array(*shape) for shape in operation.shapes(size)]
    function = jax.jit(operation.function)
    if form == THERE_AND_BACK:
        return lambda: fetch(function(*jax.device_put(arrays, device)))
    on_device = jax.device_put(arrays, device)
    return lambda: jax.block_until_ready(function(*on_device))


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    refused = [
        Case(kind, {"transfer": _route(direction, PINNED)}, functools.partial(_refuse, reason))
        for kind, device in bench.devices.items()
        if (reason := unpinnable(kind, device))
        for direction in DIRECTIONS
    ]
    yield refused
    for size in settings.transfer:
        yield [
            _transfer(direction, memory, size, kind, device)
            for kind, device in bench.devices.items()
            for memory in ((PAGEABLE,) if unpinnable(kind, device) else (PAGEABLE, PINNED))
            for direction in DIRECTIONS
        ]
    for name, operation in OPERATIONS.items():
        for size in getattr(settings, name):
            yield _computations(bench, name, operation, size)


def _transfer(direction: str, memory: str, size: int, kind: str, device: jax.Device) -> Case:
    return Case(
        kind,
        {"transfer": _route(direction, memory), "size": size},
        functools.partial(make_transfer, direction, memory, size, device),
        size,
        "B",
        num_bytes=2 * size,
        larger=functools.partial(_transfer, direction, memory, 4 * size, kind, device),
    )


def _computations(bench: Bench, name: str, operation: Operation, size: int) -> list[Case]:
    return [
        Case(
            kind,
            {"operation": name, "form": form, "size": size},
            functools.partial(make_computation, operation, form, size, device),
            size,
            operation.unit,
        )
        for kind, device in bench.devices.items()
        for form in ((IN_PLACE,) if kind == "cpu" else (IN_PLACE, THERE_AND_BACK))
    ]


def unpinnable(kind: str, device: jax.Device) -> str:
    """Returns why transfers with pinned memory are not measured for ``device``; empty if they are."""
    if kind == "cpu":
        return "a CPU uses the host's memory: there is nothing to pin"
    if _PINNED_KIND not in {memory.kind for memory in device.addressable_memories()}:
        return "JAX has no pinned memory for this device"
    return ""


def _refuse(reason: str) -> Callable[[], object]:
    raise NotMeasured(reason)


def _route(direction: str, memory: str) -> str:
    return f"{direction}, {memory}"


def _findings(rows: Rows) -> list[Finding]:
    return [finding for direction in DIRECTIONS for finding in _of_transfers(rows, direction)] + [
        finding for name, operation in OPERATIONS.items() for finding in _of_computing(rows, name, operation)
    ]


def _of_transfers(rows: Rows, direction: str) -> Iterator[Finding]:
    for memory in (PAGEABLE, PINNED):
        route = _route(direction, memory)
        those = rows.where(transfer=route)
        if memory == PAGEABLE and measured(those):
            least = measured(those)[0]
            yield Finding(
                "A16, A17", f"{route}: latency of the smallest", least.time, note=f"{least.what['size']} bytes"
            )
        if those:
            note = next((row.missing for row in those if row.missing), "")
            yield rate_finding("A16, A17", f"{route}: best rate", those, note=note)


def _of_computing(rows: Rows, name: str, operation: Operation) -> Iterator[Finding]:
    here, there = (rows.where(operation=name, form=form) for form in (IN_PLACE, THERE_AND_BACK))
    if not measured(here):
        return
    size: Any = measured(here)[-1].what["size"]
    case = f"{operation.name}, {size:,} {operation.unit}"
    yield Finding("A17", f"{case}, data on the device", here.one(size=size).time)
    # On a CPU there is nothing to transfer.
    moved = (there or here).one(size=size).time
    yield Finding("A17", f"{case}, with transfers", moved, note="" if there else IN_PLACE)


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    """Compares each GPU with each CPU: the size from which it is faster, without and with transfers."""
    sentences = []
    for cpu, gpu in cpus_with_gpus(columns):
        for name, operation in OPERATIONS.items():
            ours = columns[cpu].where(operation=name, form=IN_PLACE)
            theirs = [columns[gpu].where(operation=name, form=form) for form in (IN_PLACE, THERE_AND_BACK)]
            if all(shared_sizes(ours, rows, "size") for rows in theirs):
                resident, moved = (_since(ours, rows, operation.unit) for rows in theirs)
                sentences.append(
                    f"{operation.name}: {gpu} is faster than {cpu} {resident} with data on the device; with transfers "
                    f"both ways, {moved}."
                )
    return sentences


def _since(ours: Rows, theirs: Rows, unit: str) -> str:
    start = faster_from(theirs, ours, "size")
    if start is None:
        return f"at no size up to {shared_sizes(ours, theirs, 'size')[-1]:,} {unit}"
    return f"from {start:,} {unit}"


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    operations = [f"{operation.name}, s per call" for operation in OPERATIONS.values()]
    rates, *times = panels(figure, ["transfers, bytes/s", *operations], across=2)
    draw_lines(rates, columns, across="size", lines="transfer")
    rates.set_xlabel("bytes")
    for axes, (name, operation) in zip(times, OPERATIONS.items(), strict=True):
        drawn = {label: rows.where(operation=name) for label, rows in columns.items()}
        draw_lines(axes, drawn, across="size", lines="form", quantity=lambda row: row.time)
        axes.set_xlabel(operation.unit)


STUDY = Study(
    name="transfer",
    claims=("A16", "A17"),
    title="What do transfers to a GPU and back cost, and from which size is the GPU faster?",
    method=(
        "A transfer is one call and the wait for its copy, on an accelerator with larger sizes until it takes 2 ms: "
        "of a NumPy array to the device, and of a device's array to a new NumPy array (pageable; the creation of the"
        " array object, some microseconds, is included), or of arrays in the host's pinned memory. A CPU device "
        "shares the host's memory, and JAX copies no array that is aligned to 64 bytes; these are not, so the "
        "results are those of a copy. In place, an operation's arrays and its result are on the device; there and "
        "back, all arrays come from NumPy and the result becomes a NumPy array, in the same call. Operations: ReLU; "
        "the product of two square matrices; a 3×3 convolution of 32×32 images, from 32 to 32 channels. All float32,"
        " as JAX computes it by default, which some GPUs round to tf32. Compilation is not timed."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
