"""A contender in its own process: reads requests as JSON lines on stdin and answers on stdout.

check, steps   losses of the first steps without dropout
start, steps   builds, then trains two rounds; the time of the first minus the second, for compilation
run            another round with the same number of steps; its seconds and mean loss
quit           peak memory, versions, notes
"""

import argparse
import functools
import importlib
import importlib.metadata
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import problem

MODULES = {
    "torch": "torch_contender",
    "torch_compile": "torch_contender",
    "torch_graphs": "torch_contender",
    "keras_torch": "keras_contender",
    "keras_jax": "keras_contender",
    "jaxnn": "jax_contender",
    "jaxnn_flax": "jax_contender",
    "jax": "jax_contender",
}
PACKAGES = ("numpy", "torch", "keras", "jax", "jaxlib", "flax", "optax", "jaxnn")


def prepare(contender: str, device: str, cache: str) -> None:
    """Sets environment variables, before the libraries are imported."""
    if contender.startswith("keras_"):
        os.environ["KERAS_BACKEND"] = contender.removeprefix("keras_")
    if device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    # No compile cache of an earlier process is used: compile_seconds is that of a first run.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache


def check(make: Callable[..., Callable[[], float]], steps: int) -> dict[str, Any]:
    """Returns the losses of the first steps without dropout."""
    step = make(dropout=False, steps=1)
    return {"losses": [step() for _ in range(steps)]}


def start(make: Callable[..., Callable[[], float]], steps: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """Returns a warm round, and the time of the first round minus the second."""
    round_ = make(dropout=True, steps=steps)
    first, second = run(round_), run(round_)
    return round_, {"compile_seconds": max(0.0, first["seconds"] - second["seconds"])}


def run(round_: Callable[[], float]) -> dict[str, Any]:
    """Times one round."""
    started = time.perf_counter()
    loss = round_()
    return {"seconds": time.perf_counter() - started, "loss": loss}


def describe(notes: list[str]) -> dict[str, Any]:
    """Returns the peak resident memory, the versions of the packages in use, and the contender's notes."""
    unit = 1 if sys.platform == "darwin" else 1024
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in sys.modules}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    machine = {}
    if "jaxnn" in sys.modules:
        sys.path.append(str(Path(__file__).parents[1]))
        from harness import describe_machine

        machine = {"machine": describe_machine()._asdict()}
    return {**machine, "peak_bytes": peak, "versions": {"python": sys.version.split()[0], **versions}, "notes": notes}


def answers(requests: Iterable[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields an answer to each request; errors are answers too."""
    notes: list[str] = []
    options = problem.Options(arguments.contender, arguments.device, arguments.dtype, notes.append)

    def make(**settings: Any) -> Callable[[], float]:
        module = importlib.import_module(MODULES[arguments.contender])
        made: Callable[[], float] = module.make(problem.read(arguments.folder), options=options, **settings)
        return made

    round_: Callable[[], float] | None = None
    for request in map(json.loads, requests):
        try:
            if request["command"] == "check":
                yield check(make, request["steps"])
            elif request["command"] == "start":
                round_, answer = start(make, request["steps"])
                yield answer
            elif request["command"] == "run":
                if round_ is None:
                    raise RuntimeError("send start before run")
                yield run(round_)
            else:
                yield describe(notes)
                return
        except Exception as error:
            yield {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answers until quit; output of libraries goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=MODULES)
    parser.add_argument("folder", type=Path, metavar="PROBLEM_DIR")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    send = functools.partial(print, file=out, flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        prepare(arguments.contender, arguments.device, cache)
        for answer in answers(sys.stdin, arguments):
            send(json.dumps(answer))


if __name__ == "__main__":
    main()
