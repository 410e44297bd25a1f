"""Training speed of jaxnn, PyTorch, Keras and plain JAX: each contender is a process, timed in alternation.

Claim     on a CPU with two cores and without AVX-512, and the native kernels, jaxnn trains each network 1.2 to 2.9
          times as fast as the fastest form of PyTorch; without them it is slower on convolutional networks and the LSTM
          (results and bounds: docs/performance.md)
Command   make native benchmark

Each contender is a new process in each round. All train the same network from the same initial weights on the same data
with the same optimizer, and must reach the same losses without dropout before they are timed with it. Compilation and
warm-up are timed separately. "Unstable" contenders differ by more than 30 % between rounds: repeat on a quiet machine.
Contenders named ``+malloc`` run with glibc's allocator keeping freed memory (``MALLOC_`` variables).
"""

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from harness import interleaved, ratios
from scipy.stats import wilcoxon  # type: ignore[import-untyped]

from jaxnn.observe import text_table

HERE = Path(__file__).parent
CONTENDERS = HERE / "contenders"
sys.path.insert(0, str(CONTENDERS))
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_ARENA_MAX": "1"}
OURS = ("jaxnn", "jaxnn+malloc", "jaxnn_flax")
ALL = (
    *OURS,
    "jax",
    "jax+malloc",
    "keras_jax",
    "torch",
    "torch+malloc",
    "torch_compile",
    "torch_compile+malloc",
    "keras_torch",
)
NETWORKS = ("mnist_mlp", "mnist_cnn", "cifar10_cnn", "imdb_lstm", "fasttext", "char_gpt", "resnet20")
# The names in the picture.
TITLES = {
    "jaxnn": "jaxnn",
    "jaxnn_flax": "jaxnn, Flax's layers",
    "jax": "jitted step, Flax and Optax",
    "keras_jax": "Keras on JAX",
    "torch": "PyTorch",
    "torch_compile": "torch.compile",
    "keras_torch": "Keras on PyTorch",
    "mnist_mlp": "MNIST MLP",
    "mnist_cnn": "MNIST CNN",
    "cifar10_cnn": "CIFAR-10 CNN",
    "imdb_lstm": "IMDb LSTM",
    "fasttext": "fastText",
    "char_gpt": "character GPT",
    "resnet20": "ResNet-20",
}
# Adam's first steps normalize the gradient, so rounding alone changes the losses by some thousandths.
TOLERANCE = 5e-3
UNSTABLE = 0.3  # of the range of the rounds relative to their median


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run, and where to write the results."""

    networks: tuple[str, ...] = NETWORKS
    contenders: tuple[str, ...] = ALL
    rounds: int = 5
    """Minimum number of timed rounds."""
    precision: float | None = None
    """Continue until the 95 % interval of each median is within this fraction of it."""
    check_steps: int = 10
    """Number of steps whose losses must agree."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    torch_python: str = ".venv-peers/bin/python"
    """Python interpreter with PyTorch and Keras."""
    out: Path = Path("runs/benchmarks")
    """Folder for peers_DEVICE_DTYPE.json and .png."""


class Worker:
    """A contender in its own process, which answers requests as JSON lines."""

    def __init__(self, contender: str, problem: Path, options: Options) -> None:
        name, _, variant = contender.partition("+")
        python = options.torch_python if "torch" in name else sys.executable
        # Temporary files of workers are deleted with the problem.
        environment = os.environ | {"TMPDIR": str(problem)} | (KEEPING if variant == "malloc" else {})
        command = [python, str(CONTENDERS / "worker.py"), name, str(problem)]
        command += ["--device", options.device, "--dtype", options.dtype]
        self.contender = contender
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Returns the worker's answer to ``command``; exits with its error if it failed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"command": command, **arguments}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"the process died\n{self._last_output()}"}
        if "error" in answer:
            raise SystemExit(f"{self.contender}: {command} failed: {answer['error']}")
        return answer

    def _last_output(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-2000:]


@contextlib.contextmanager
def working(contenders: tuple[str, ...], problem: Path, options: Options) -> Iterator[dict[str, Worker]]:
    """Yields a worker for each contender and kills them at the end."""
    workers = {contender: Worker(contender, problem, options) for contender in contenders}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.wait()


def check(problem: Path, options: Options) -> dict[str, float]:
    """Returns the largest relative difference of each contender's losses from the first; exits if it is too large."""
    losses = {}
    names = dict.fromkeys(contender.partition("+")[0] for contender in options.contenders)
    for name in names:
        with working((name,), problem, options) as workers:
            losses[name] = workers[name].ask("check", steps=options.check_steps)["losses"]
    reference = next(iter(losses.values()))
    differences = {
        name: max(abs(loss / other - 1) for loss, other in zip(values, reference, strict=True))
        for name, values in losses.items()
    }
    tolerance = TOLERANCE if options.dtype == "float32" else 20 * TOLERANCE
    for name, difference in differences.items():
        if not difference <= tolerance:
            raise SystemExit(f"{problem.name}: {name} has other losses: {losses[name]} instead of {reference}.")
    return differences


def measure(problem: Path, steps: int, options: Options) -> dict[str, dict[str, Any]]:
    """Times the contenders in alternation, each in a new process in each round: a process may stay slow or fast."""
    results: dict[str, dict[str, Any]] = {}

    def rate(name: str) -> float:
        with working((name,), problem, options) as workers:
            results[name] = workers[name].ask("start", steps=steps)
            seconds = workers[name].ask("run")["seconds"]
            results[name] |= workers[name].ask("quit")
        return float(steps / seconds)

    rates = interleaved(
        {name: functools.partial(rate, name) for name in options.contenders},
        rounds=options.rounds,
        precision=options.precision,
    )
    return {name: {**results[name], "steps_per_second": rates[name]} for name in options.contenders}


def show(network: str, results: dict[str, dict[str, Any]]) -> None:
    """Prints a network's table: steps/s, and the speed of jaxnn relative to each contender in the same round."""
    table = []
    for name, result in results.items():
        rates = result["steps_per_second"]
        ratio = ratios(results["jaxnn"]["steps_per_second"], rates)
        spread = (max(rates) - min(rates)) / statistics.median(rates)
        stability = f"{spread:.0%}{', unstable' if spread > UNSTABLE else ''}"
        speed = f"{statistics.median(rates):.4g}", stability, f"{ratio} times as fast"
        cost = f"{result['compile_seconds']:.1f} s", f"{result['peak_bytes'] / 2**20:.0f} MiB"
        table.append((name, *speed, *cost, f"{result['loss_difference']:.1e}"))
    header = (network, "steps/s", "spread", "jaxnn is", "compile", "peak", "loss difference")
    print(f"\n{text_table(table, header)}", flush=True)


def best_peer(results: dict[str, dict[str, Any]]) -> str:
    """Returns the peer with the highest median."""
    return _best([name for name in results if name not in OURS], results)


def _best(names: list[str], results: dict[str, dict[str, Any]]) -> str:
    return max(names, key=lambda name: statistics.median(results[name]["steps_per_second"]))


def conclude(networks: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Prints the ratio to the best peer for each network, and their geometric mean."""
    print("\nThe best of jaxnn / the best peer; p of Wilcoxon's signed-rank test, at least 0.06 for five rounds")
    table, medians = [], []
    for network, results in networks.items():
        peer = best_peer(results)
        # Both with the allocator as it is and tuned, if measured: the best of each.
        mine = _best([name for name in results if name.partition("+")[0] == "jaxnn"], results)
        ours, theirs = (results[name]["steps_per_second"] for name in (mine, peer))
        ratio = ratios(ours, theirs)
        medians.append(ratio.median)
        chance = wilcoxon(np.log(ours), np.log(theirs)).pvalue if len(ours) > 1 else 1.0
        table.append((network, str(ratio), f"{mine} / {peer}", f"p = {chance:.2g}"))
    table.append(("geometric mean", f"{statistics.geometric_mean(medians):.2f}", "", ""))
    print(text_table(table), flush=True)


def draw(networks: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Draws a bar for each network and contender: median speed relative to the best peer, with minimum and maximum."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use("jaxnn.figure")
    names = list(dict.fromkeys(name for results in networks.values() for name in results))
    width = 0.85 / len(names)
    figure, axes = plt.subplots(figsize=(12, 4.5), layout="constrained")
    for index, name in enumerate(names):
        places, heights, spread = [], [], []
        for place, results in enumerate(networks.values()):
            if name in results:
                best = statistics.median(results[best_peer(results)]["steps_per_second"])
                speeds = sorted(rate / best for rate in results[name]["steps_per_second"])
                places.append(place + (index + 0.5 - len(names) / 2) * width)
                heights.append(statistics.median(speeds))
                spread.append((heights[-1] - speeds[0], speeds[-1] - heights[-1]))
        plain, _, malloc = name.partition("+")
        label = TITLES[plain] + (", allocator tuned" if malloc else "")
        error = {"elinewidth": 0.8, "ecolor": "#343a40"}
        axes.bar(places, heights, width, yerr=list(zip(*spread, strict=True)), error_kw=error, label=label)
    axes.axhline(1, color="#343a40", linewidth=0.8)
    axes.set_xticks(range(len(networks)), [TITLES[network] for network in networks])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("training speed / that of the fastest other")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.savefig(path, dpi=110)


def main(options: Options) -> None:
    """Checks, times and prints each network; finished results are kept if a later one fails."""
    import problems

    if "jaxnn" not in options.contenders or not set(options.contenders) <= set(ALL):
        raise SystemExit(f"contenders must include jaxnn, the reference, and any of {', '.join(ALL)}.")
    networks: dict[str, dict[str, dict[str, Any]]] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"peers_{options.device}_{options.dtype}"
    for network in options.networks:
        with tempfile.TemporaryDirectory() as folder:
            problem = Path(folder) / network
            problems.write_problem(network, problem)
            differences = check(problem, options)
            results = measure(problem, problems.SETTINGS[network].round_steps, options)
        for name, result in results.items():
            result["loss_difference"] = differences[name.partition("+")[0]]
        networks[network] = results
        show(network, results)
        stem.with_suffix(".json").write_text(
            json.dumps({**results["jaxnn"].pop("machine"), "dtype": options.dtype, "networks": networks}, indent=1)
        )
    conclude(networks)
    draw(networks, stem.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
