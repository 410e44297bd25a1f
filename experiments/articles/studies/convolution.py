"""A2: the positions of a convolution are independent; how fast does each implementation compute them?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from articles.studies.study_pictures import draw_lines, panels
from articles.studies.study_rows import GROWING, best_rate, fastest, measured, rate_finding, without_overhead
from harness import Bench, Case, Finding, Plain, Rows, Study, format_ratio
from jax import lax

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOP = "Python loop"
# Detects diagonal edges; all weights differ, so that a swap is detected.
FILTER = np.array([[0.9, 0.6, -0.1], [0.5, 0.0, -0.4], [0.2, -0.7, -1.0]], np.float32)
TAPS = tuple(itertools.product(range(3), range(3)))


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes in pixels along a side of a square image; results are compared at ``compared_size``."""

    sizes: tuple[int, ...] = (16, 64, 256, 1024, 4096, 8192)
    largest_loop: int = 1024
    largest_on_cpu: int = 4096
    compared_size: int = 256
    rounds: int = 5
    seconds: float = 0.2
    grow_until: float = 0.002


QUICK = Settings((16, 64, 512), 64, 512, 64, rounds=3, seconds=0.02)


def filter_by_loop(picture: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]) -> list[list[float]]:
    """Computes one position at a time, a sum of nine products: ``[n, n]`` to ``[n - 2, n - 2]``, as lists."""
    places = range(len(picture) - 2)
    return [[sum(weights[i][j] * picture[y + i][x + j] for i, j in TAPS) for x in places] for y in places]


def filter_by_vmap(picture: jax.Array, weights: jax.Array) -> jax.Array:
    """Maps the sum at one position over all positions: ``[n, n]`` to ``[n - 2, n - 2]``."""

    def at(y: jax.Array, x: jax.Array) -> jax.Array:
        return (weights * lax.dynamic_slice(picture, (y, x), (3, 3))).sum()

    places = jnp.arange(len(picture) - 2)
    return jax.vmap(jax.vmap(at, (None, 0)), (0, None))(places, places)


def filter_by_product(picture: jax.Array, weights: jax.Array) -> jax.Array:
    """Gathers the windows as columns, then one matrix product (im2col): ``[n, n]`` to ``[n - 2, n - 2]``."""
    size = len(picture) - 2
    columns = jnp.stack([picture[i : i + size, j : j + size].ravel() for i, j in TAPS])
    return jnp.matmul(weights.reshape(1, 9), columns, precision=lax.Precision.HIGHEST).reshape(size, size)


def filter_by_xla(picture: jax.Array, weights: jax.Array) -> jax.Array:
    """Applies XLA's convolution: ``[n, n]`` to ``[n - 2, n - 2]``."""
    layout = ("NHWC", "HWIO", "NHWC")
    options: dict[str, Any] = {"dimension_numbers": layout, "precision": lax.Precision.HIGHEST}
    found = lax.conv_general_dilated(picture[None, :, :, None], weights[:, :, None, None], (1, 1), "VALID", **options)
    return found[0, :, :, 0]


COMPILED: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "vmap": filter_by_vmap,
    "im2col": filter_by_product,
    "XLA": filter_by_xla,
}
FORMS = (LOOP, *COMPILED)


@functools.lru_cache(maxsize=1)
def make_picture(size: int) -> np.ndarray:
    """Returns noise, ``[size, size]`` float32."""
    return np.random.default_rng(0).standard_normal((size, size), np.float32)


def exact(picture: np.ndarray) -> np.ndarray:
    """Returns the image filtered in float64, ``[n - 2, n - 2]``."""
    windows = np.lib.stride_tricks.sliding_window_view(picture.astype(np.float64), (3, 3))
    filtered: np.ndarray = np.einsum("yxij,ij->yx", windows, FILTER.astype(np.float64))
    return filtered


def make_call(form: str, picture: np.ndarray, device: jax.Device) -> Callable[[], Any]:
    """Returns a call that filters ``picture [n, n]`` on ``device``.

    Args:
        form: one of `FORMS`.
        picture: float32, at least 3 pixels a side.
        device: of all forms except the loop, which runs on the host.
    """
    if form == LOOP:
        return functools.partial(filter_by_loop, picture.tolist(), FILTER.tolist())
    there = jax.device_put((picture, FILTER), device)
    function = jax.jit(COMPILED[form])
    return lambda: function(*there)


def relative_error(form: str, picture: np.ndarray, device: jax.Device) -> dict[str, Plain]:
    """Returns the maximum error over the largest exact value."""
    reference = exact(picture)
    off = np.abs(np.asarray(make_call(form, picture, device)(), np.float64) - reference).max()
    return {"error": float(off / np.abs(reference).max())}


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for size in settings.sizes:
        yield [
            _case(settings, form, size, kind, device)
            for kind, device in bench.devices.items()
            for form in (FORMS if kind == "cpu" else COMPILED)
            if kind != "cpu" or size <= (settings.largest_loop if form == LOOP else settings.largest_on_cpu)
        ]


def _case(settings: Settings, form: str, size: int, kind: str, device: jax.Device) -> Case:
    return Case(
        kind,
        {"form": form, "size": size},
        lambda: make_call(form, make_picture(size), device),
        (size - 2) ** 2,
        "positions",
        (lambda: relative_error(form, make_picture(size), device)) if size == settings.compared_size else None,
        queued=form != LOOP,
        num_bytes=4 * size**2 * (11 if form == "im2col" else 2),  # im2col stores nine values of each position
        larger=functools.partial(_case, settings, form, 4 * size, kind, device),
    )


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for form in FORMS:
        errors = [row.observed["error"] for row in rows.where(form=form) if "error" in row.observed]
        note = f"maximum error {errors[0]:.0e}" if errors else ""
        if measured(those := rows.where(form=form)):
            found.append(rate_finding("A2", f"{form}, best rate", those, note=note))
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    """Compares each form with the loop, which only a CPU runs."""
    sentences = []
    loops = (best_rate(rows.where(form=LOOP)) for rows in columns.values())
    loop = next((rate for rate in loops if rate is not None), None)
    for label, rows in columns.items():
        best = {form: fastest(rows.where(form=form)) for form in COMPILED}
        sound, hidden = without_overhead(label, best, rows)
        sentences += hidden
        rates = {form: row.rate for form, row in sound.items() if row.rate is not None}
        if loop is not None and rates:
            ratios = [f"{form} {format_ratio(rate.median / loop.median)}" for form, rate in rates.items()]
            sentences.append(f"{label}: positions/s relative to the Python loop: {', '.join(ratios)}.")
    return sentences


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    (axes,) = panels(figure, ["3×3 filter"])
    draw_lines(axes, columns, across="size", lines="form")
    axes.set_xlabel("image size, pixels along a side")
    axes.set_ylabel("positions/s")


STUDY = Study(
    name="convolution",
    claims=("A2",),
    title="The positions of a convolution are independent: how fast does each implementation compute them?",
    method=(
        "Positions/s of one 3×3 filter over a square float32 image with one channel, (n − 2)² positions. Image and "
        "filter are on the device: calls and the wait for their results are timed, transfers and compilation are "
        "not. "
        f"{GROWING} "
        "All forms compute the same sums of nine products, in float32 even if a GPU would round to tf32; the loop "
        "computes in Python's float64. im2col gathers the nine values of each position as a column, then takes one "
        "matrix product. The maximum error is the largest difference from float64, over the largest result."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
