"""How fast a population trains, in member-steps a second by its width: against runs one after another, and PyTorch.

Claim     on a CPU of two cores the digits MLPs of a population train at least 10 times as fast as in a loop of jitted
          steps written by hand; at the planned width no network trains slower than one member after another
Command   python experiments/benchmarks/sweep.py --devices 2

Rates are those of training alone: compiling, evaluation, reports and files are left out, but for the contender
``jn.sweep``, whose loop is what it adds to the planned population. What all of it takes from call to result is told by
the member. Every contender trains the same network with the same Adam on batches of the same size from the same data,
each in an order of its own; before PyTorch is timed, both must reach the same mean loss over the first steps, from the
same weights on the same batches. Members one after another are as fast as one of them, so PyTorch trains one for the
time given, and two processes at once one each. Its Adam is the fused one, the fastest that it has.
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
from sweep_contenders import Measure, Measured, first_losses, fitted, looped, opened, population, swept
from sweep_networks import NETWORKS, Network

from jaxnn.bench import describe_machine, interleaved, ratios
from jaxnn.engine import member_state
from jaxnn.observe import text_table
from jaxnn.run import format_rate

TORCH_SOLO = Path(__file__).parent / "contenders" / "torch_solo.py"
CHECK_STEPS = 50
# Rounding alone parts the losses by less than a thousandth.
TOLERANCE = 0.01
# What populations are held against, and how a table names them.
PEERS = {"jn.fit": "jn.fit in turn", "loop": "jitted loop", "torch": "PyTorch", "torch x2": "2 × PyTorch"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and where the results go."""

    only: tuple[str, ...] = tuple(NETWORKS)
    """The networks."""
    rounds: int = 5
    """Times that each contender is measured."""
    widths: tuple[int, ...] = ()
    """Members side by side on a device; default: the network's own, up to 256 for the MLP, up to 8 for the others."""
    devices: int = 1
    """Devices that populations are spread over; a CPU is made to look like so many."""
    seconds: float = 2.0
    """About how long each measurement takes; whole sweeps and fits take what they take."""
    torch_python: Path | None = Path(".venv-peers/bin/python")
    """The Python that has PyTorch; None leaves it out."""
    device: Literal["cpu", "cuda"] = "cpu"
    out: Path = Path("runs/benchmarks")
    """The folder that gets sweep_DEVICE.json and .png."""


class TorchProcess:
    """PyTorch in a process of its own, asked by lines of JSON; ``facts`` is what it said when it was warm."""

    def __init__(self, problem: Path, options: Options, threads: int | None = None) -> None:
        command = [str(options.torch_python), str(TORCH_SOLO), str(problem), "--device", options.device]
        command += [] if threads is None else ["--threads", str(threads)]
        self.errors = tempfile.TemporaryFile("w+")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.facts = self.answer()

    def ask(self, command: str, **arguments: Any) -> None:
        """Sends a request; its answer is to be fetched."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"command": command, **arguments}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest request; exits with the process's words if it died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise SystemExit(f"PyTorch died: {self.errors.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def torch_processes(count: int, *arguments: Any) -> Iterator[list[TorchProcess]]:
    """So many processes, ended on the way out."""
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
    """A member in each process, all at once."""

    def measure(seconds: float) -> Measured:
        for process in processes:
            process.ask("run", seconds=seconds)
        return Measured(sum(process.answer()["steps_per_second"] for process in processes))

    return measure


def write_problem(name: str, network: Network, folder: Path) -> None:
    """The files that PyTorch reads: the data, the first member's weights, and the order of its first steps."""
    experiment = network.experiment
    config, source = experiment.config, experiment.data(experiment.config).train
    inputs, targets = source.read(np.arange(source.num_examples))
    # Bytes as the floats that jaxnn makes of them, a batch at a time.
    np.save(folder / "inputs.npy", inputs if inputs.dtype == np.float32 else np.float32(inputs) / 255)
    np.save(folder / "targets.npy", targets)
    np.save(folder / "order.npy", source.order(config.seed, np.arange(CHECK_STEPS), config.batch_size))
    run = opened(experiment, 1, vmap_size=1)
    params = member_state(run.host_states(), run.programs.shapes, 0).params
    np.savez(folder / "weights.npz", **flax.traverse_util.flatten_dict(params, sep="/"))
    spec = {"network": name, "batch_size": config.batch_size, "learning_rate": config.learning_rate}
    (folder / "spec.json").write_text(json.dumps(spec))


def check(name: str, network: Network, process: TorchProcess) -> dict[str, float]:
    """The mean loss of the first steps in jaxnn and in PyTorch; exits if they do not compute the same."""
    process.ask("check")
    losses = {
        "jaxnn": first_losses(network.experiment, CHECK_STEPS),
        "torch": statistics.mean(process.answer()["losses"]),
    }
    print(f"{name}: mean loss of the first {CHECK_STEPS} steps: {losses['jaxnn']:.5f}, PyTorch {losses['torch']:.5f}")
    if not abs(losses["torch"] / losses["jaxnn"] - 1) <= TOLERANCE:
        raise SystemExit(f"{name}: PyTorch does not train the same.")
    return losses


def make_contenders(
    name: str, network: Network, options: Options, stack: contextlib.ExitStack
) -> tuple[dict[str, Measure], dict[str, Any]]:
    """What is measured, by name, and what is known of it before."""
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
    """Measures the contenders in turn, another one first each round."""
    results: dict[str, list[Measured]] = {name: [] for name in contenders}

    def rate(name: str) -> float:
        time.sleep(0.3)  # the threads of the one before may still spin
        results[name].append(contenders[name](options.seconds))
        return results[name][-1].rate

    interleaved({name: functools.partial(rate, name) for name in contenders}, rounds=options.rounds)
    return results


def show(facts: dict[str, Any], rates: dict[str, list[float]], walls: dict[str, list[float]]) -> None:
    """Prints a network's table."""
    config = facts["config"]
    peers = [peer for peer in PEERS if peer in rates]
    print(
        f"\n{facts['title']}, batch {config['batch_size']}: {facts['members']} members are planned at width "
        f"{facts['planned_width']}, {facts['steps_per_call']} steps a call"
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
    """Everything of one network: made, measured, shown."""
    with contextlib.ExitStack() as stack:
        contenders, facts = make_contenders(name, NETWORKS[name], options, stack)
        results = measure(contenders, options)
    rates = {name: [float(one.rate) for one in ones] for name, ones in results.items()}
    walls = {name: [one.wall for one in ones if one.wall] for name, ones in results.items() if ones[0].wall}
    show(facts, rates, walls)
    return {**facts, "member_steps_per_second": rates, "seconds_per_member": walls}


def conclude(networks: dict[str, dict[str, Any]]) -> None:
    """Prints what the claim is about."""
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
    """Measures network by network; what is done is kept if a later one fails."""
    if unknown := set(options.only) - set(NETWORKS):
        raise SystemExit(f"no network {', '.join(unknown)}: there are {', '.join(NETWORKS)}.")
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
