"""A13: latency and throughput of inference with ResNet-50 and MobileNetV2."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from articles.studies.study_devices import cpus_with_gpus
from articles.studies.study_pictures import draw_lines, panels
from articles.studies.study_rows import distinct, fastest, rate_finding, without_overhead
from flax import linen
from harness import Bench, Case, Finding, Plain, Row, Rows, Study

from jaxnn.models import Bottleneck, MobileNetV2, ResNet
from jaxnn.nn import Policy
from jaxnn.types import PyTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCKS: dict[str, Any] = {"num_blocks": (3, 4, 6, 3), "block": Bottleneck}
NETWORKS: dict[str, Callable[[], linen.Module]] = {
    "ResNet-50": lambda: ResNet(1000, **BLOCKS, features=64, stem="imagenet"),
    "MobileNetV2": MobileNetV2,
}
ARTICLE = "3 GPUs 804 % faster than 5 CPU nodes"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Images of ``size`` by ``size`` pixels; a CPU runs batches up to ``largest_on_cpu``."""

    size: int = 224
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    largest_on_cpu: int = 8
    precisions: tuple[str, ...] = ("float32", "bfloat16")
    rounds: int = 5
    seconds: float = 0.5
    grow_until: float = 0.002


QUICK = Settings(batches=(1, 4), precisions=("float32",), rounds=2, seconds=0.05)


def make_variables(model: linen.Module, size: int) -> PyTree:
    """Returns random kernels and identity norms on the host: compiling the models' own init takes a minute."""
    random = np.random.default_rng(0)

    def fill(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> np.ndarray:
        if path[-1].key == "kernel":
            # He et al. (2015): the outputs of a layer have the variance of its inputs.
            kernel: np.ndarray = random.standard_normal(like.shape, np.float32)
            return kernel * np.float32(math.sqrt(2 / math.prod(like.shape[:-1])))
        return np.full(like.shape, path[-1].key in ("scale", "var"), np.float32)

    pictures = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    return jax.tree.map_with_path(fill, jax.eval_shape(model.init, jax.random.key(0), pictures))


def make_answer(model: linen.Module, policy: Policy) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Returns ``(variables, images uint8 [batch, height, width, 3]) -> logits [batch, classes]``, to be compiled."""

    def answer(variables: PyTree, pictures: jax.Array) -> jax.Array:
        inputs = policy.cast_to_compute(pictures.astype(jnp.float32) / 255.0)
        logits: jax.Array = policy.cast_to_outputs(model.apply(variables, inputs))
        return logits

    return answer


def make_call(
    model: linen.Module, variables: PyTree, precision: str, pictures: np.ndarray, device: jax.Device
) -> Callable[[], np.ndarray]:
    """Returns a call that copies ``pictures`` to the device and their logits back.

    Args:
        model: the network.
        variables: parameters, which are copied to the device now, and running statistics, which stay float32.
        precision: the dtype to compute in.
        pictures: ``[batch, height, width, 3]`` uint8, on the host.
        device: to run on.
    """
    policy = Policy(compute=precision)
    on_device = jax.device_put({**variables, "params": policy.cast_to_compute(variables["params"])}, device)
    sent = jax.device_put(pictures, device)
    with jax.default_device(device):  # layers choose implementations by it
        compiled = jax.jit(make_answer(model, policy)).lower(on_device, sent).compile()
    return lambda: np.asarray(compiled(on_device, jax.device_put(pictures, device)))


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for name, make in NETWORKS.items():
        variables = functools.cache(functools.partial(make_variables, make(), settings.size))
        for batch in settings.batches:
            group = [
                _case(settings, name, variables, precision, batch, kind, device)
                for kind, device in bench.devices.items()
                for precision in settings.precisions
                if kind != "cpu" or batch <= settings.largest_on_cpu
            ]
            if group:
                yield group


def _case(
    settings: Settings,
    name: str,
    variables: Callable[[], PyTree],
    precision: str,
    batch: int,
    kind: str,
    device: jax.Device,
) -> Case:
    shape = (batch, settings.size, settings.size, 3)

    def begin() -> Callable[[], np.ndarray]:
        pictures = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        return make_call(NETWORKS[name](), variables(), precision, pictures, device)

    what: dict[str, Plain] = {"network": name, "precision": precision, "batch": batch}
    return Case(
        kind,
        what,
        begin,
        batch,
        "images",
        num_bytes=200 * math.prod(shape[:3]),  # the images in float32, and two of MobileNetV2's largest feature maps
        larger=functools.partial(_case, settings, name, variables, precision, 4 * batch, kind, device),
    )


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for name in distinct(rows, "network"):
        for precision in distinct(rows, "precision"):
            some = rows.where(network=name, precision=precision)
            best = fastest(some)
            note = "" if best is None else f"batch {best.what['batch']}"
            article = ARTICLE if precision == "float32" else ""
            found += [
                Finding("A13", f"{name}, {precision}: latency of one image", some.one(batch=1).time),
                rate_finding("A13", f"{name}, {precision}: best throughput", some, "batch", article, note),
            ]
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    """Compares the best throughput of each GPU with that of each CPU."""
    sentences, sound = [], dict[str, dict[str, Row]]()
    for label, rows in columns.items():
        best = {name: fastest(rows.where(network=name)) for name in NETWORKS}
        sound[label], hidden = without_overhead(label, best, rows, "batch")
        sentences += hidden
    for cpu, gpu in cpus_with_gpus(columns):
        for name in NETWORKS:
            slow, fast = (row.rate if (row := sound[label].get(name)) else None for label in (cpu, gpu))
            if slow is not None and fast is not None:
                faster = 100 * (fast.median / slow.median - 1)
                sentences.append(f"{name}: {gpu} is {faster:,.0f} % faster than {cpu}; in the article {ARTICLE}.")
    return sentences


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    latency, rate = panels(figure, ("latency", "throughput"))
    named = {label: _named(rows) for label, rows in columns.items()}
    draw_lines(latency, named, across="batch", lines="name", quantity=lambda row: row.time)
    draw_lines(rate, named, across="batch", lines="name")
    latency.set_ylabel("s")
    rate.set_ylabel("images/s")
    for axes in (latency, rate):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("batch size")
    if (legend := latency.get_legend()) is not None:
        legend.remove()  # one for both
        rate.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _named(rows: Rows) -> Rows:
    """Returns the rows with network and precision as one name."""
    return Rows(
        row._replace(what={**row.what, "name": f"{row.what['network']} {row.what['precision']}"}) for row in rows
    )


STUDY = Study(
    name="inference",
    claims=("A13",),
    title="What are the latency of one image and the best throughput of inference?",
    method=(
        "ResNet-50 and MobileNetV2 with random weights. A call copies images of 224 by 224 pixels, uint8, from the "
        "host to the device and the 1,000 logits of each back: transfers are timed, compilation and decoding are "
        "not. Calls do not overlap; on an accelerator batches grow until a call takes 2 ms. Weights are on the "
        "device in the precision of the computation; float32 is the device's default, TF32 on NVIDIA's newer GPUs."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
