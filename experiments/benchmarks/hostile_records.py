"""Records and saved models from elsewhere: every file and every field of them is changed, and then read.

Claim     whatever the files of a record, of a model of trees or of weights hold, each command and function that reads
          them ends in time with a result or an error for the user: no traceback, no code of the record is executed, no
          file outside of the record is opened or changed, and no control character is printed
Command   python experiments/benchmarks/hostile_records.py
          python experiments/benchmarks/hostile_records.py --quick
          python experiments/benchmarks/hostile_records.py --kinds record.json members.jsonl --mutations 500

Fields get other types, huge numbers, deep nesting, escape sequences, paths outside and names of modules in the record,
or are deleted; files are cut, emptied, deleted, changed in a bit, or become links, folders and pipes. Checksums are
made to fit, as whoever wrote the record could. A process reads, and is killed at a hang. Exits with status 1 if
anything was found.
"""

import collections
import dataclasses
import itertools
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from harness import describe_machine
from hostile_mutations import BAIT, CANARY, MARK, mutate, sign
from hostile_reader import INPUTS, LABELS, Reader, experiment

import jaxnn as jn
from jaxnn.cli import command
from jaxnn.observe import text_table

RUN_READERS = ("show", "runs", "compare", "plot", "open", "predict", "evaluate", "export", "resume")
STATE_READERS = ("load", "predict", "evaluate", "export", "resume")
MEMBER_READERS = ("predict members", "evaluate", "member", "resume sweep")
SWEEP_READERS = ("show", "runs", "compare", "plot", "open sweep", *MEMBER_READERS)
FINDINGS = ("traceback", "hang", "death", "code", "outside", "control")


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        records: names of the records that have it, one of which is changed.
        file: a pattern below the record; empty: the record is the file.
        readers: commands and functions that read it, those that write last.
    """

    records: tuple[str, ...]
    file: str
    readers: tuple[str, ...]


ALL_SWEEPS = ("swept", "halted", "sharded")
KINDS = {
    "record.json": Kind(("run",), "record.json", RUN_READERS),
    "metrics.jsonl": Kind(("run",), "metrics.jsonl", RUN_READERS),
    "writers.json": Kind(("run",), "writers.json", ("show", "open", "resume")),
    "compiles.json": Kind(("run",), "compiles.json", ("show", "open", "resume")),
    "placement.json": Kind(("run",), "placement.json", ("show", "open", "resume")),
    ".lock": Kind(("run",), ".lock", ("show", "runs", "resume")),
    "pictures": Kind(("run", "swept"), "*.png", ("plot",)),
    "model.stablehlo": Kind(("run",), "model.stablehlo", ("export here",)),
    "checkpoint.json": Kind(("run",), "checkpoints/*/checkpoint.json", STATE_READERS),
    "SHA256SUMS": Kind(("run",), "checkpoints/*/SHA256SUMS", STATE_READERS),
    "state files": Kind(("run",), "checkpoints/*/default/**/*", STATE_READERS),
    "record.json of a sweep": Kind(ALL_SWEEPS, "**/record.json", SWEEP_READERS),
    "members.jsonl": Kind(ALL_SWEEPS, "**/members.jsonl", SWEEP_READERS),
    "metrics.jsonl of a sweep": Kind(ALL_SWEEPS, "**/metrics.jsonl", SWEEP_READERS),
    "writers.json of a sweep": Kind(("halted",), "writers.json", ("show", "resume sweep")),
    "compiles.json of a sweep": Kind(("halted",), "compiles.json", ("show", "resume sweep")),
    ".lock of a sweep": Kind(("halted",), ".lock", ("show", "resume sweep")),
    "state files of a sweep": Kind(("swept", "halted"), "groups/*/*/**/*", MEMBER_READERS),
    "record.json of a search": Kind(("searched",), "record.json", SWEEP_READERS),
    "search.jsonl": Kind(("searched",), "search.jsonl", ("show", "open sweep", "resume sweep")),
    "checkpoint.json of a search": Kind(("searched",), "groups/*/*/checkpoint.json", MEMBER_READERS),
    "a saved state": Kind(("state",), "**/*", ("load", "load like")),
    "trees.npz": Kind(("trees.npz",), "", ("load trees",)),
    "weights.safetensors": Kind(("weights.safetensors",), "", ("load weights",)),
}


def main(
    mutations: int = 2_000,
    seed: int = 0,
    kinds: tuple[str, ...] = tuple(KINDS),
    readers: int = 17,
    seconds: float = 60.0,
    quick: Annotated[bool, tyro.conf.arg(help="a few mutations of each kind, in a minute or two")] = False,
) -> None:
    """Changes files and reads them.

    Args:
        mutations: number per kind of file.
        seed: determines them.
        kinds: of files.
        readers: at most this many of a kind's readers read a changed file, in turns.
        seconds: an attempt that takes longer hangs.
    """
    if quick:
        mutations, readers = min(mutations, 6), min(readers, 4)
    found = 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        make_records(root)
        with Reader(root, seconds) as reader:
            for name in kinds:
                counts, places = attack(root, KINDS[name], mutations, random.Random(f"{seed} {name}"), readers, reader)
                found += sum(counts[one] for one in FINDINGS)
                rows.append((name, *(str(counts[one]) for one in ("files", "attempts", "refused", *FINDINGS))))
                print(text_table(rows[-1:]), flush=True)
                for place, (count, example) in places.in_order():
                    print(text_table([(f"  {count}", place, example)]), flush=True)
    print(describe_machine())
    print(text_table(rows, ("kind of file", "mutations", "attempts", "refused", *FINDINGS)))
    sys.exit(int(found > 0))


class Places(dict[str, tuple[int, str]]):
    """What was found, by place: how often, and the first example."""

    def note(self, place: str, example: str) -> None:
        """Counts a finding."""
        count, first = self.get(place, (0, example))
        self[place] = count + 1, first

    def in_order(self) -> list[tuple[str, tuple[int, str]]]:
        """Returns the places, the most frequent first."""
        return sorted(self.items(), key=lambda item: -item[1][0])


def attack(
    root: Path, kind: Kind, mutations: int, draw: random.Random, readers: int, reader: Reader
) -> tuple[collections.Counter[str], Places]:
    """Changes files of a kind one at a time, and has each read; returns counts, and what was found by place."""
    counts, places = collections.Counter[str](), Places()
    for record in kind.records:
        for name in kind.readers:
            restore(root / "whole" / record, root / "work" / record)
            if found := reader.attempt(name, root / "work" / record):
                sys.exit(f"{name} of the whole record {record}: {found}")
    for number in range(mutations):
        record = kind.records[number % len(kind.records)]
        case = root / "work" / record
        restore(root / "whole" / record, case)
        files = sorted(file for file in case.glob(kind.file) if file.is_file()) if kind.file else [case]
        file = draw.choice(files)
        example = f"{file.relative_to(case.parent)}: {mutate(file, draw, root)}"
        for above in file.parents:
            if (above / "SHA256SUMS").is_file() and file.name != "SHA256SUMS" and draw.random() < 0.8:
                sign(above)
        counts["files"] += 1
        turns = itertools.cycle(kind.readers)
        first = number * readers % len(kind.readers)
        for name in itertools.islice(turns, first, first + min(readers, len(kind.readers))):
            counts["attempts"] += 1
            for finding, where in reader.attempt(name, case).items():
                counts[finding] += 1
                if finding != "refused":
                    places.note(f"{finding}: {where}", f"{name} after {example}")
    return counts, places


def restore(whole: Path, case: Path) -> None:
    """Copies a record to where it is changed and read, and removes what was there."""
    shutil.rmtree(case.parent, ignore_errors=True)
    case.parent.mkdir()
    (case.parent / f"{CANARY}.py").write_text(f"open({str(case.parent.parent / MARK)!r}, 'w')\n")
    if whole.is_dir():
        shutil.copytree(whole, case)
        if not (case / "SHA256SUMS").exists():  # a saved state has no other files
            shutil.copy(case.parent / f"{CANARY}.py", case)
    else:
        shutil.copy(whole, case)


def make_records(root: Path) -> None:
    """Writes the whole records below ``root``, and a folder outside of them."""
    whole = root / "whole"
    how: dict[str, Any] = {"steps_per_call": 2, "report_every": 2, "eval_every": 2, "progress": "none"}
    (root / BAIT).parent.mkdir()
    (root / BAIT).write_text("private\n")
    run = jn.fit(experiment, run_dir=whole / "run", checkpoint_every=2, writers=("tensorboard",), monitor="loss", **how)
    command(["plot", str(whole / "run")])
    run.export(whole / "run" / "model.stablehlo")
    jn.save_checkpoint(whole / "state", {"w": np.ones((3, 2)), "step": 7})
    jn.save_weights(whole / "weights.safetensors", run.state.params)
    points, how = jn.grid(seed=[0, 1], batch_size=[4, 8]), how | {"devices": 1}
    jn.sweep(experiment, points, run_dir=whole / "swept", **how)
    command(["plot", str(whole / "swept")])
    jn.sweep(experiment, points, run_dir=whole / "halted", checkpoint_every=2, writers=("tensorboard",), **how)
    for shard in ("1/2", "2/2"):
        jn.sweep(experiment, points, run_dir=whole / "sharded", shard=shard, **how)
    searcher = jn.search.halving(jn.grid(seed=range(4), batch_size=[4, 8]), 2)
    jn.sweep(experiment, searcher, run_dir=whole / "searched", checkpoint_every=2, **how)
    for name in ("halted", "searched"):
        facts = json.loads((file := whole / name / "record.json").read_text())
        facts["status"] = "interrupted"
        facts["groups"][0].pop("closed", None)
        file.write_text(json.dumps(facts))
    jn.trees.GradientBoostingClassifier(num_trees=4, max_depth=2).fit(INPUTS, LABELS).save(whole / "trees.npz")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
