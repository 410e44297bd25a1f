"""Runs of several processes train as one does, keep one record, read only their rows, and resume from each other's."""

import contextlib
import itertools
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from PIL import Image

import jaxnn as jn
from jaxnn.models import MLP
from jaxnn.run import RESUMABLE
from tests import processes, several, tiny
from tests.processes import Started, free_port, started
from tests.record.files import untimed

pytestmark = [pytest.mark.slow]

SECONDS = 150


def starting(count: int, *flags: object, devices: int = 1) -> contextlib.AbstractContextManager[Started]:
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", count, "--start-timeout", 60)
    command = [sys.executable, several.__file__, devices, *several.FLAGS, *where, *flags]
    return started([[*command, "--process-id", rank] for rank in range(count)])


def run(count: int, *flags: object, devices: int = 1) -> list[processes.Done]:
    with starting(count, *flags, devices=devices) as running:
        done = running.finish(SECONDS)
    assert [process.status for process in done] == [0] * count, done
    return done


def fit(num_steps: int, *where: Path, **options: Any) -> jn.Run:
    """The same run in this process, on one device unless more are given."""
    how = {str(flag)[2:].replace("-", "_"): value for flag, value in itertools.batched(several.FLAGS, 2)}
    return tiny.fit(several.experiment.replace(num_steps=num_steps), *where, **how, **options)


def steps_of(path: Path) -> list[int]:
    """The steps that have a checkpoint."""
    return [int(found.name) for found in (path / "checkpoints").glob("[0-9]*") if found.name.isdecimal()]


def test_any_number_of_processes_resumes_a_run_as_one_trains_it_and_one_of_them_records(tmp_path):
    path = tmp_path / "run"
    fit(20, path, devices=2, strategy="fsdp")
    done = run(2, "--resume", path, "--devices", "all", "--strategy", "pmap", "--num-steps", 40, devices=2)
    facts = tiny.read(path)
    assert facts["status"] == "finished" and facts["layout"] == {"strategy": "pmap", "mesh": {"data": 4}}
    assert "4 of 4 devices of 2 processes" in done[0].out and "step 40/40" in done[0].out
    assert not processes.words(done[1].out)
    # Here each process is sent its rows alone.
    run(4, "--resume", path, "--resident", False, "--strategy", "fsdp", "--num-steps", 60)
    fit(80, resume=path, strategy="data", devices=2)
    lines, expected = untimed(path), fit(80)._trainer.logs[0].lines
    assert [line["step"] for line in lines] == [*range(5, 81, 5)]
    for line, wanted in zip(lines, expected, strict=True):
        assert line == pytest.approx({name: wanted[name] for name in line}, rel=1e-4), line["step"]
    layouts = [resumed["changed"][0].removeprefix("the layout ") for resumed in tiny.read(path)["resumed"]]
    assert layouts == ["fsdp data=2 → pmap data=4", "pmap data=4 → fsdp data=4", "fsdp data=4 → data data=2"]


def test_signal_to_one_process_stops_all_at_one_step_to_resume_from_bitwise(tmp_path):
    path, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    flags = ("--strategy", "data", "--eval-every", 0)
    with starting(2, *flags, "--num-steps", 40_000, "--run-dir", path) as running:
        deadline = time.monotonic() + SECONDS
        while not steps_of(path) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.signal(1, signal.SIGTERM)
        done = running.finish(SECONDS)
    assert [process.status for process in done] == [RESUMABLE, RESUMABLE], done
    assert tiny.read(path)["status"] == "interrupted"
    stopped = tiny.lines(path)[-1]["step"]
    assert stopped % 5 == 0 and stopped in steps_of(path)
    run(2, *flags, "--num-steps", stopped + 20, "--resume", path)
    run(2, *flags, "--num-steps", stopped + 20, "--run-dir", undisturbed)
    assert untimed(path) == untimed(undisturbed)
    chex.assert_trees_all_equal(jn.load_checkpoint(path)["params"], jn.load_checkpoint(undisturbed)["params"])


# Arrays that are sharded, replicated, and on the host, and differ with ``number``.
STATE = """
import errno

def state(number):
    _, sharded = adding()
    local = np.arange(2, dtype=np.float32) + 2 * rank + number
    put = jax.make_array_from_process_local_data
    same = put(NamedSharding(sharded.mesh, PartitionSpec()), np.full(2, number, np.float32))
    host = np.full(3, number, np.float32)
    return {"sharded": put(sharded, local), "same": same, "host": host, "number": float(number)}

def parts(array):
    return [shard.data for shard in array.addressable_shards] if isinstance(array, jax.Array) else [array]

def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

for number in range(2):
    jn.save_checkpoint(f"{FOLDER}/{number}", state(number))
    assert os.path.exists(f"{FOLDER}/{number}/SHA256SUMS"), "incomplete when the first process returns"
found = jn.load_checkpoint(f"{FOLDER}/1", state(0))
for name, wanted in state(1).items():
    for left, right in zip(parts(found[name]), parts(wanted), strict=True):
        np.testing.assert_array_equal(left, right)
say(error_of(jn.save_checkpoint, f"{FOLDER}/0", state(0)))
say(error_of(jn.save_checkpoint, f"{FOLDER}/new", {"a": {"b": jax.numpy.ones(2)}}))
# Orbax has written, and the sums cannot be.
fsync, os.fsync = os.fsync, full
say(error_of(jn.save_checkpoint, f"{FOLDER}/late", state(0)))
os.fsync = fsync
"""
# What differs in process 1, as a field of the experiment.
DIFFERENCES = {
    "learning_rate": "config=tiny.Config(learning_rate=0.2, num_steps=60)",
    "the program of a step": "optimizer=lambda config: optax.adam(0.02)",
    "the data": "data=lambda _: jn.data.arrays(train=tiny.points(37, 2), test=tiny.points(23, 1))",
}
FIT = """
import dataclasses, optax
from tests import several, tiny

def fit(**other):
    mine = dataclasses.replace(several.experiment, **other if rank else {})
    jn.fit(mine, strategy="data", run_dir=f"{FOLDER}/run", progress="none")
"""


def test_two_processes_save_one_state_and_report_the_same_errors_and_differences(tmp_path):
    *first, last = DIFFERENCES.values()
    code = f"FOLDER = {str(tmp_path)!r}\n{STATE}{FIT}"
    code += "".join(f"\nsay(error_of(lambda: fit({difference})))" for difference in first) + f"\nfit({last})"
    done = processes.run(code, devices=2, seconds=SECONDS)
    assert [process.status for process in done] == [2, 2], done
    for process in done:
        taken, local, late, *differences = processes.words(process.out)
        assert taken == f"RecordError: {tmp_path}/0 exists already: choose a new path, or delete it first."
        assert f"cannot save a.b to {tmp_path}/new: it is only on devices of process {process.rank}; shard or" in local
        assert late.startswith(f"RecordError: {tmp_path}/late cannot be written (No space left on device): free disk")
        # A process that ends before the other has heard of it reports it for both.
        for name, line in zip(DIFFERENCES, [*differences, process.err], strict=True):
            what = "config" if name == "learning_rate" else "code or data"
            assert f"process 1 was started with another {what} ({name} is" in line
            assert line.count(" in process 0") == 1, "what is the same is listed"
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    saved = {name: np.asarray(value).tolist() for name, value in jn.load_checkpoint(tmp_path / "1").items()}
    assert saved == {"sharded": [1, 2, 3, 4], "same": [1, 1], "host": [1, 1, 1], "number": 1}


BATCH_SIZE, NUM_STEPS = 8, 10
# An epoch is longer than what is read, ahead of the last step too: no two steps have an example in common.
SIZES = {"train": 240, "val": 40}


def write_images(root: Path) -> None:
    """Writes images of noise in two classes; the name of each is its index."""
    rng = np.random.default_rng(0)
    for split, count in SIZES.items():
        for index in range(count):
            path = root / split / ("cats" if index < count // 2 else "dogs") / f"{index:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).save(path)


def mirror(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    return image[:, ::-1] if rng.random() < 0.5 else image


def streamed(root: str, strategy: str) -> tuple[list[dict[str, float]], dict[str, list[int]]]:
    """The reports of a run on streamed images without what depends on the clock, and the images that it opened."""
    opened: dict[str, list[int]] = {split: [] for split in SIZES}

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(root):
            path = Path(arguments[0])
            opened[path.parent.parent.name].append(int(path.stem))

    sys.addaudithook(note)
    data = jn.data.image_folder(root, (4, 4), stream=True, augment=mirror, num_workers=0)
    experiment = tiny.experiment(data=data, model=MLP((5, 2)), num_steps=NUM_STEPS, batch_size=BATCH_SIZE)
    run = tiny.fit(experiment, strategy=strategy, eval_every=5, eval_batch_size=BATCH_SIZE)
    kept = ("step", "train_loss", "validation_loss", "validation_accuracy")
    return [{name: line[name] for name in kept} for line in run._trainer.logs[0].lines], opened


def test_streams_train_as_in_one_process_and_each_reads_its_rows(tmp_path):
    write_images(tmp_path)
    expected, _ = streamed(str(tmp_path), "data")
    order = jn.data.batch_indices(0, np.arange(NUM_STEPS * 2), SIZES["train"], BATCH_SIZE)
    batches = np.arange(SIZES["val"]).reshape(-1, BATCH_SIZE)
    here = "import json\nfrom tests.parallel import test_distributed_training as here\n"
    each = f"for strategy in ('fsdp', 'pmap'): say(json.dumps(here.streamed({str(tmp_path)!r}, strategy)))"
    done = processes.run(here + each, seconds=SECONDS)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2, done
    for rank, process in enumerate(done):
        for strategy, line in zip(("fsdp", "pmap"), processes.words(process.out), strict=True):
            found, opened = json.loads(line)
            assert found == [pytest.approx(line, rel=1e-5) for line in expected]
            local = slice(None) if strategy == "pmap" else slice(4 * rank, 4 * rank + 4)
            # The first examples are read for their shapes.
            shown, train = set(range(BATCH_SIZE)), opened["train"]
            assert {*order[:NUM_STEPS, local].flat} <= {*train} <= {*order[:, local].flat} | shown
            assert {*opened["val"]} - shown == {*batches[:, local].flat} - shown
            # They are read twice before, under pmap once more to compare devices, and may come again.
            assert len(train) - len({*train}) <= (3 if strategy == "pmap" else 2) * BATCH_SIZE
