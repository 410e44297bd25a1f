"""A contender in a process of its own: asked by JSON lines on its standard input, answers on its standard output.

check, steps   losses of the first steps, dropout off
start, steps   builds, then trains two rounds; the seconds that the first took beyond the second, for compiling
run            one more round of as many steps; its seconds and mean loss
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
    "keras_torch": "keras_contender",
    "keras_jax": "keras_contender",
    "jaxnn": "jax_contender",
    "jaxnn_flax": "jax_contender",
    "jax": "jax_contender",
}
PACKAGES = ("numpy", "torch", "keras", "jax", "jaxlib", "flax", "optax", "jaxnn")


def prepare(contender: str, device: str, cache: str) -> None:
    """Sets the environment that must stand before the libraries are imported."""
    if contender.startswith("keras_"):
        os.environ["KERAS_BACKEND"] = contender.removeprefix("keras_")
    if device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    # Nothing compiled by an earlier process is found again: compile_seconds is what a first run costs.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache


def check(make: Callable[..., Callable[[], float]], steps: int) -> dict[str, Any]:
    """The loss of each of the first steps, dropout off."""
    step = make(dropout=False, steps=1)
    return {"losses": [step() for _ in range(steps)]}


def start(make: Callable[..., Callable[[], float]], steps: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """A warm round, and what the first one took beyond a second."""
    round_ = make(dropout=True, steps=steps)
    first, second = run(round_), run(round_)
    return round_, {"compile_seconds": max(0.0, first["seconds"] - second["seconds"])}


def run(round_: Callable[[], float]) -> dict[str, Any]:
    """Times one round."""
    began = time.perf_counter()
    loss = round_()
    return {"seconds": time.perf_counter() - began, "loss": loss}


def describe(notes: list[str]) -> dict[str, Any]:
    """The process's largest resident size, the versions of the packages in use, the contender's notes."""
    unit = 1 if sys.platform == "darwin" else 1024
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in sys.modules}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    machine = {}
    if "jaxnn" in sys.modules:
        from jaxnn.bench import describe_machine

        machine = {"machine": describe_machine()._asdict()}
    return {**machine, "peak_bytes": peak, "versions": {"python": sys.version.split()[0], **versions}, "notes": notes}


def answers(requests: Iterable[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """An answer to each request; what goes wrong is an answer too."""
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
                    raise RuntimeError("start comes before run")
                yield run(round_)
            else:
                yield describe(notes)
                return
        except Exception as error:
            yield {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answers until told to quit; what libraries print goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=MODULES)
    parser.add_argument("folder", type=Path, metavar="PROBLEM_DIR")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tell = functools.partial(print, file=out, flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        prepare(arguments.contender, arguments.device, cache)
        for answer in answers(sys.stdin, arguments):
            tell(json.dumps(answer))


if __name__ == "__main__":
    main()
