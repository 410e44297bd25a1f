"""Pairs that a GPU is asked to time, each with one difference, the expected gain, and what follows from the answer."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from gpu_cases import STEPS, gpt2, networks, training
from gpu_processes import Case, Group, Process
from gpu_record import Day
from harness import per_call
from jax.sharding import SingleDeviceSharding

import jaxnn as jn

REPEATS = 20  # of a layer in one program: what counts is the time within a network
CUBLASLT = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}
# Compiled and tuned again by each process.
AFRESH = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
EQUAL = "equal bits"

type Measured = tuple[dict[str, Any], Callable[[], float]]
type Begin = Callable[[], Measured]


def questions(day: Day) -> list[Group]:
    """Returns all questions, those whose answers are worth most first."""
    found = (of_networks(day), of_forms(day), of_populations(day), transfers(day), of_bits(day), of_start(day))
    groups = [group for groups in found for group in groups]
    if day.small:  # one of each, of two processes at most
        groups = [each[0]._replace(processes=each[0].processes[:2]) for each in found]
    return groups if day.kind == "gpu" else list(map(without_ranges, groups))


def without_ranges(group: Group) -> Group:
    """Returns a group without expected ranges, which are for GPUs."""
    processes = []
    for process in group.processes:
        cases = [case._replace(expected=EQUAL if case.expected == EQUAL else None) for case in process.cases]
        processes.append(process._replace(cases=cases))
    return group._replace(processes=processes)


def asked(question: str, sides: Mapping[str, tuple[Any, ...]], then: str, unit: str = "call", **options: Any) -> Group:
    """Returns a question of sides ``{name: (begin, environment, expected)}``, each in a process of its own.

    ``expected`` is the range of the side's speed over that of the first one.
    """
    processes = []
    for side, (begin, environment, *expected) in sides.items():
        work = STEPS if unit == "step" else 1
        case = Case({"question": question, "side": side}, begin, work, unit, *expected)
        processes.append(Process([case], environment))
    return Group(processes, then=then, **options)


def together(
    question: str, sides: Mapping[str, tuple[Any, ...]], then: str, *, work: float = REPEATS, unit: str = "call"
) -> Group:
    """Returns a question of sides ``{name: (begin, expected)}`` in one process, each of which does ``work``."""
    cases = []
    for side, (begin, *expected) in sides.items():
        cases.append(Case({"question": question, "side": side}, begin, work, unit, *expected))
    return Group([Process(cases)], then=then)


def trained(day: Day, network: str, **options: Any) -> Begin:
    """Trains a network, and observes the bits of a loss."""

    def begin() -> Measured:
        loss, measure = training(networks(small=day.small)[network](), day.kind, 0.15, **options)
        return {"bits": loss.hex()}, measure

    return begin


def of_gpt2(day: Day, classes: int, pads: bool = True) -> Begin:
    """Trains GPT-2 with this many classes, which jaxnn ``pads`` as it does by default, or not."""

    def begin() -> Measured:
        if not pads:  # for the rest of this process; there is no option for it
            mock.patch("jaxnn.nn._dense.padded_classes", lambda count: count).start()
        _, measure = training(gpt2(classes, small=day.small), day.kind, 0.15)
        return {}, measure

    return begin


def of_networks(day: Day) -> list[Group]:
    """Returns the questions about the compiler's options and shapes of whole networks."""
    ragged, even = (503, 512) if day.small else (50_257, 50_304)
    sides = {
        f"{ragged:,} classes": (of_gpt2(day, ragged, pads=False), {}),
        "padded": (of_gpt2(day, ragged), {}, (1.0, 1.3)),
        "padded, cuBLASLt instead of Triton": (of_gpt2(day, ragged), CUBLASLT, (1.1, 1.5)),
        f"{even:,} classes": (of_gpt2(day, even), {}, (1.0, 1.3)),
    }
    then = "below 1: no padding; cuBLASLt faster than Triton: set xla_gpu_enable_triton_gemm where products are large"
    found = [asked("GPT-2 124M: classes and products", sides, then, unit="step")]
    for network, title, expected in (("resnet20", "ResNet-20", (2.0, 4.0)), ("cnn", "MNIST CNN", (1.2, 3.0))):
        sides = {
            "launched one by one": (trained(day, known(day, network)), {"JAXNN_COMPILER_OPTIONS": "off"}),
            "in graphs": (trained(day, known(day, network)), {}, expected),
        }
        then = "below 1: leave convolutions out of graphs"
        found.append(asked(f"{title}: convolutions in CUDA graphs", sides, then, unit="step"))
    return found


def known(day: Day, network: str) -> str:
    """Returns a network that is also among the small ones."""
    found = networks(small=day.small)
    return network if network in found else "cnn"


def repeated(function: Callable[..., Any], *args: Any, **facts: Any) -> Measured:
    """Returns the facts, and a measure of `REPEATS` values with gradients, each of which depends on the one before."""
    step = jax.value_and_grad(lambda *args: function(*args).astype("float32").sum(), tuple(range(len(args))))

    @jax.jit
    def many(args: Any) -> Any:
        def body(_: Any, args: Any) -> Any:
            value, grads = step(*args)
            return jax.tree.map(lambda old, new: old + (1e-6 * (new + value)).astype(old.dtype), args, grads)

        return jax.lax.fori_loop(0, REPEATS, body, args)

    call = lambda: jax.block_until_ready(many(args))  # noqa: E731
    call()
    return facts, per_call(call, 0.1)


def of_forms(day: Day) -> list[Group]:
    """Returns which form of attention and LSTM is faster, by size: the rows of ``jaxnn/kernels/measured.json``."""
    then = "gpu_day.py --write-measured jaxnn/kernels/measured.json"
    tokens, batch, steps = (64, 2, 4) if day.small else (16_384, 64, 64)
    found, gpu = [], day.kind == "gpu"

    def attention(name: str, length: int) -> Measured:
        keys, shape = jax.random.split(jax.random.key(0), 3), (tokens // length, length, 12, 64)
        arrays = [jax.random.normal(key, shape, "bfloat16") for key in keys]
        text = f"value and gradients, {shape[0]} × {length} queries and keys, 12 heads of 64, causal"
        facts = {"operation": "attention", "dtype": "bfloat16", "size": length, "of": text}
        return repeated(functools.partial(jn.nn.attention, causal=True, implementation=name), *arrays, **facts)

    def lstm(name: str, features: int) -> Measured:
        x = jax.random.normal(jax.random.key(0), (batch, steps, features))
        params = jn.nn.LSTM(features, implementation="fused_inputs").init(jax.random.key(1), x)
        text = f"value and gradients of an LSTM, {batch} × {steps} steps, {features} features"
        facts = {"operation": "recurrence", "dtype": "float32", "size": features, "of": text}
        return repeated(jn.nn.LSTM(features, implementation=name).apply, params, x, **facts)

    attended = {64: (0.4, 1.0), 256: (0.5, 1.2), 1024: (1.2, 4.0), 4096: (2.0, 12.0)}
    for length, expected in ({16: (0.1, 10.0)} if day.small else attended).items():
        names = ("xla", "cudnn") if gpu else ("math", "xla")
        sides = {name: (functools.partial(attention, name, length), expected) for name in names}
        found.append(together(f"attention in bfloat16, {tokens:,} tokens, length {length}", sides, then))
    recurrent = {64: (0.3, 0.8), 128: (0.4, 1.0), 256: (0.5, 1.2), 512: (0.7, 1.6), 1024: (0.8, 2.5)}
    for features, expected in ({8: (0.1, 10.0)} if day.small else recurrent).items():
        names = ("fused_inputs", "cudnn") if gpu else ("fused_inputs", "native")
        sides = {name: (functools.partial(lstm, name, features), expected) for name in names}
        found.append(together(f"LSTM, {batch} × {steps} steps, {features} features", sides, then))
    return found


def of_populations(day: Day) -> list[Group]:
    """Returns how members with kernels of their own are convolved best."""
    members, batch = (2, 4) if day.small else (64, 64)
    options: Any = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def convolved(name: str, side: int, inputs: int, outputs: int) -> Measured:
        x = jax.random.normal(jax.random.key(0), (members, batch, side, side, inputs))
        kernels = jax.random.normal(jax.random.key(1), (members, 3, 3, inputs, outputs))
        one = functools.partial(jn.nn.conv_general_dilated, **options, implementation=name)
        return repeated(jax.vmap(one), x, kernels)

    found = []
    for side, inputs, outputs in ((28, 1, 8), (14, 8, 16)):
        forms = {"xla": None, "patches": (5.0, 20.0), "channels_last": (2.0, 20.0)}
        sides = {
            name: (functools.partial(convolved, name, side, inputs, outputs), each) for name, each in forms.items()
        }
        title = f"{members} members: 3×3 convolution of {side}×{side}, {inputs} to {outputs}"
        found.append(together(title, sides, "prefer the fastest form for members on GPUs"))
    return found


def transfers(day: Day) -> list[Group]:
    """Returns whether pinned memory is faster, in both directions."""
    array = np.ones((2**16 if day.small else 2**26) // 4, np.float32)

    def send(pinned: bool) -> Measured:
        there = SingleDeviceSharding(day.device)
        host = there.with_memory_kind("pinned_host")

        def call() -> Any:
            return jax.block_until_ready(jax.device_put(jax.device_put(array, host) if pinned else array, there))

        call()
        return {}, per_call(call, 0.1)

    def fetch(pinned: bool) -> Measured:
        add = jax.jit(lambda x: x + 1)
        x = jax.device_put(array, day.device)

        def call() -> float:
            fresh = jax.block_until_ready(add(x))  # JAX keeps what was fetched from an array
            started = time.perf_counter()
            np.asarray(jax.device_put(fresh, fresh.sharding.with_memory_kind("pinned_host")) if pinned else fresh)
            return time.perf_counter() - started

        call()
        return {}, call

    found = []
    for direction, function, expected in (("to", send, (2.0, 6.0)), ("from", fetch, (5.0, 16.0))):
        forms = {
            "pageable": (functools.partial(function, False), None),
            "pinned": (functools.partial(function, True), expected),
        }
        title = f"{array.nbytes:,} bytes {direction} the device"
        then = "below 1: transfer by pageable memory"
        found.append(together(title, forms, then, work=array.nbytes, unit="B"))
    return found


def of_bits(day: Day) -> list[Group]:
    """Returns whether two processes, each of which compiles and tunes, compute equal bits."""
    found = []
    for network in ("resnet20", "gpt"):
        for deterministic, expected in ((False, None), (True, EQUAL)):
            begin = trained(day, known(day, network), deterministic=deterministic)
            sides = {"one process": (begin, AFRESH), "another": (begin, AFRESH, expected)}
            then = "a fault of deterministic" if deterministic else "docs/gpu.md says so"
            title = f"{network}: equal bits{', deterministic' if deterministic else ''}"
            found.append(asked(title, sides, f"if not equal: {then}", unit="step", rounds=2))
    return found


def of_start(day: Day) -> list[Group]:
    """Returns what the cache of autotuning, which JAX keeps beside programs, saves of a start that must compile."""
    code = "import sys, gpu_questions as g; g.start(sys.argv[1], sys.argv[2] == 'small')"
    command = [sys.executable, "-c", code, day.kind, "small" if day.small else "full"]

    def begin(keeps_tuning: bool) -> Measured:
        folder = Path(tempfile.mkdtemp(dir=day.work))
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder), "PYTHONPATH": paths}

        def measure() -> float:
            for path in folder.iterdir():
                if path.is_file():
                    path.unlink()
                elif not keeps_tuning:
                    shutil.rmtree(path)
            started = time.perf_counter()
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            return time.perf_counter() - started

        measure()
        return {"kept": ", ".join(path.name for path in folder.iterdir() if path.is_dir())}, measure

    title = "start of the CNN in a new process, without compiled programs"
    sides: dict[str, tuple[Any, ...]] = {"tuning again": (functools.partial(begin, False), {})}
    sides |= {"tuned before": (functools.partial(begin, True), {}, (1.3, 4.0))}
    then = "1.3 or above: keep it in the caches of jn.main and in containers"
    return [asked(title, sides, then, rounds=1 if day.small else 2)]


def start(kind: str, small: bool) -> None:
    """Compiles the CNN and trains some steps."""
    training(networks(small=small)["cnn"](), kind, 0.0)
