"""Corrupts a run's newest checkpoint in every way, file by file, and resumes the run each time."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from torture_run import Victim, check_same, claim, facts_of, steps_of
from victim import experiment

import jaxnn as jn

Damage = Callable[[Path, random.Random], None]


def flip(file: Path, draw: random.Random) -> None:
    """Flips one bit of one byte."""
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, draw: random.Random) -> None:
    """Truncates a file."""
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def delete(file: Path, draw: random.Random) -> None:
    """Deletes a file."""
    file.unlink()


def add(file: Path, draw: random.Random) -> None:
    """Adds another file next to it."""
    file.with_name(f"{file.name}.more").write_bytes(draw.randbytes(8))


KINDS: dict[str, Damage] = {"a byte flipped": flip, "truncated": truncate, "deleted": delete, "another file": add}


def corrupt(victim: Victim, seed: int, most_files: int | None) -> Iterator[tuple[str, int]]:
    """Yields the number of files corrupted in each way; all were detected and the previous checkpoint used.

    Raises:
        Broken: one was not detected.
    """
    # All resumes share the compile cache.
    jax.config.update("jax_compilation_cache_dir", str(victim.folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    intact = victim.undisturbed
    steps = steps_of(intact)
    newest = intact / "checkpoints" / str(steps[-1])
    names = sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file())
    names = names[:most_files]
    draw = random.Random(seed)
    for kind, damage in KINDS.items():
        for name in names:
            copy = victim.folder / "damaged"
            shutil.copytree(intact, copy)
            damage(copy / "checkpoints" / newest.name / name, draw)
            _resume(victim, copy, steps, f"{name}.more" if damage is add else name)
            shutil.rmtree(copy)
        yield kind, len(names)


def _resume(victim: Victim, run_dir: Path, steps: list[int], name: str) -> None:
    """Resumes a run whose newest checkpoint is corrupted, to the end."""
    before, newest = steps[-2:]
    jn.fit(experiment.replace(num_steps=victim.num_steps), resume=run_dir, progress="none")
    resumed = facts_of(run_dir)["resumed"][-1]
    claim(resumed["step"] == before, f"with {name} damaged the run resumed from {resumed['step']}, not {before}")
    claim(len(resumed["damaged"]) == 1, f"with {name} damaged the run reports {resumed['damaged']}")
    expected = f"the checkpoint of step {newest} is damaged, its file {name} "
    claim(resumed["damaged"][0].startswith(expected), f"with {name} damaged the run reports: {resumed['damaged'][0]}")
    aside = run_dir / "checkpoints" / "damaged" / str(newest)
    claim(aside.is_dir() and steps_of(run_dir)[-1] == newest, f"step {newest} was not saved again in {run_dir}")
    check_same(run_dir, victim.undisturbed)
