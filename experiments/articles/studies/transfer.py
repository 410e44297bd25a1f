"""A16, A17: data must get to a device and back; what that costs, and from which size on the device is worth it."""

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
from articles.studies.study_rows import best_rate, measured
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxnn.bench import Bench, Case, Finding, NotMeasured, Rows, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = ("host to device", "device to host")
PAGEABLE, PINNED = "pageable", "pinned"
IN_PLACE, THERE_AND_BACK = "in place", "there and back"
_PINNED_KIND = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes: of transfers in bytes, of ReLUs in elements, of square products in rows, of convolutions in pictures."""

    transfer: tuple[int, ...] = tuple(2**power for power in range(10, 29, 2))
    relu: tuple[int, ...] = tuple(2**power for power in range(8, 27, 2))
    matmul: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    convolution: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    rounds: int = 5
    seconds: float = 0.2


QUICK = Settings((2**10, 2**16, 2**24), (2**8, 2**14, 2**20), (8, 64, 512), (1, 8, 64), rounds=3, seconds=0.02)


class Operation(NamedTuple):
    """What is computed, here or there.

    Attributes:
        told: its name.
        unit: of its size.
        function: of arrays.
        shapes: of these arrays, from its size.
    """

    told: str
    unit: str
    function: Callable[..., jax.Array]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]


def _convolve(pictures: jax.Array, filters: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(pictures, filters, (1, 1), "SAME", dimension_numbers=layout)


OPERATIONS: Mapping[str, Operation] = {
    "relu": Operation("ReLU", "elements", jax.nn.relu, lambda size: ((size,),)),
    "matmul": Operation("matrix product", "rows", jnp.matmul, lambda size: ((size, size), (size, size))),
    "convolution": Operation("convolution", "pictures", _convolve, lambda size: ((size, 32, 32, 32), (3, 3, 32, 32))),
}


def host_array(*shape: int) -> np.ndarray:
    """Noise, float32, 16 bytes off a multiple of 64: on one, a CPU device would take it as its own and copy nothing."""
    size = int(np.prod(shape))
    memory = np.empty(size + 32, np.float32)
    start = (-memory.ctypes.data % 64) // 4 + 4
    array = memory[start : start + size]
    np.random.default_rng(0).random(out=array, dtype=np.float32)
    return array.reshape(shape)


def fetch(array: jax.Array) -> np.ndarray:
    """A copy of ``array``, which was not read before, in the host's pageable memory."""
    # A CPU's array would give its own memory.
    return np.array(array) if _on_cpu(array) else np.asarray(array)


def fetch_again(array: jax.Array) -> np.ndarray:
    """A copy of ``array`` in the host's pageable memory, made anew each time."""
    return fetch(array if _on_cpu(array) else unread(array))


def unread(array: jax.Array) -> jax.Array:
    """Another array of the same memory: one that is read keeps what it was read as, and gives it at once next time."""
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


def _on_cpu(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def make_transfer(direction: str, memory: str, size: int, device: jax.Device) -> Callable[[], Any]:
    """A call that copies ``size`` bytes.

    Args:
        direction: one of `DIRECTIONS`.
        memory: the host's: `PAGEABLE`, as NumPy has it, or `PINNED`, which the system leaves in its place.
        size: a multiple of 4.
        device: to which or from which.
    """
    array = host_array(size // 4)
    there = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    if memory == PINNED:
        pinned = SingleDeviceSharding(device, memory_kind=_PINNED_KIND)
        source, target = (pinned, there) if direction == DIRECTIONS[0] else (there, pinned)
        begun = jax.block_until_ready(jax.device_put(array, source))
        return lambda: jax.block_until_ready(jax.device_put(begun, target))
    if direction == DIRECTIONS[0]:
        return lambda: jax.block_until_ready(jax.device_put(array, there))
    begun = jax.block_until_ready(jax.device_put(array, there))
    return lambda: fetch_again(begun)


def make_computation(operation: Operation, form: str, size: int, device: jax.Device) -> Callable[[], Any]:
    """A call that computes ``operation`` on ``device``.

    Args:
        operation: one of `OPERATIONS`.
        form: `IN_PLACE`, where arguments and result lie there, or `THERE_AND_BACK`: both lie on the host.
        size: in the operation's unit.
        device: where.
    """
    here = [host_array(*shape) for shape in operation.shapes(size)]
    function = jax.jit(operation.function)
    if form == THERE_AND_BACK:
        return lambda: fetch(function(*jax.device_put(here, device)))
    there = jax.device_put(here, device)
    return lambda: jax.block_until_ready(function(*there))


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
        yield _transfers(bench, size)
    for name, operation in OPERATIONS.items():
        for size in getattr(settings, name):
            yield _computations(bench, name, operation, size)


def _transfers(bench: Bench, size: int) -> list[Case]:
    return [
        Case(
            kind,
            {"transfer": _route(direction, memory), "size": size},
            functools.partial(make_transfer, direction, memory, size, device),
            size,
            "B",
        )
        for kind, device in bench.devices.items()
        for memory in ((PAGEABLE,) if unpinnable(kind, device) else (PAGEABLE, PINNED))
        for direction in DIRECTIONS
    ]


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
    """Why transfers between pinned memory and ``device`` are not measured; empty where they are."""
    if kind == "cpu":
        return "a CPU's memory is the host's: there is nothing to pin"
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
                "A16, A17", f"{route}: latency, of the smallest", least.time, note=f"{least.what['size']} bytes"
            )
        if those:
            note = next((row.missing for row in those if row.missing), "")
            yield Finding("A16, A17", f"{route}: at its best size", best_rate(those), note=note)


def _of_computing(rows: Rows, name: str, operation: Operation) -> Iterator[Finding]:
    here, there = (rows.where(operation=name, form=form) for form in (IN_PLACE, THERE_AND_BACK))
    if not measured(here):
        return
    size: Any = measured(here)[-1].what["size"]
    told = f"{operation.told}, {size:,} {operation.unit}, data"
    yield Finding("A17", f"{told} {IN_PLACE}", here.one(size=size).time)
    # Where there is no way to go, nothing is added.
    moved = (there or here).one(size=size).time
    yield Finding("A17", f"{told} {THERE_AND_BACK}", moved, note="" if there else IN_PLACE)


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    """From which size on a GPU wins, where its data lie there and where they must be moved."""
    told = []
    for cpu, gpu in cpus_with_gpus(columns):
        for name, operation in OPERATIONS.items():
            ours = columns[cpu].where(operation=name, form=IN_PLACE)
            theirs = [columns[gpu].where(operation=name, form=form) for form in (IN_PLACE, THERE_AND_BACK)]
            if all(shared_sizes(ours, rows, "size") for rows in theirs):
                resident, moved = (_since(ours, rows, operation.unit) for rows in theirs)
                told.append(
                    f"{operation.told}: {gpu} is faster than {cpu} {resident} where the data lie on it; where they are "
                    f"moved there and back, {moved}."
                )
    return told


def _since(ours: Rows, theirs: Rows, unit: str) -> str:
    start = faster_from(theirs, ours, "size")
    if start is None:
        return f"at no size up to {shared_sizes(ours, theirs, 'size')[-1]:,} {unit}"
    return f"from {start:,} {unit} on"


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    operations = [f"{operation.told}, seconds a call" for operation in OPERATIONS.values()]
    rates, *times = panels(figure, ["transfers, bytes a second", *operations], across=2)
    draw_lines(rates, columns, across="size", lines="transfer")
    rates.set_xlabel("bytes")
    for axes, (name, operation) in zip(times, OPERATIONS.items(), strict=True):
        drawn = {label: rows.where(operation=name) for label, rows in columns.items()}
        draw_lines(axes, drawn, across="size", lines="form", quantity=lambda row: row.time)
        axes.set_xlabel(operation.unit)


STUDY = Study(
    name="transfer",
    claims=("A16", "A17"),
    title="Data must be moved to a GPU and back: what does that cost, and from which size on does the GPU win?",
    method=(
        "A transfer is one call and the wait for its copy: of a NumPy array to the device, and of a device's array "
        "to a new NumPy array (pageable; making the array object that is read, some microseconds, is counted), or "
        "of arrays that JAX keeps in the host's pinned memory. A CPU device shares the host's memory, where JAX "
        "copies nothing if an array happens to begin at a multiple of 64 bytes; ours do not, so that its figures "
        "are those of a copy. In place, an operation's arrays and its result lie on the device; there and back, all "
        "its arrays come from NumPy and its result becomes a NumPy array, in the same call. Operations: ReLU; the "
        "product of two square matrices; a 3×3 convolution of 32×32 pictures, of 32 channels to 32. All float32, as "
        "JAX computes it by default, which some GPUs round to tf32. Compilation is not counted."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
