"""A1, A3: an activation is a loop over independent elements; how fast does each implementation run?"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from articles.studies.study_pictures import draw_lines, panels
from articles.studies.study_rows import GROWING, distinct, measured, rate_finding
from harness import Bench, Case, Finding, Rows, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOP = "Python loop"
ON_THE_HOST = (LOOP, "NumPy")
FORMS = (*ON_THE_HOST, "vmap", "jit")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes in elements of float32."""

    sizes: tuple[int, ...] = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
    longest_loop: int = 1_000_000
    rounds: int = 5
    seconds: float = 0.2
    grow_until: float = 0.002


QUICK = Settings((100, 10_000, 1_000_000), 10_000, rounds=3, seconds=0.02)


def _python_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _numpy_gelu(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf  # type: ignore[import-untyped]

    result: np.ndarray = np.float32(0.5) * x * (1 + erf(x / np.float32(math.sqrt(2))))
    return result


# The same function for a number, a NumPy array and a JAX array.
OPERATIONS: Mapping[str, tuple[Callable[[float], float], Callable[..., Any], Callable[..., Any]]] = {
    "relu": (lambda x: x if x > 0 else 0.0, lambda x: np.maximum(x, 0), jax.nn.relu),
    "sigmoid": (lambda x: 1 / (1 + math.exp(-x)), lambda x: 1 / (1 + np.exp(-x)), jax.nn.sigmoid),
    "gelu": (_python_gelu, _numpy_gelu, functools.partial(jax.nn.gelu, approximate=False)),
}


def make_call(operation: str, form: str, vector: np.ndarray, device: jax.Device) -> Callable[[], Any]:
    """Returns a call that applies ``operation`` to ``vector [elements]`` on ``device``.

    Args:
        operation: one of `OPERATIONS`.
        form: one of `FORMS`.
        vector: float32.
        device: of the last two forms; the first two run on the host.
    """
    of_a_number, of_numpy, of_jax = OPERATIONS[operation]
    if form == LOOP:
        numbers = vector.tolist()
        return lambda: [of_a_number(x) for x in numbers]
    if form == "NumPy":
        return lambda: of_numpy(vector)
    on_device = jax.device_put(vector, device)
    function = jax.vmap(of_jax) if form == "vmap" else jax.jit(of_jax)
    return lambda: function(on_device)


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for operation in OPERATIONS:
        for size in settings.sizes:
            yield [
                _case(operation, form, size, kind, device)
                for kind, device in bench.devices.items()
                for form in FORMS
                if form not in ON_THE_HOST or (kind == "cpu" and (form != LOOP or size <= settings.longest_loop))
            ]


def _case(operation: str, form: str, size: int, kind: str, device: jax.Device) -> Case:
    def begin() -> Callable[[], Any]:
        return make_call(operation, form, _vector(size), device)

    return Case(
        kind,
        {"operation": operation, "size": size, "form": form},
        begin,
        size,
        "elements",
        queued=form not in ON_THE_HOST,
        num_bytes=2 * 4 * size,
        larger=functools.partial(_case, operation, form, 10 * size, kind, device),
    )


@functools.lru_cache(maxsize=1)
def _vector(size: int) -> np.ndarray:
    # Drawing gigabytes would take longer than the calls.
    return np.resize(np.random.default_rng(0).standard_normal(min(size, 1_000_000), np.float32), size)


def _findings(rows: Rows) -> list[Finding]:
    return [
        rate_finding("A1", f"{operation}, {form}, best rate", those)
        for operation in OPERATIONS
        for form in FORMS
        if measured(those := rows.where(operation=operation, form=form))
    ]


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    """Compares compiled calls with the loop at the smallest size (A3)."""
    sentences = []
    # GPUs run no Python.
    loops = next((rows for rows in columns.values() if measured(rows.where(form=LOOP))), Rows())
    for label, rows in columns.items():
        size = next(iter(distinct(measured(rows), "size")), None)
        loop = loops.one(operation="relu", form=LOOP, size=size)
        compiled = rows.one(operation="relu", form="jit", size=size)
        if loop.time is not None and compiled.time is not None:
            ratio = loop.time.median / compiled.time.median
            sentences.append(
                f"{label}: for {size} elements the compiled ReLU takes {1 / ratio:.2g} times as long as the Python "
                "loop on a CPU: the overhead of a call is constant and pays off only for many elements."
            )
    return sentences


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    for axes, operation in zip(panels(figure, list(OPERATIONS)), OPERATIONS, strict=True):
        drawn = {label: rows.where(operation=operation) for label, rows in columns.items()}
        draw_lines(axes, drawn, across="size", lines="form")
        axes.set_xlabel("elements")
        axes.set_ylabel("elements/s")


STUDY = Study(
    name="activations",
    claims=("A1", "A3"),
    title="An activation is a loop over independent elements: how fast does each implementation run?",
    method=(
        "Elements/s of float32 vectors on the device: calls and the wait for their results are timed, transfers and "
        "compilation are not. "
        f"{GROWING} "
        "vmap alone, without jit, traces the function again at every call and runs its operations one by one; jit "
        "compiles them once into one loop. Each call allocates a new result; freed memory is reused, as in a run."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
