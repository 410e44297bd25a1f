"""The first minutes on a GPU: programs, numerics, plans, peers, populations and benchmarks, in one results file.

Claim     every implementation for GPUs agrees with float32 on the CPU; plans are lower bounds of what is measured
Command   make gpu-day
Result    not run on a GPU yet

Each part runs in its own process, within its seconds of `PARTS`: ten minutes in all. ``gpu_day.json`` and ``.md`` are
replaced after each part; another call measures what is missing. ``--small --device cpu`` tries this program on a CPU.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import jaxnn as jn
from jaxnn.bench import (
    Case,
    Row,
    bench,
    describe_machine,
    find_studies,
    interleaved,
    measure_group,
    per_call,
)
from jaxnn.observe import peak_memory_bytes
from jaxnn.plans import CARDS, Card
from jaxnn.record import RUN_FILE, SWEEP_FILE, make_room
from jaxnn.types import JaxnnError

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "contenders"))
from gpu_cases import attempted, layer_cases, networks  # noqa: E402
from gpu_record import (  # noqa: E402
    Day,
    die_with_parent,
    is_of,
    put_aside,
    read,
    report,
    shown,
    write,
)
from sweep_contenders import opened, population  # noqa: E402
from sweep_networks import NETWORKS  # noqa: E402

QUIET: dict[str, Any] = {"progress": "none", "eval_every": 0, "checkpoint_every": 0}


def case(day: Day, measure: Callable[..., dict[str, Any]], **what: Any) -> Case:
    """Returns a case that observes ``measure(**what)``."""
    return Case(day.kind, what, observe=attempted(functools.partial(measure, **what), day.kind))


def matrix(day: Day) -> list[Case]:
    """Trains each network a few steps, two also as populations and under each strategy."""
    found, count = networks(small=day.small), len(jax.devices(day.kind))
    strategies = "data", "fsdp", "pmap"
    layouts: dict[str, dict[str, Any]] = {name: {"devices": "all", "strategy": name} for name in strategies}
    layouts |= {"data x model": {"mesh": f"data={count // 2},model=2"}} if count % 2 == 0 else {}

    def train(network: str, layout: str, members: int) -> dict[str, Any]:
        started, experiment = time.perf_counter(), found[network]().replace(num_steps=8)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            options = QUIET | {"run_dir": path, "steps_per_call": 4, "report_every": 4, "device": day.kind}
            if members > 1:
                swept = jn.sweep(experiment, jn.grid(seed=range(members)), vmap_size=members, devices=1, **options)
                facts = json.loads((path / SWEEP_FILE).read_text())["groups"][0]
                losses = [line["train_loss"] for line in swept.lines]
            else:
                losses = list(jn.fit(experiment, **options, **layouts.get(layout, {})).metrics["train_loss"])
                facts = json.loads((path / RUN_FILE).read_text())
        used = "; ".join(f"{operation} {'/'.join(which)}" for operation, which in facts["implementations"].items())
        outcome = {"ok": bool(np.isfinite(losses).all()), "seconds": time.perf_counter() - started}
        return {"first loss": losses[0], "last loss": losses[-1], **outcome, "implementations": used}

    runs = [(name, "one device", 1) for name in found if name not in ("gpt2_124m", "resnet50")]
    runs += [(name, "one device", 4) for name in ("mlp", "gpt")]
    runs += [(name, layout, 1) for name in ("gpt", "lstm") for layout in layouts]
    runs = runs[::4] if day.small else runs
    return [case(day, train, network=name, layout=layout, members=members) for name, layout, members in runs]


def plans(day: Day) -> list[Case]:
    """Compares plans with what is measured, each in its own process, to which a peak of memory belongs."""

    def measure(network: str, members: int) -> dict[str, Any]:
        experiment, seconds = networks(small=day.small)[network](), 0.2 if day.small else 1.0
        if members > 1:
            rate = population(opened(experiment, members, members))
            times = [members / rate(seconds).rate for _ in range(3)]
        else:
            cadence = QUIET | {"steps_per_call": 8, "report_every": 16, "record": False, "device": day.kind}
            reports = iter(jn.iterate(experiment, **cadence))
            for _ in range(4):
                next(reports)  # compiles, and fills the device's queue
            rounds = interleaved({0: per_call(lambda: next(reports), seconds)}, rounds=3)
            times = [each / 16 for each in rounds[0]]
        (peak, where), step = peak_memory_bytes(), median(times)
        used = peak / 1e6 if where.startswith("in use") else None  # a CPU does not count it
        facts: dict[str, Any] = {"measured ms": 1e3 * step, "measured MB": used}
        found = [name for name, card in CARDS.items() if is_card(day.device, card)]
        if not found and day.kind == "gpu":
            facts["no plan"] = f"no card of jaxnn is a {day.device.device_kind} with this memory"
        for card in (*found, None):
            try:
                plan = jn.plan(experiment, device=card, members=members)
            except Exception as error:  # no compiler for the card: planned for the device at hand
                facts["no plan"] = f"{card}: {(str(error).splitlines() or [type(error).__name__])[0]}"
                continue
            planned, bound = plan.peak_bytes / 1e6, max(plan.bounds, key=lambda name: plan.bounds[name])
            facts |= {"card": card or "as measured", "bound ms": 1e3 * plan.seconds, "bound by": bound}
            facts |= {"time ratio": step / plan.seconds, "planned MB": planned}
            return facts | {"memory ratio": used and used / planned}
        return facts

    names = [("gpt2_124m", 1), ("mlp", 1), ("mlp", 32), ("cnn", 1), ("lstm", 1), ("resnet50", 1)]
    names = [("mlp", 1), ("mlp", 4)] if day.small else names
    return [case(day, measure, network=name, members=members) for name, members in names]


def is_card(device: jax.Device, card: Card) -> bool:
    """Whether a device has the name of a card, and no more memory: variants of one name differ in it."""
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return device.device_kind == card.name and 0.6 * card.memory < limit <= card.memory


def peers(day: Day) -> list[Case]:
    """Runs peers.py: against PyTorch if it is here, and a jitted step in Flax and Optax."""
    folder, device = day.out / "peers", "cuda" if day.kind == "gpu" else "cpu"
    own = HERE.parent.parent / ".venv-peers/bin/python"
    torch = str(own) if own.exists() else sys.executable if importlib.util.find_spec("torch") else ""

    def compare(network: str, dtype: str) -> dict[str, Any]:
        options = {"--networks": network, "--device": device, "--dtype": dtype, "--out": folder / network}
        options |= {"--rounds": 2 if day.small else 3, "--check-steps": 2 if day.small else 10, "--torch-python": torch}
        command = [sys.executable, HERE / "peers.py", *(word for pair in options.items() for word in pair)]
        contenders, failures = ["jaxnn", "jax", *(["torch"] if torch and not day.small else [])], list[str]()
        shared = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the card, by several processes
        while True:
            given = list(map(str, [*command, "--contenders", *contenders]))
            done = subprocess.run(given, capture_output=True, text=True, env=shared, preexec_fn=die_with_parent)
            if not done.returncode:
                break
            last = done.stderr.strip() or "no reason given"
            # Others than the reference are left out if they fail.
            names = (name for name in contenders[1:] if re.search(rf"^(?:{network}: )?{name}(?::| has)", last, re.M))
            if (broken := next(names, None)) is None:
                raise RuntimeError(last.splitlines()[-1])
            contenders.remove(broken)
            failures.append(f"{broken}: {last.splitlines()[-1]}")
        found = json.loads((folder / network / f"peers_{device}_{dtype}.json").read_text())["networks"][network]
        rates = {f"{name}, steps/s": median(one["steps_per_second"]) for name, one in found.items()}
        return rates | ({"ok": False, "failure": "; ".join(failures)} if failures else {})

    pairs = [("mnist_mlp", "float32"), ("char_gpt", "bfloat16"), ("resnet20", "float32"), ("imdb_lstm", "float32")]
    pairs = pairs[:1] if day.small else pairs
    return [case(day, compare, network=name, dtype=dtype) for name, dtype in pairs]


def widths(day: Day) -> list[Case]:
    """Measures member-steps/s by the number of members under one vmap."""

    def measure(network: str, members: int) -> dict[str, float]:
        rate = population(opened(NETWORKS[network].experiment, members, members))
        rates = [rate(0.05 if day.small else 0.3).rate for _ in range(3)]
        return {"member-steps/s": median(rates), "low": min(rates), "high": max(rates)}

    pairs = [(name, width) for name in ("mlp", "cnn", "gpt") for width in (1, 4, 16, 64, 256, 1024)]
    pairs = pairs[:2] if day.small else pairs
    return [case(day, measure, network=name, members=width) for name, width in pairs]


def studies(day: Day) -> list[Case]:
    """Runs ``jaxnn bench all --quick`` study by study; the folder ``bench`` has their page."""

    def measure(study: str) -> dict[str, int]:
        (found,) = bench(known[study], devices=(day.kind,), quick=True, out=day.out / "bench").values()
        rows = [row for rows in found.rows.values() for row in rows]
        return {"cases": len(rows), "measured": sum(not row.missing for row in rows)}

    known = find_studies()
    names = ["bandwidth"] if day.small else list(known)
    return [case(day, measure, study=name) for name in names]


def advice(day: Day) -> list[Case]:
    """Runs `jn.advise`, on the CPU too."""

    def measure(network: str) -> dict[str, Any]:
        experiment, kinds = networks(small=day.small)[network](), tuple({"cpu": 0, day.kind: 0})
        found = jn.advise(experiment, devices=kinds, members=1 if day.small else 64, progress="none")
        facts: dict[str, Any] = {"train on": found.best}
        for kind, figures in found.devices.items():
            facts[f"{kind}, examples/s"] = figures.at(found.compared).per_second
            facts[f"{kind}, batch that fills it"] = figures.batch_sizes.smallest
        return facts

    names = ("mlp",) if day.small else ("mlp", "cnn")
    return [case(day, measure, network=name) for name in names]


# What each part runs, and the seconds that it may take.
PARTS: dict[str, tuple[Callable[[Day], list[Case]], float]] = {
    "matrix": (matrix, 95),
    "kernels": (lambda day: layer_cases(day.device, small=day.small), 120),
    "plans": (plans, 120),
    "peers": (peers, 140),
    "widths": (widths, 50),
    "bench": (studies, 40),
    "advise": (advice, 30),
}


def describe(day: Day) -> dict[str, Any]:
    """Returns the device, its driver, versions and commit; ConfigError if JAX has no such device."""
    facts = describe_machine(day.device)._asdict() | {"platform": day.device.client.platform_version}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return facts


def work(day: Day, name: str) -> None:
    """Measures the cases of a part that have no row, and writes each; a child of `run_part`."""
    die_with_parent()
    machine, part = describe(day), read(day, name)
    if not is_of(machine, part):
        put_aside(day, name)
        part = read(day, name)
    write(day, name, machine=machine, complete=False)
    rows, hung = part["rows"], [*part["hung"], part["running"]]
    left = [one for one in PARTS[name][0](day) if one.what not in [row["what"] for row in rows]]
    left.sort(key=lambda one: one.what in hung)  # they may hang again, and come last
    for one in left[: 1 if name == "plans" else None]:
        write(day, name, running=one.what)
        started = time.perf_counter()
        rows += [row._asdict() for row in measure_group([one], SimpleNamespace(rounds=3, seconds=0.02))]
        write(day, name, rows=rows, running=None)
        found = [f"{key} {shown(value)}" for key, value in rows[-1]["observed"].items() if value not in (None, "")]
        what, seen = ", ".join(map(str, one.what.values())), rows[-1]["missing"] or ", ".join(found)
        print(f"{name}: {what}: {seen} ({time.perf_counter() - started:.1f} s)", flush=True)
    write(day, name, complete=len(left) <= 1 or name != "plans")


def run_part(day: Day, name: str) -> None:
    """Runs a part in another process until it is complete or its time is up; a case that ends the process failed."""
    started, stopped, before = time.monotonic(), "", read(day, name)
    command = [sys.executable, __file__, "--work", name, "--out", str(day.out), "--device", day.kind]
    command += ["--small"] * day.small
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if day.kind == "cpu" else {})
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(day.out / "compiled")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    if name == "peers":  # other processes need the card's memory
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    first = True  # a complete part is asked too whether it is of this machine
    while first or not (stopped or read(day, name)["complete"]):
        first = False
        with (day.out / "parts" / f"{name}.log").open("w+") as log:
            child = subprocess.Popen(command, stderr=log, env=environment, start_new_session=True)
            try:
                status = child.wait(max(0.0, started + PARTS[name][1] - time.monotonic()))
            except subprocess.TimeoutExpired:
                status, stopped, running = 0, f"stopped after {PARTS[name][1]:.0f} s", read(day, name)["running"]
                if running is not None:
                    stopped += f" in {', '.join(map(str, running.values()))}"
                    write(day, name, hung=[*read(day, name)["hung"], running])
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            log.seek(0)
            last = (log.read().strip().splitlines() or ["no message"])[-1]
        reason, running = f"the process ended with status {status}: {last}", read(day, name)["running"]
        if status and running is not None:
            failed = Row(running, observed={"ok": False}, missing=reason)._asdict()
            write(day, name, rows=[*read(day, name)["rows"], failed], running=None)
        elif status:
            stopped = reason
    skipped = ", skipped" if before["complete"] and before["rows"] == read(day, name)["rows"] else ""
    print(f"{name}: {stopped or 'complete' + skipped}", flush=True)
    write(day, name, seconds=before["seconds"] + time.monotonic() - started, stopped=stopped)


def main() -> None:
    """Runs the parts that are not complete; the exit status is 1 if any failed or was stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "gpu_day", metavar="DIR")
    parser.add_argument("--small", action="store_true", help="few and small cases")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--again", action="store_true", help="measure complete parts again")
    parser.add_argument("--work", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    day = Day(given.out.resolve(), given.small, given.device)
    if given.work:
        try:
            return work(day, given.work)
        except JaxnnError as error:
            sys.exit(str(error))
    chosen = given.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}: choose from {', '.join(PARTS)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the child too
    make_room(day.out / "parts")
    for name in chosen:
        if given.again:
            put_aside(day, name)
        if read(day, name)["run"] != [day.kind, day.small]:
            parser.error(f"{day.out} has results of another device or size: give another --out, or --again.")
        try:
            run_part(day, name)
        finally:
            good = report(day, list(PARTS))
    sys.exit(not good)


if __name__ == "__main__":
    main()
