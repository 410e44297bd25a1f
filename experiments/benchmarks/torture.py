"""Torture tests of a short run: it is killed, its checkpoints are corrupted, its disk is filled.

Claim     kills: a process killed at 50 random moments, many of them during a save, always resumes from the newest
          complete checkpoint and ends bitwise equal to an undisturbed run; a checkpoint is complete or absent
          corruption: a flipped byte in any file of a checkpoint, or a truncated, missing or additional file, is
          detected and named, and the previous checkpoint is used
          disk-full: a run whose disk is full ends with a one-line error, its older checkpoints intact, and resumes
          when there is space again
Command   python experiments/benchmarks/torture.py kills
          python experiments/benchmarks/torture.py kills --num-kills 10 --scenarios all
          python experiments/benchmarks/torture.py corruption
          python experiments/benchmarks/torture.py disk-full

Each exits with status 1 and a message at the first violation of its claim. The runs are those of ``victim.py``.
"""

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import tyro
from harness import describe_machine
from torture_corruption import corrupt
from torture_disk import fill_disks
from torture_kills import Kills, kill_runs
from torture_run import Broken, Victim

from jaxnn.observe import text_table

# Eight members in two groups.
SWEEP = "sweep --seed 0 1 2 3 --features 16 32,16 --vmap-size 2"
SCENARIOS = {
    "one device": "victim.py",
    "two devices": "victim.py --cpu-devices 2",
    "parameters over two devices": "victim.py --cpu-devices 2 --strategy fsdp",
    "a copy for each device": "victim.py --cpu-devices 2 --strategy pmap",
    "data not on the device": "victim.py --resident False",
    "patience": "victim.py --patience 1000",
    "a tracking service": "victim.py --writers tensorboard",
    "one checkpoint": "victim.py --keep-last 1 --keep-best 0",
    "best checkpoints": "victim.py --keep-best 3 --monitor accuracy",
    "deterministic": "victim.py --deterministic",
    "averaged parameters": "victim.py average",
    "boosted trees": "victim.py trees",
    "a stream": "victim.py stream",
    "a text": "victim.py text",
    "a step of two optimizers": "../digits_gan.py --features 32 --batch-size 16",
    "a sweep": f"victim.py {SWEEP}",
    "successive halving": f"victim.py {SWEEP} --search halving --eta 2",
}


def kills(
    num_kills: int = 50, seed: int = 0, num_steps: int = 1_000, scenarios: tuple[str, ...] = ("one device",)
) -> None:
    """Kills a training process repeatedly and resumes it each time.

    Args:
        num_kills: number of kills in each scenario.
        seed: determines the moments.
        num_steps: updates per run; when a run finishes, another starts.
        scenarios: names of ways to run it, or ``all``.
    """
    for scenario in SCENARIOS if scenarios == ("all",) else scenarios:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            found = kill_runs(Victim(Path(folder), num_steps, words=(*SCENARIOS[scenario].split(),)), num_kills, seed)
            seconds = f"{time.perf_counter() - started:.0f}"
            _print({"scenario": scenario} | _rows(found) | {"total seconds": seconds})


def corruption(seed: int = 0, most_files: int | None = None) -> None:
    """Corrupts a run's newest checkpoint in every way, file by file, and resumes the run each time.

    Args:
        seed: determines which byte of a file is flipped.
        most_files: maximum number of files to corrupt in each way; default: all.
    """
    with tempfile.TemporaryDirectory() as folder:
        counts = dict(corrupt(Victim(Path(folder), num_steps=60, checkpoint_every=20), seed, most_files))
    _print(
        {f"{kind}: detected, named, previous checkpoint used": f"{count} of {count}" for kind, count in counts.items()}
    )


def disk_full(num_steps: int = 40_000) -> None:
    """Fills a small tmpfs under a run at several moments; needs Linux and permission to mount.

    Args:
        num_steps: updates per run, with four checkpoints.
    """
    with tempfile.TemporaryDirectory() as folder:
        _print(fill_disks(Path(folder), num_steps))


def _rows(found: Kills) -> dict[str, object]:
    return {
        "kills": found.kills,
        "… while a checkpoint was written": found.during_saves,
        "… during the removal of an old checkpoint": found.during_removals,
        "… before the first checkpoint was complete": found.before_any,
        "… before the first report": found.while_starting,
        "complete checkpoints after a kill, all checksums valid": found.verified,
        "resumes seen, each from the newest complete checkpoint": found.resumes,
        "runs finished, each bitwise that of an undisturbed one": found.runs,
        "steps repeated after a kill, median and maximum": f"{found.lost_median:.0f}, {found.lost_most}",
    }


def _print(rows: Mapping[str, object]) -> None:
    print(describe_machine())
    print(text_table((name, str(value)) for name, value in rows.items()))


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"kills": kills, "corruption": corruption, "disk-full": disk_full}, description=__doc__
        )
    except Broken as broken:
        sys.exit(f"claim violated: {broken}")
