"""A6, A10: the rate and the error of matrix products in each precision."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from articles.studies.study_devices import cases_by_size
from articles.studies.study_pictures import draw_dots, draw_lines, panels
from articles.studies.study_rows import GROWING, fastest, rate_finding, without_overhead
from harness import Bench, Case, Finding, NotMeasured, Plain, Rows, Study, quantity
from jax import lax

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of square factors in rows; the error is measured at ``error_size``, at most 2,048."""

    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    largest_on_cpu: int = 2048
    error_size: int = 1024
    rounds: int = 5
    seconds: float = 0.2
    grow_until: float = 0.002


QUICK = Settings((64, 256, 512), 512, 256, rounds=3, seconds=0.02)


TILE = 2048


class Precision(NamedTuple):
    """The precision of a matrix product.

    Attributes:
        dtype: of the factors.
        result: dtype of the sums.
        algorithm: of a float32 product on a GPU; None: by the dtype.
        on: kinds of device that support it in hardware.
        since: minimum compute capability of an NVIDIA GPU.
    """

    dtype: Any
    result: Any
    algorithm: lax.DotAlgorithmPreset | None = None
    on: tuple[str, ...] = ("cpu", "gpu", "tpu")
    since: float = 0.0


PRECISIONS: Mapping[str, Precision] = {
    "float64": Precision(jnp.float64, jnp.float64, on=("cpu", "gpu")),
    "float32": Precision(jnp.float32, jnp.float32, lax.DotAlgorithmPreset.F32_F32_F32),
    "tf32": Precision(jnp.float32, jnp.float32, lax.DotAlgorithmPreset.TF32_TF32_F32, on=("gpu",), since=8.0),
    "bfloat16": Precision(jnp.bfloat16, jnp.float32, since=8.0),
    "float16": Precision(jnp.float16, jnp.float32, on=("cpu", "gpu")),
    "int8": Precision(jnp.int8, jnp.int32),
    "fp8": Precision(jnp.float8_e4m3fn, jnp.float32, on=("gpu",), since=8.9),
}


def make_product(precision: Precision, platform: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a jitted ``(left [n, n], right [n, n]) -> [n, n]`` that sums in ``precision.result``."""
    # On other devices the dtype alone decides.
    algorithm = precision.algorithm if platform == "gpu" else None
    options: dict[str, Any] = {"precision": algorithm, "preferred_element_type": precision.result}
    return jax.jit(functools.partial(jnp.matmul, **options))


def make_factors(name: str, size: int, device: jax.Device) -> list[jax.Array]:
    """Returns two factors ``[size, size]`` rounded to ``name`` on ``device``; int8 in steps of 1/32.

    Larger ones repeat a square of 2,048 rows: drawing gigabytes on the host would take longer than the products.
    """
    times = size // TILE if size % TILE == 0 else 1
    rounded = (np.clip(np.round(32 * x), -127, 127) if name == "int8" else x for x in _normal(size // times))
    tiles = [jax.device_put(x.astype(PRECISIONS[name].dtype), device) for x in rounded]
    return tiles if times == 1 else [jnp.tile(tile, (times, times)) for tile in tiles]


def _normal(size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((size, size)) for _ in range(2)]


@functools.cache
def exact_product(size: int) -> np.ndarray:
    """Returns the product of the factors before rounding, in the widest type of the host."""
    left, right = (x.astype(np.longdouble) for x in _normal(size))
    product: np.ndarray = left @ right
    return product


def relative_error(name: str, product: Any) -> float:
    """Returns the Frobenius norm of the error of ``product``, over that of the exact product."""
    exact = exact_product(len(product))
    found = np.asarray(product, np.float64) / (32.0**2 if name == "int8" else 1.0)
    error = (found - exact).astype(np.float64)
    return float(np.linalg.norm(error) / np.linalg.norm(exact.astype(np.float64)))


def _begin(name: str, size: int, kind: str, device: jax.Device) -> Callable[[], Any]:
    precision = PRECISIONS[name]
    if kind not in precision.on:
        raise NotMeasured(f"{kind.upper()}s do not support it in hardware")
    if (capability := compute_capability(device)) is not None and capability < precision.since:
        raise NotMeasured(f"it needs compute capability {precision.since}, and this GPU has {capability}")
    with jax.enable_x64(name == "float64"):
        left, right = make_factors(name, size, device)
        product = make_product(precision, kind)
        compiled = product.lower(left, right).compile()  # type: ignore[attr-defined]
    return lambda: compiled(left, right)


def compute_capability(device: Any) -> float | None:
    """Returns the compute capability of an NVIDIA GPU, such as 9.0; None for other devices."""
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):
        return None


def _error(name: str, size: int, kind: str, device: jax.Device) -> dict[str, Plain]:
    with jax.enable_x64(name == "float64"):
        product = make_product(PRECISIONS[name], kind)(*make_factors(name, size, device))
    return {"error": relative_error(name, product)}


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    return cases_by_size(bench, PRECISIONS, _case)


def _case(settings: Settings, name: str, size: int, kind: str, device: jax.Device) -> Case:
    precision = PRECISIONS[name]
    item_bytes = 2 * jnp.dtype(precision.dtype).itemsize + jnp.dtype(precision.result).itemsize
    return Case(
        kind,
        {"size": size, "dtype": name},
        functools.partial(_begin, name, size, kind, device),
        2.0 * size**3,
        "FLOP",
        functools.partial(_error, name, size, kind, device) if size == settings.error_size else None,
        queued=True,
        num_bytes=item_bytes * size**2,
        larger=functools.partial(_case, settings, name, 2 * size, kind, device),
    )


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for name in PRECISIONS:
        errors = [row.observed["error"] for row in rows.where(dtype=name) if "error" in row.observed]
        note = f"error {errors[0]:.1e}" if errors else ""
        article = {"float16": "Volta: 12× its float32", "tf32": "A100: up to 20× V100's float32"}.get(name, "")
        found.append(rate_finding("A6, A10", f"{name}, best rate", rows.where(dtype=name), article=article, note=note))
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    sentences = []
    for label, rows in columns.items():
        best = {name: fastest(rows.where(dtype=name)) for name in PRECISIONS}
        sound, hidden = without_overhead(label, best, rows)
        sentences += hidden
        rates = {name: row.rate for name, row in sound.items() if row.rate is not None}
        if (plain := rates.pop("float32", None)) is None:
            continue
        ratios = [f"{name} {rate.median / plain.median:.2g}" for name, rate in rates.items()]
        if ratios:
            sentences.append(f"{label}: rate relative to float32: {', '.join(ratios)}.")
        half = [row for row in rows.where(dtype="float32") if row.rate and row.rate.median >= plain.median / 2]
        sentences.append(f"{label}: float32 reaches half of its best rate from {half[0].what['size']} rows.")
    return sentences


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    rate, error = panels(figure, ("rate", "error of a product"))
    draw_lines(rate, columns, across="size", lines="dtype")
    rate.set_xlabel("rows of the square factors")
    rate.set_ylabel("FLOP/s")
    errors = {
        label: [
            (str(row.what["dtype"]), quantity([float(row.observed["error"] or 0)], ""))
            for row in rows
            if "error" in row.observed
        ]
        for label, rows in columns.items()
    }
    draw_dots(error, errors)
    error.set_xlabel("relative to the exact product")


STUDY = Study(
    name="matmul",
    claims=("A6", "A10"),
    title="What are the rate and the error of matrix products in each precision?",
    method=(
        "Products of square factors that are on the device, 2n³ operations: calls and the wait for their results are"
        " timed, transfers and compilation are not. "
        f"{GROWING} "
        "The error is the Frobenius norm of the difference from the product of the unrounded factors in extended "
        "precision, over its norm: it includes the rounding of the factors."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
