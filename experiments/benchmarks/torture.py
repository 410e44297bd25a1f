"""What happens to long runs, done to a short one on purpose: killed, its checkpoints damaged, its disk filled.

Claim     kills: a process killed at 50 random moments, many of them during a save, always resumes from the newest
          complete checkpoint, and ends with the bits of a run that nobody disturbed; a checkpoint is complete or absent
          corruption: one byte flipped in any file of a checkpoint, or a file cut short, gone or added, is found and
          named, and the checkpoint before it is used
          disk-full: a run whose disk is full ends with one sentence, its older checkpoints intact, and goes on when
          there is room again
Command   python experiments/benchmarks/torture.py kills
          python experiments/benchmarks/torture.py corruption
          python experiments/benchmarks/torture.py disk-full

Each ends with status 1 and a sentence at the first thing that is not as claimed. What is trained is ``victim.py``.
"""

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import tyro
from torture_corruption import corrupt
from torture_disk import fill_disks
from torture_kills import Kills, kill_runs
from torture_run import Broken, Victim

from jaxnn.bench import describe_machine
from jaxnn.observe import text_table


def kills(num_kills: int = 50, seed: int = 0, num_steps: int = 1_000) -> None:
    """Kills a training process again and again, and resumes it each time.

    Args:
        num_kills: how often.
        seed: decides when.
        num_steps: updates a run; when one is done, another is begun.
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        found = kill_runs(Victim(Path(folder), num_steps), num_kills, seed)
        _tell(_rows(found) | {"seconds in all": f"{time.perf_counter() - began:.0f}"})


def corruption(seed: int = 0, most_files: int | None = None) -> None:
    """Damages a run's newest checkpoint in every way, file by file, and resumes the run each time.

    Args:
        seed: decides which byte of a file is flipped.
        most_files: damage only so many of its files in each way; default: all.
    """
    with tempfile.TemporaryDirectory() as folder:
        counts = dict(corrupt(Victim(Path(folder), num_steps=60, checkpoint_every=20), seed, most_files))
    _tell({f"{kind}: found, named, and the one before used": f"{count} of {count}" for kind, count in counts.items()})


def disk_full() -> None:
    """Fills a small disk of its own (a tmpfs) under a run at several moments; on Linux, where one may be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        _tell(fill_disks(Path(folder)))


def _rows(found: Kills) -> dict[str, object]:
    return {
        "kills": found.kills,
        "… while a checkpoint was written": found.during_saves,
        "… while an old one was taken away": found.during_removals,
        "… before the first checkpoint was complete": found.before_any,
        "… before the first report": found.while_starting,
        "complete checkpoints looked at after a kill, all their sums right": found.verified,
        "resumes seen, each from the newest complete checkpoint": found.resumes,
        "runs finished, each bitwise that of an undisturbed one": found.runs,
        "steps done again after a kill, median and most": f"{found.lost_median:.0f}, {found.lost_most}",
    }


def _tell(rows: Mapping[str, object]) -> None:
    print(describe_machine())
    print(text_table((name, str(value)) for name, value in rows.items()))


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"kills": kills, "corruption": corruption, "disk-full": disk_full}, description=__doc__
        )
    except Broken as broken:
        sys.exit(f"not as claimed: {broken}")
