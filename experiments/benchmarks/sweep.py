"""Throughput of a population in member-steps/s by its vmap size, against sequential runs and PyTorch.

Claim     on a CPU with two cores the digits MLPs of a population train at least 10 times as fast as in a handwritten
          loop of jitted steps; at the planned vmap size no network trains slower than its members in sequence
Command   python experiments/benchmarks/sweep.py --devices 2

Rates are those of training: compilation, evaluation, reports and files are excluded, except for ``jn.sweep``, whose
loop is included. The time from call to result is reported per member. All contenders train the same network with the
same Adam on batches of the same size from the same data, each in its own order. Before PyTorch is timed, both must
reach the same mean loss over the first steps, from the same weights on the same batches. Sequential members have the
speed of one, so PyTorch trains one member for the given time, and two processes train one each, with fused Adam.
"""

import contextlib
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import flax
import jax
import numpy as np
import tyro
from sweep_picture import draw

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
from harness import describe_machine, interleaved, ratios
from sweep_contenders import Measure, Measured, first_losses, fitted, looped, opened, population, swept
from sweep_networks import NETWORKS, Network

from jaxnn._text import format_rate
from jaxnn.engine import load_data
from jaxnn.observe import text_table

TORCH_SOLO = Path(__file__).parent / "contenders" / "torch_solo.py"
CHECK_STEPS = 50
# Rounding alone changes the losses by less than a thousandth.
TOLERANCE = 0.01
# The references, and their names in a table.
PEERS = {"jn.fit": "jn.fit in turn", "loop": "jitted loop", "torch": "PyTorch", "torch x2": "2 × PyTorch"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and where to write the results."""

    only: tuple[str, ...] = tuple(NETWORKS)
    """Networks to measure."""
    rounds: int = 5
    """Measurements of each contender."""
    widths: tuple[int, ...] = ()
    """Vmap sizes on a device; default: up to 256 for the MLP, up to 8 for the others."""
    devices: int = 1
    """Devices to shard populations over; a CPU simulates them."""
    seconds: float = 2.0
    """Approximate seconds per measurement, except for complete sweeps and fits."""
    torch_python: Path | None = Path(".venv-peers/bin/python")
    """Python interpreter with PyTorch; None excludes it."""
    device: Literal["cpu", "cuda"] = "cpu"
    out: Path = Path("runs/benchmarks")
    """Folder for sweep_DEVICE.json and .png."""


class TorchProcess:
    """PyTorch in its own process, which answers requests as JSON lines; ``facts`` is its first answer."""

    def __init__(self, problem: Path, options: Options, threads: int | None = None) -> None:
        command = [str(options.torch_python), str(TORCH_SOLO), str(problem), "--device", options.device]
        command += [] if threads is None else ["--threads", str(threads)]
        self.errors = tempfile.TemporaryFile("w+")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.facts = self.answer()

    def ask(self, command: str, **arguments: Any) -> None:
        """Sends a request; `answer` returns the result."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"command": command, **arguments}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Returns the answer to the oldest request; exits with the output of the process if it died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise SystemExit(f"PyTorch died: {self.errors.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def torch_processes(count: int, *arguments: Any) -> Iterator[list[TorchProcess]]:
    """Yields ``count`` processes and kills them at the end."""
    processes: list[TorchProcess] = []
    try:
        for _ in range(count):
            processes.append(TorchProcess(*arguments))
        yield processes
    finally:
        for process in processes:
            process.process.kill()
            process.process.wait()


def in_torch(processes: list[TorchProcess]) -> Measure:
    """Returns a measure of all processes, each with one member."""

    def measure(seconds: float) -> Measured:
        for process in processes:
            process.ask("run", seconds=seconds)
        return Measured(sum(process.answer()["steps_per_second"] for process in processes))

    return measure


def write_problem(name: str, network: Network, folder: Path) -> None:
    """Writes the files that PyTorch reads: data, the first member's weights, and the order of its first steps."""
    experiment = network.experiment
    config, source = experiment.config, load_data(experiment).train
    inputs, targets = source.read(np.arange(source.num_examples))
    # Bytes are scaled to floats, as jaxnn does per batch.
    np.save(folder / "inputs.npy", inputs if inputs.dtype == np.float32 else np.float32(inputs) / 255)
    np.save(folder / "targets.npy", targets)
    np.save(folder / "order.npy", source.order(config.seed, np.arange(CHECK_STEPS), config.batch_size))
    run = opened(experiment, 1, vmap_size=1)
    params = run.host_states().member(0, run.programs.shapes).params
    np.savez(folder / "weights.npz", **flax.traverse_util.flatten_dict(params, sep="/"))
    spec = {"network": name, "batch_size": config.batch_size, "learning_rate": config.learning_rate}
    (folder / "spec.json").write_text(json.dumps(spec))


def check(name: str, network: Network, process: TorchProcess) -> dict[str, float]:
    """Returns the mean loss of the first steps in jaxnn and in PyTorch; exits if they differ."""
    process.ask("check")
    losses = {
        "jaxnn": first_losses(network.experiment, CHECK_STEPS),
        "torch": statistics.mean(process.answer()["losses"]),
    }
    print(f"{name}: mean loss of the first {CHECK_STEPS} steps: {losses['jaxnn']:.5f}, PyTorch {losses['torch']:.5f}")
    if not abs(losses["torch"] / losses["jaxnn"] - 1) <= TOLERANCE:
        raise SystemExit(f"{name}: the losses of PyTorch and jaxnn differ.")
    return losses


def make_contenders(
    name: str, network: Network, options: Options, stack: contextlib.ExitStack
) -> tuple[dict[str, Measure], dict[str, Any]]:
    """Returns the contenders by name, and facts about the network."""
    experiment = network.experiment
    devices, num_members = options.devices, network.num_members
    contenders = {
        f"width {width}": population(opened(experiment, width * devices, width, devices))
        for width in options.widths or network.widths
    }
    planned = opened(experiment, num_members, None, devices)
    contenders |= {"planned": population(planned), "jn.sweep": swept(experiment, num_members, devices)}
    contenders |= {"jn.fit": fitted(experiment), "loop": looped(experiment)}
    facts: dict[str, Any] = {
        "title": network.title,
        "config": dataclasses.asdict(experiment.config),
        "members": num_members,
        "planned_width": planned.vmapped.size if planned.vmapped is not None else 1,
        "steps_per_call": planned.plan.steps_per_call,
    }
    if network.in_torch and options.torch_python is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_problem(name, network, folder)
        alone = stack.enter_context(torch_processes(1, folder, options))
        facts |= {"torch": alone[0].facts, "first_losses": check(name, network, alone[0])}
        both = stack.enter_context(torch_processes(2, folder, options, 1))
        contenders |= {"torch": in_torch(alone), "torch x2": in_torch(both)}
    return contenders, facts


def measure(contenders: dict[str, Measure], options: Options) -> dict[str, list[Measured]]:
    """Measures the contenders in alternation."""
    results: dict[str, list[Measured]] = {name: [] for name in contenders}

    def rate(name: str) -> float:
        time.sleep(0.3)  # threads of the previous contender may still spin
        results[name].append(contenders[name](options.seconds))
        return results[name][-1].rate

    interleaved({name: functools.partial(rate, name) for name in contenders}, rounds=options.rounds)
    return results


def show(facts: dict[str, Any], rates: dict[str, list[float]], walls: dict[str, list[float]]) -> None:
    """Prints a network's table."""
    config = facts["config"]
    peers = [peer for peer in PEERS if peer in rates]
    print(
        f"\n{facts['title']}, batch {config['batch_size']}: {facts['members']} members with vmap size "
        f"{facts['planned_width']}, {facts['steps_per_call']} steps per call"
    )
    table = []
    for name, values in rates.items():
        median, least, most = statistics.median(values), min(values), max(values)
        columns = ("" if peer == name else str(ratios(rates[name], rates[peer])) for peer in peers)
        table.append((name, format_rate(median), f"{(most - least) / median:.0%}", *columns))
    print(text_table(table, ("", "member-steps/s", "spread", *(f"/ {PEERS[peer]}" for peer in peers))))
    each = ", ".join(f"{name} {statistics.median(seconds):.3g} s" for name, seconds in walls.items())
    print(f"  a member of {config['num_steps']:,} steps, from call to result: {each}", flush=True)


def run_network(name: str, options: Options) -> dict[str, Any]:
    """Creates, measures and prints the contenders of one network."""
    with contextlib.ExitStack() as stack:
        contenders, facts = make_contenders(name, NETWORKS[name], options, stack)
        results = measure(contenders, options)
    rates = {name: [float(one.rate) for one in ones] for name, ones in results.items()}
    walls = {name: [one.wall for one in ones if one.wall] for name, ones in results.items() if ones[0].wall}
    show(facts, rates, walls)
    return {**facts, "member_steps_per_second": rates, "seconds_per_member": walls}


def conclude(networks: dict[str, dict[str, Any]]) -> None:
    """Prints the ratios of the claim."""
    print("\nplanned population")
    table = []
    for name, network in networks.items():
        rates = network["member_steps_per_second"]
        others = (
            str(ratios(rates["planned"], rates[other])) if other in rates else "-" for other in ("loop", "width 1")
        )
        table.append((name, *others))
    print(text_table(table, ("", "/ jitted loop", "/ width 1")), flush=True)


def main(options: Options) -> None:
    """Measures each network; finished results are kept if a later one fails."""
    if unknown := set(options.only) - set(NETWORKS):
        raise SystemExit(f"no network {', '.join(unknown)}: choose from {', '.join(NETWORKS)}.")
    jax.config.update("jax_platforms", options.device)
    if options.device == "cpu":
        jax.config.update("jax_num_cpu_devices", options.devices)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"sweep_{options.device}"
    networks: dict[str, dict[str, Any]] = {}
    for name in options.only:
        networks[name] = run_network(name, options)
        written = {
            **describe_machine()._asdict(),
            "rounds": options.rounds,
            "devices": options.devices,
            "networks": networks,
        }
        stem.with_suffix(".json").write_text(json.dumps(written, indent=1))
        draw(written, stem.with_suffix(".png"))
    conclude(networks)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
