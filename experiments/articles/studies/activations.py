"""A1, A3: an activation is a loop over independent elements; who runs it, and how fast."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from articles.studies.study_pictures import draw_lines, panels
from articles.studies.study_rows import best_rate, distinct, measured

from jaxnn.bench import Bench, Case, Finding, Plain, Rows, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = ("Python loop", "NumPy", "vmap", "jit")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes in elements of float32."""

    sizes: tuple[int, ...] = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
    longest_loop: int = 1_000_000
    rounds: int = 5
    seconds: float = 0.2


QUICK = Settings((100, 10_000, 1_000_000), 10_000, rounds=3, seconds=0.02)


def _python_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _numpy_gelu(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf  # type: ignore[import-untyped]

    result: np.ndarray = np.float32(0.5) * x * (1 + erf(x / np.float32(math.sqrt(2))))
    return result


# The same function of a number, of a NumPy array, and of JAX's.
OPERATIONS: Mapping[str, tuple[Callable[[float], float], Callable[..., Any], Callable[..., Any]]] = {
    "relu": (lambda x: x if x > 0 else 0.0, lambda x: np.maximum(x, 0), jax.nn.relu),
    "sigmoid": (lambda x: 1 / (1 + math.exp(-x)), lambda x: 1 / (1 + np.exp(-x)), jax.nn.sigmoid),
    "gelu": (_python_gelu, _numpy_gelu, functools.partial(jax.nn.gelu, approximate=False)),
}


def make_call(operation: str, form: str, vector: np.ndarray, device: jax.Device) -> Callable[[], Any]:
    """A call that applies ``operation`` to ``vector [elements]``, which lies where it is computed.

    Args:
        operation: one of `OPERATIONS`.
        form: one of `FORMS`.
        vector: float32.
        device: of the last two forms; the first two run on the host.
    """
    of_a_number, of_numpy, of_jax = OPERATIONS[operation]
    if form == "Python loop":
        numbers = vector.tolist()
        return lambda: [of_a_number(x) for x in numbers]
    if form == "NumPy":
        return lambda: of_numpy(vector)
    there = jax.device_put(vector, device)
    function = jax.vmap(of_jax) if form == "vmap" else jax.jit(of_jax)
    return lambda: jax.block_until_ready(function(there))


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for operation in OPERATIONS:
        for size in settings.sizes:
            vector = np.random.default_rng(0).standard_normal(size, np.float32)
            group = []
            for device, found in bench.devices.items():
                for form in FORMS:
                    if (form in FORMS[:2] and device != "cpu") or (form == FORMS[0] and size > settings.longest_loop):
                        continue
                    begin = functools.partial(make_call, operation, form, vector, found)
                    what: dict[str, Plain] = {"operation": operation, "size": size, "form": form}
                    group.append(Case(device, what, begin, size, "elements"))
            yield group


def _findings(rows: Rows) -> list[Finding]:
    return [
        Finding("A1", f"{operation}, {form}, at its best size", best)
        for operation in OPERATIONS
        for form in FORMS
        if (best := best_rate(rows.where(operation=operation, form=form))) is not None
    ]


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    """Where one instruction for all elements leaves the loop behind (A3)."""
    told = []
    # GPUs run no Python.
    loops = next((rows for rows in columns.values() if measured(rows.where(form="Python loop"))), Rows())
    for label, rows in columns.items():
        size = next(iter(distinct(measured(rows), "size")), None)
        loop = loops.one(operation="relu", form="Python loop", size=size)
        compiled = rows.one(operation="relu", form="jit", size=size)
        if loop.time is not None and compiled.time is not None:
            ratio = loop.time.median / compiled.time.median
            told.append(
                f"{label}: of {size} elements the compiled ReLU takes {1 / ratio:.2g} times as long as the Python "
                "loop on a CPU: a call costs the same whatever its size, and only many elements pay for it."
            )
    return told


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    for axes, operation in zip(panels(figure, list(OPERATIONS)), OPERATIONS, strict=True):
        drawn = {label: rows.where(operation=operation) for label, rows in columns.items()}
        draw_lines(axes, drawn, across="size", lines="form")
        axes.set_xlabel("elements")
        axes.set_ylabel("elements a second")


STUDY = Study(
    name="activations",
    claims=("A1", "A3"),
    title="An activation is a loop whose elements do not know of each other: how fast does each way of running it go?",
    method=(
        "Elements a second of float32 vectors that lie where they are computed; transfers and compilation are not "
        "counted, the call and the wait for its result are. vmap alone, without jit, has the function traced anew "
        "at every call and its operations run one by one; jit compiles them into one loop, once. Each call makes a "
        "new result; memory that is freed is kept for the next one, as in a run."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
