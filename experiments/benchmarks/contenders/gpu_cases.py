"""What the first minutes on a GPU run: networks on random data, and layers compared with the CPU."""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxnn_networks
import numpy as np
from gpu_processes import Case, Group, Process
from harness import per_call
from problems import SETTINGS
from sweep_networks import NETWORKS, Config, adam

import jaxnn as jn
from jaxnn.parallel import find_devices

STEPS = 16  # from one report to the next where a network is timed
# Largest errors, relative to the largest value. TF32 is what XLA makes of float32 products by default.
TOLERANCES = {"float32": 5e-5, "tf32": 5e-3, "bfloat16": 3e-2}
ATTENTION = "cudnn bfloat16", "xla bfloat16", "xla float32", "xla tf32", "math float32", "memory_efficient float32"


def networks(*, small: bool) -> dict[str, Callable[[], jn.Experiment]]:
    """Returns experiments by name, which are made when they are called; ``small`` are those for a CPU."""
    if small:
        return {name: functools.partial(untimed, network.experiment) for name, network in NETWORKS.items()}
    gru = jn.models.RecurrentClassifier(2, vocabulary_size=20_000, layer=jn.nn.GRU)
    return {
        "mlp": functools.partial(known, "mnist_mlp"),
        "cnn": functools.partial(known, "mnist_cnn"),
        "resnet20": functools.partial(known, "resnet20"),
        "lstm": functools.partial(known, "imdb_lstm"),
        "gru": functools.partial(known, "imdb_lstm", gru),
        "gpt": functools.partial(known, "char_gpt", dtype="bfloat16", batch_size=64),
        "gpt2_124m": gpt2,
        "resnet50": resnet50,
    }


def untimed(experiment: jn.Experiment) -> jn.Experiment:
    """Returns the experiment with more steps than are trained."""
    return experiment.replace(num_steps=10**8)


def made(model: Any, arrays: Any, batch_size: int, dtype: str) -> jn.Experiment:
    """Returns an experiment that trains ``model`` with Adam."""
    splits, policy = jn.data.arrays(train=arrays), jn.nn.Policy(compute=dtype)
    task = jn.tasks.next_token if np.ndim(arrays[1]) == 2 else jn.tasks.classification
    return untimed(
        jn.Experiment(Config(batch_size=batch_size), lambda _: splits, lambda _: task(model, policy=policy), adam)
    )


def known(name: str, model: Any = None, dtype: str = "float32", batch_size: int = 0) -> jn.Experiment:
    """Returns a network of ``peers.py``, or another ``model`` on its data."""
    setting = SETTINGS[name]
    arrays = setting.make(np.random.default_rng(0), 16 * setting.batch_size)
    model = model or jaxnn_networks.network(name, dropout=False)
    return made(model, arrays, batch_size or setting.batch_size, dtype)


def gpt2(classes: int = 50_257, *, small: bool = False) -> jn.Experiment:
    """Returns GPT-2 124M with an output layer of its own, 16 × 1,024 tokens in bfloat16."""
    length, layers, features = (16, 1, 24) if small else (1024, 12, 768)
    text = np.random.default_rng(0).integers(0, min(classes, 50_257), (64, length + 1))
    model = jn.models.GPT(classes, num_layers=layers, features=features, num_heads=12, max_length=length)
    return made(model, (text[:, :-1], text[:, 1:]), 16, "bfloat16")


def resnet50() -> jn.Experiment:
    """Returns ResNet-50, 256 images in bfloat16."""
    photographs = np.random.default_rng(0).integers(0, 256, (512, 224, 224, 3), np.uint8)
    model = jn.models.ResNet(1000, num_blocks=(3, 4, 6, 3), features=64, block=jn.models.Bottleneck, stem="imagenet")
    return made(model, (photographs, np.arange(512) % 1000), 256, "bfloat16")


def training(experiment: jn.Experiment, kind: str, seconds: float, **options: Any) -> tuple[float, Callable[[], float]]:
    """Trains some steps, and returns their last loss and a measure of `STEPS` more by jaxnn's loop."""
    cadence: dict[str, Any] = {"steps_per_call": STEPS, "report_every": STEPS, "eval_every": 0, "checkpoint_every": 0}
    silent: dict[str, Any] = {"record": False, "progress": "none", "device": kind}
    reports = iter(jn.iterate(experiment, **cadence, **silent, **options))
    losses = [next(reports).metrics["train_loss"] for _ in range(4)]  # compiles, and fills the device's queue
    return float(losses[-1]), per_call(lambda: next(reports), seconds)


def gradients(function: Callable[..., jax.Array], *args: Any) -> Any:
    """Returns the result of ``function`` and its gradients."""
    out, pull = jax.vjp(function, *args)
    return out, pull(jnp.cos(jnp.arange(out.size, dtype="float32")).reshape(out.shape).astype(out.dtype))


def compiled(function: Any, args: Any, device: jax.Device, precision: str, *dtypes: str) -> Callable[[], Any]:
    """Returns a call of `gradients` on ``device``, with ``args`` cast to the first of ``dtypes``, then the next."""
    with jax.default_device(device), jax.default_matmul_precision(precision):
        for dtype in dtypes:
            args = jax.tree.map(lambda leaf, dtype=dtype: jnp.asarray(leaf, dtype), args)
        program = jax.jit(functools.partial(gradients, function)).lower(*args).compile()
    return lambda: jax.block_until_ready(program(*args))


def compared(
    kind: str, what: dict[str, str], function: Any, args: Any, expected: Callable[[str], Any], timed: bool
) -> Case:
    """Compares ``function(*args)`` and its gradients with those ``expected`` of arguments of a dtype, or times them."""
    dtype = "float32" if what["dtype"] == "tf32" else what["dtype"]
    precision, tolerance = "default" if what["dtype"] == "tf32" else "highest", TOLERANCES[what["dtype"]]

    def begin() -> tuple[dict[str, Any], Callable[[], float] | None]:
        call = compiled(function(what["implementation"]), args(), find_devices(kind)[0], precision, dtype)
        mine, error = call(), 0.0
        if timed:
            return {}, per_call(call, 0.02)
        for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(expected(dtype)), strict=True):
            one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
            error = float(np.maximum(error, np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-6)))
        return {"error": error, "tolerance": tolerance, "ok": error <= tolerance}, None

    return Case(what, begin)


def layers(kind: str, *, small: bool, timed: bool) -> list[Group]:
    """Returns a process for each variant of an operation, with a case for each implementation and dtype.

    A case compares results and gradients with the reference on the CPU, or is ``timed``.
    """
    rng, found = np.random.default_rng(0), list[Group]()
    batch, steps, heads, size = (2, 16, 2, 8) if small else (4, 256, 4, 64)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    def add(operation: str, variant: str, modes: Any, make: Callable[..., Any], args: Any, **options: Any) -> None:
        function = functools.partial(make, **options)
        args = args if callable(args) else lambda args=args: args
        reference = function({"attention": "math", "recurrence": "fused_inputs"}.get(operation, "xla"))

        @functools.cache
        def expected(dtype: str) -> Any:
            # In float32, of the values that the case has.
            return compiled(reference, args(), jax.devices("cpu")[0], "highest", dtype, "float32")()

        cases = []
        for name, dtype in map(str.split, modes):
            what = {"operation": operation, "variant": variant, "implementation": name, "dtype": dtype}
            cases.append(compared(kind, what, function, args, expected, timed))
        found.append(Group([Process(cases)], rounds=3))

    def attention(name: str, **options: Any) -> Any:
        return functools.partial(jn.nn.attention, implementation=name, **options)

    def recurrent(name: str, cell: Any = None, both: bool = False, counts: Any = None) -> Any:
        layers = [cell(size, implementation=name) for _ in range(1 + both)]
        module: Any = jn.nn.Bidirectional(*layers) if both else layers[0]
        # Outputs past the end of a sequence are undefined.
        inside = counts is not None and (np.arange(steps) < counts[:, None])[..., None]
        return module, lambda params, x: jnp.where(inside, module.apply(params, x, seq_lengths=counts), 0)

    def convolution(name: str, **options: Any) -> Any:
        return functools.partial(jn.nn.conv_general_dilated, implementation=name, padding="SAME", **options)

    def batch_norm(name: str) -> Any:
        module = jn.nn.BatchNorm(use_running_average=False, implementation=name)
        stats = {"mean": np.zeros(size, np.float32), "var": np.ones(size, np.float32)}
        return lambda params, x: module.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])[0]

    def cross_entropy(name: str, labels: Any = None) -> Any:
        return lambda hidden, kernel: jn.nn.cross_entropy(hidden @ kernel, labels)

    counts, full = np.linspace(steps // 4, steps, batch).astype(np.int32), np.full(batch, steps, np.int32)
    variants: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"causal": True}, "lengths": {"lengths": counts}}
    variants |= {"mask": {"mask": rng.random((batch, 1, steps, steps)) < 0.7}}
    variants |= {
        "bias": {"bias": normal(1, heads, steps, steps)},
        "grouped": {"causal": True},
        "long": {"causal": True},
    }
    for variant, options in variants.items():
        time_, groups = steps * (8 if variant == "long" else 1), heads // (2 if variant == "grouped" else 1)
        arrays = [normal(batch, time_, count, size) for count in (heads, groups, groups)]
        add("attention", variant, ATTENTION, attention, arrays, **options)
    words = normal(batch, steps, size)

    @functools.cache
    def cell_and_words(cell: Any, both: bool) -> tuple[Any, np.ndarray]:
        with jax.default_device(jax.devices("cpu")[0]):
            module, _ = recurrent("fused_inputs", cell=cell, both=both)
            return jax.device_get(module.init(jax.random.key(0), words)), words

    for cell, names in ((jn.nn.LSTM, ("cudnn", "fused_inputs")), (jn.nn.GRU, ("fused_inputs",))):
        modes = [f"{name} {dtype}" for name in names for dtype in ("float32", "tf32")]
        for variant, both, each in (("plain", False, full), ("lengths", False, counts), ("both", True, full)):
            options = {"cell": cell, "both": both, "counts": each}
            run = lambda name, **options: recurrent(name, **options)[1]  # noqa: E731
            args = functools.partial(cell_and_words, cell, both)
            add("recurrence", f"{cell.__name__} {variant}", modes, run, args, **options)
    modes = [f"{name} {dtype}" for name in ("xla", "channels_last") for dtype in TOLERANCES]
    for variant, width, stride, groups in (("3x3", 3, 1, 1), ("strided", 3, 2, 1), ("depthwise", 3, 1, size)):
        options = {"window_strides": (stride, stride), "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        arrays = [normal(8 * batch, 16, 16, size), normal(width, width, size // groups, size) / width]
        add("convolution", variant, modes, convolution, arrays, **options, feature_group_count=groups)
    arrays, options["window_strides"] = [normal(batch, 8, 16, 16, 8), normal(batch, 3, 3, 8, 16) / 3], (1, 1)
    members = lambda name, **options: jax.vmap(convolution(name, **options))  # noqa: E731
    modes = [f"{name} {dtype}" for name in ("xla", "patches") for dtype in TOLERANCES]
    add("convolution", "members", modes, members, arrays, **options)
    affine, images = {"scale": normal(size), "bias": normal(size)}, 2 + normal(8 * batch, 8, 8, size)
    add("normalization", "BatchNorm", ("xla float32", "custom_vjp float32"), batch_norm, (affine, images))
    classes = 8 * size if small else 32_000
    head, labels = normal(size, classes) / math.sqrt(size), rng.integers(0, classes, (batch, steps))
    modes = [f"xla {dtype}" for dtype in TOLERANCES]
    add("cross-entropy", f"{classes:,} classes", modes, cross_entropy, (words, head), labels=labels)
    # One variant of each operation first: time may not suffice for all.
    seen, ranked = collections.Counter[str](), list[tuple[int, Group]]()
    for group in found:
        seen.update([key := group.processes[0].cases[0].what["operation"]])
        ranked.append((seen[key], group))
    return [group for _, group in sorted(ranked, key=lambda pair: pair[0])]
