"""The first minutes on a GPU: correctness, peers, questions, populations, plans and benchmarks, in one results file.

Claim     every implementation for GPUs agrees with float32 on the CPU; plans are lower bounds of what is measured
Command   make gpu-day
Result    parts of it on one H200: experiments/results/gpu_h200/gpu_day.md

Cases run in processes of their own. Correctness is checked side by side, by as many processes as there are cores.
What is timed becomes ready side by side and runs in turn, with nothing beside it. `PARTS` has the seconds of each part,
eight minutes in all. ``gpu_day.json`` and ``.md`` have each row when it is done; another call measures what is missing.
``--small --device cpu`` tries this program on a CPU.
"""

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Row, bench, describe_machine, find_studies

import jaxnn as jn
from jaxnn._disk import make_room
from jaxnn.observe import peak_memory_bytes
from jaxnn.parallel import find_devices
from jaxnn.plans import CARDS, Card
from jaxnn.record import RECORD_FILE
from jaxnn.types import JaxnnError

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "contenders"))
import gpu_record  # noqa: E402
from gpu_cases import STEPS, layers, networks, training  # noqa: E402
from gpu_processes import Case, Group, Limits, Process, Stopped, Worker, run_groups, say, serve  # noqa: E402
from gpu_questions import questions  # noqa: E402
from gpu_record import Day  # noqa: E402
from problems import write_problem  # noqa: E402
from sweep_contenders import opened, population  # noqa: E402
from sweep_networks import NETWORKS  # noqa: E402

# Steps of a round of each peer, and its dtype.
PEERS = {
    "gpt2_124m": (16, "bfloat16"),
    "char_gpt": (96, "bfloat16"),
    "resnet20": (64, "float32"),
    "imdb_lstm": (192, "float32"),
    "mnist_cnn": (256, "float32"),
    "mnist_mlp": (1024, "float32"),
}


def one(what: dict[str, Any], begin: Callable[..., Any], work: float = 1.0, unit: str = "call") -> Group:
    """Returns a group of one case, whose ``begin`` takes what the case is."""
    return Group([Process([Case(what, functools.partial(begin, **what), work, unit)])], rounds=3)


def matrix(day: Day) -> list[Group]:
    """Trains each network a few steps, some also as populations, and under each strategy on all devices or on one."""
    found, count = networks(small=day.small), len(find_devices(day.kind))
    layouts: dict[str, dict[str, Any]] = {
        name: {"mesh": f"data={count}", "strategy": name} for name in ("data", "fsdp", "pmap")
    }
    shards = 2 - count % 2
    layouts |= {"data x model": {"mesh": f"data={count // shards},model={shards}"}, "one device": {}}

    def train(network: str, layout: str, members: int) -> tuple[dict[str, Any], None]:
        started, experiment = time.perf_counter(), found[network]().replace(num_steps=8)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            options: Any = {"run_dir": path, "steps_per_call": 4, "report_every": 4, "device": day.kind}
            options |= {"progress": "none", "eval_every": 0, "checkpoint_every": 0}
            if members > 1:
                swept = jn.sweep(experiment, jn.grid(seed=range(members)), vmap_size=members, devices=1, **options)
                losses = [line["train_loss"] for line in swept.lines]
            else:
                losses = list(jn.fit(experiment, **options, **layouts[layout]).metrics["train_loss"])
            facts = json.loads((path / RECORD_FILE).read_text())["groups"][0]
        used = "; ".join(f"{operation} {'/'.join(which)}" for operation, which in facts["implementations"].items())
        outcome = {"ok": bool(np.isfinite(losses).all()), "seconds": time.perf_counter() - started}
        return {"first loss": losses[0], "last loss": losses[-1], **outcome, "implementations": used}, None

    runs = [(name, "one device", 1) for name in found if name not in ("gpt2_124m", "resnet50")]
    runs += [(name, "one device", 4) for name in ("mlp", "cnn", "gpt")]
    runs += [(name, layout, 1) for name in ("gpt", "lstm") for layout in layouts if layout != "one device"]
    runs = runs[::4] if day.small else runs
    return [one({"network": name, "layout": layout, "members": number}, train) for name, layout, number in runs]


def tests(day: Day) -> list[Group]:
    """Runs the tests on one device; each failure is printed when it comes."""
    chosen = ["-n", "0", "tests/nn/test_functions.py"] if day.small else ["-n", "8", "tests"]

    def run(tests: str) -> tuple[dict[str, Any], None]:
        command = [sys.executable, "-m", "pytest", "--device", day.kind, "-v", "-rN", *chosen]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent.parent)
        timer = threading.Timer(PARTS["tests"].seconds - 15, child.terminate)  # in time to answer with what is done
        timer.start()
        counts = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
        for line in child.stdout or ():
            if line.startswith("FAILED "):
                say(line.strip())
            elif "%]" in line and (outcome := re.search(rf"\b({'|'.join(counts)})\b", line)):
                counts[outcome[1]] += 1
        timer.cancel()
        ended = child.wait() in (0, 1)
        stopped = {} if ended else {"stopped": f"status {child.returncode}"}
        return {name.lower(): count for name, count in counts.items()} | {"ok": child.returncode == 0, **stopped}, None

    return [one({"tests": " ".join(chosen)}, run)]


def problems(day: Day) -> list[Group]:
    """Writes the peers' common weights and examples."""

    def write(network: str) -> tuple[dict[str, Any], None]:
        write_problem(network, day.work / "problems" / network)
        return {}, None

    on_cpu = {"JAX_PLATFORMS": "cpu"}
    groups = [one({"network": name}, write) for name in chosen_peers(day)]
    return [Group([process._replace(environment=on_cpu) for process in group.processes]) for group in groups]


def chosen_peers(day: Day) -> dict[str, tuple[int, str]]:
    """Returns the networks that peers train here."""
    return {"mnist_mlp": (32, "float32")} if day.small else PEERS


def peers(day: Day) -> list[Group]:
    """Times jaxnn, a jitted step in Flax and Optax, and PyTorch if it is here: eager, compiled, with CUDA graphs."""
    own, groups = HERE.parent.parent / ".venv-peers/bin/python", []
    torch = str(own) if own.exists() else sys.executable if find_spec("torch") else None
    contenders = {"jaxnn": sys.executable, "jax": sys.executable}
    contenders |= dict.fromkeys(("torch", "torch_compile", "torch_graphs"), torch) if torch and not day.small else {}
    for network, (steps, dtype) in chosen_peers(day).items():
        processes = []
        for name, python in contenders.items():
            command = [python, str(HERE / "contenders/worker.py"), name, str(day.work / "problems" / network)]
            command += ["--device", "cuda" if day.kind == "gpu" else "cpu", "--dtype", dtype]
            what = {"network": network, "dtype": dtype, "contender": name}
            # Starts from nothing, as a user's first run does.
            afresh = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
            if (network, name) != ("gpt2_124m", "jax"):  # its attention keeps all scores
                processes.append(Process([Case(what, never, steps, "step")], afresh, command))
        groups.append(Group(processes, then="above 1: find out why from traces of both"))
    return groups


def never() -> Any:
    """Stands for what the worker of a contender does."""
    raise AssertionError("a contender is another program")


def widths(day: Day) -> list[Group]:
    """Measures member-steps/s by the number of members under one vmap."""

    def begin(network: str, members: int) -> tuple[dict[str, Any], Callable[[], float]]:
        rate = population(opened(NETWORKS[network].experiment, members, members))
        rate(0.0)
        return {}, lambda: 1 / rate(0.05 if day.small else 0.3).rate

    widths = (1, 4) if day.small else (1, 4, 16, 64, 256, 1024)
    pairs = [(name, width) for name in ("mlp", "cnn", "gpt")[: 1 if day.small else 3] for width in widths]
    return [one({"network": name, "members": width}, begin, unit="member-step") for name, width in pairs]


def plans(day: Day) -> list[Group]:
    """Compares plans with times per step and peaks of memory."""

    def begin(network: str, members: int) -> tuple[dict[str, Any], Callable[[], float]]:
        experiment, seconds = networks(small=day.small)[network](), 0.2 if day.small else 0.5
        if members > 1:
            rate = population(opened(experiment, members, members))
            rate(0.0)
            measure: Callable[[], float] = lambda: STEPS * members / rate(seconds).rate  # noqa: E731
        else:
            _, measure = training(experiment, day.kind, seconds)
        peak, where = peak_memory_bytes()
        used = peak / 1e6 if where.startswith("in use") else None  # a CPU does not count it
        return {"measured MB": used, **planned(day, experiment, members, used)}, measure

    names = [("gpt2_124m", 1), ("resnet20", 1), ("mlp", 32), ("cnn", 1), ("lstm", 1), ("mlp", 1), ("resnet50", 1)]
    names = [("mlp", 1)] if day.small else names
    return [one({"network": name, "members": number}, begin, STEPS, "step") for name, number in names]


def planned(day: Day, experiment: jn.Experiment, members: int, used: float | None) -> dict[str, Any]:
    """Returns the plan for the card, or for the device at hand if no card of jaxnn is this one."""
    found = [name for name, card in CARDS.items() if is_card(day.device, card)]
    for card in (*found, None):
        try:
            plan = jn.plan(experiment, device=card, members=members)
        except Exception as error:  # no compiler for the card
            reason = f"{card}: {(str(error).splitlines() or [type(error).__name__])[0]}"
            continue
        bound, size = max(plan.bounds, key=lambda name: plan.bounds[name]), plan.peak_bytes / 1e6
        facts = {"card": card or "as measured", "bound ms": 1e3 * plan.seconds, "bound by": bound, "planned MB": size}
        return facts | {"memory over plan": used and used / size}
    return {"no plan": reason}


def is_card(device: Any, card: Card) -> bool:
    """Whether a device has the name of a card, and no more memory: variants of one name differ in it."""
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return device.device_kind == card.name and 0.6 * card.memory < limit <= card.memory


def studies(day: Day) -> list[Group]:
    """Runs ``bench.py all --quick`` study by study in one process; the folder ``bench`` has their page."""
    known = find_studies()

    def measure(study: str) -> tuple[dict[str, Any], None]:
        (found,) = bench(known[study], devices=(day.kind,), quick=True, out=day.out / "bench").values()
        rows = [row for rows in found.rows.values() for row in rows]
        return {"cases": len(rows), "measured": sum(not row.missing for row in rows)}, None

    cases = [one({"study": name}, measure) for name in (["bandwidth"] if day.small else known)]
    return [Group([Process([case for group in cases for process in group.processes for case in process.cases])])]


def errors(day: Day) -> list[Group]:
    """Compares each implementation, forward and gradient, with float32 on the CPU."""
    return layers(day.kind, small=day.small, timed=False)[:: 6 if day.small else 1]


def times(day: Day) -> list[Group]:
    """Times each implementation, forward and gradient."""
    return layers(day.kind, small=day.small, timed=True)[:: 10 if day.small else 1]


class Part(NamedTuple):
    """What a part runs: side by side, or ``alone``; the seconds that it may take, and a case of it until it answers."""

    groups: Callable[[Day], list[Group]]
    alone: bool
    seconds: float
    answer_seconds: float = 60


# By worth. A part may also use the time that those before it left.
PARTS = {
    "matrix": Part(matrix, False, 50),
    "kernels": Part(errors, False, 40),
    "tests": Part(tests, False, 50),
    "problems": Part(problems, False, 20),
    "peers": Part(peers, True, 115),
    "questions": Part(questions, True, 110, 80),
    "widths": Part(widths, True, 30),
    "plans": Part(plans, True, 30, 100),
    "times": Part(times, True, 15),
    "bench": Part(studies, True, 20),
}


def describe(day: Day) -> dict[str, Any]:
    """Returns the device, its driver, versions and commit; ConfigError if JAX has no such device."""
    facts = describe_machine(day.device)._asdict() | {"platform": day.device.client.platform_version}
    facts["capability"] = getattr(day.device, "compute_capability", None)
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return facts


def run_part(day: Day, name: str, record: dict[str, Any], until: float) -> None:
    """Runs the groups of a part that lack rows until its time is up."""
    part, (groups, alone, _, answer_seconds), started = record[name], PARTS[name], time.monotonic()
    found = groups(day)
    index = {id(process): number for number, process in enumerate(p for group in found for p in group.processes)}
    known = [row["what"] for row in part["rows"]]
    left = [g for g in found if any(case.what not in known for p in g.processes for case in p.cases)]
    memory = (day.device.memory_stats() or {}).get("bytes_limit", 2**36)
    limits = Limits(max(1, min(len(os.sched_getaffinity(0)), memory // 2**32)), answer_seconds, until)

    def start(process: Process, heard: Any) -> Worker:
        number = index[id(process)]
        command = [sys.executable, __file__, "--work", name, str(number), "--out", str(day.out), "--device", day.kind]
        return Worker(process, command + ["--small"] * day.small, day.work / "logs" / f"{name}-{number}.log", heard)

    def keep(rows: Sequence[Row]) -> None:
        for row in gpu_record.keep(part, rows):
            print(f"[{time.monotonic() - BEGUN:.0f} s] {name}: {gpu_record.line(row)}", flush=True)
        gpu_record.report(day, record)

    before, part["stopped"] = part["seconds"], ""
    try:
        for line in run_groups(left, start, keep, limits, alone=alone):
            part["said"].append(line)
            print(f"{name}: {line}", flush=True)
        part["complete"] = True
    except Stopped:
        part["stopped"] = f"stopped after {time.monotonic() - started:.0f} s"
    part["seconds"] = before + time.monotonic() - started
    print(f"{name}: {part['stopped'] or ('complete' if left else 'complete, skipped')}", flush=True)


BEGUN = time.monotonic()


def main() -> None:
    """Runs the parts that are not complete; the exit status is 1 if any failed or was stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "gpu_day", metavar="DIR")
    parser.add_argument("--small", action="store_true", help="few and small cases")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--again", action="store_true", help="measure complete parts again")
    parser.add_argument("--write-measured", type=Path, metavar="PATH", help="write the rows of measured.json, and end")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    day = Day(given.out.resolve(), given.small, given.device)
    if given.work:
        name, number = given.work
        processes = [process for group in PARTS[name].groups(day) for process in group.processes]
        return serve(processes[int(number)], day.kind)
    record = gpu_record.read(day.out)
    if given.write_measured:
        if not (count := gpu_record.write_measured(record, given.write_measured)):
            sys.exit(f"{day.out} has no sizes at which two implementations were timed on a GPU: run --parts questions.")
        return print(f"{count} rows are new in {given.write_measured}")
    asked = given.parts.split(",")
    if unknown := set(asked) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}: choose from {', '.join(PARTS)}.")
    chosen = [name for name in PARTS if name in asked or (name == "problems" and "peers" in asked)]
    if not given.again and any(part["run"] != [day.kind, day.small] for part in record.values()):
        parser.error(f"{day.out} has results of another device or size: give another --out, or --again.")
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": str(day.work / "compiled")}
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    os.environ |= {"JAX_PLATFORMS": "cpu"} if day.kind == "cpu" else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored, also in the tests
    try:
        machine = describe(day)
        make_room(day.work / "logs")
    except JaxnnError as error:
        sys.exit(str(error))
    good, until = True, time.monotonic()
    for name in chosen:
        gpu_record.begin(record, name, day, machine, again=given.again)
        until += PARTS[name].seconds * (2 if day.small else 1)  # where cores are few
        try:
            run_part(day, name, record, until)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            good = gpu_record.report(day, record)
    sys.exit(not good)


if __name__ == "__main__":
    main()
