"""Whole runs of several processes: the numbers of one, one record, and what was saved can be gone on from."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn.run import RESUMABLE
from tests import processes, several, tiny
from tests.processes import Done, Started, free_port, started

SCRIPT = Path(several.__file__)
SECONDS = 150
# For snippets: a state of arrays that are split, repeated, and on the host, all of them other each time.
STATE = """
import errno

def state(number):
    _, spread = adding()
    here = np.arange(2, dtype=np.float32) + 2 * rank + number
    put = jax.make_array_from_process_local_data
    same = put(NamedSharding(spread.mesh, PartitionSpec()), np.full(2, number, np.float32))
    return {"split": put(spread, here), "same": same, "host": np.full(3, number, np.float32), "number": float(number)}

def parts(array):
    return [shard.data for shard in array.addressable_shards] if isinstance(array, jax.Array) else [array]

def tell(function):
    try:
        say(function())
    except Exception as error:
        say(f"{type(error).__name__}: {error}")

def break_sums():
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync = full
"""


def starting(count: int, *flags: object, devices: int = 1) -> contextlib.AbstractContextManager[Started]:
    """The experiment in ``count`` processes of so many devices each."""
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", count, "--start-timeout", 60)
    together = where if count > 1 else ()
    return started(
        [
            [sys.executable, SCRIPT, devices, *several.FLAGS, *together, *(("--process-id", rank) if together else ())]
            + list(flags)
            for rank in range(count)
        ]
    )


def run(count: int, *flags: object, devices: int = 1) -> list[Done]:
    with starting(count, *flags, devices=devices) as running:
        return running.finish(SECONDS)


def alone(**options: Any) -> jn.Run:
    """The same run in this process, on one device."""
    names, values = several.FLAGS[::2], several.FLAGS[1::2]
    words = {str(name)[2:].replace("-", "_"): value for name, value in zip(names, values, strict=True)}
    return jn.fit(several.experiment, progress="none", **words, **({"record": False} | options))


def reported(path: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "steps_per_second", "examples_per_second")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def wait_for_checkpoint(path: Path, step: int) -> None:
    deadline = time.monotonic() + SECONDS
    while not any(int(found.name) >= step for found in (path / "checkpoints").glob("[0-9]*") if found.name.isdecimal()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_same_numbers(path: Path, expected: jn.Run) -> None:
    for line, wanted in zip(reported(path), expected._trainer.logs[0].lines, strict=True):
        assert line == pytest.approx({name: wanted[name] for name in line}, rel=1e-4), line["step"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "fsdp", "pmap"])
def test_two_processes_train_as_one_does_and_one_of_them_records(tmp_path: Path, strategy: str) -> None:
    done = run(2, "--strategy", strategy, "--run-dir", tmp_path / "run", devices=2)
    assert [process.status for process in done] == [0, 0], done
    assert_same_numbers(tmp_path / "run", alone())
    facts = tiny.read(tmp_path / "run")
    assert facts["status"] == "finished" and facts["layout"] == {"strategy": strategy, "mesh": {"data": 4}}
    assert "4 of 4 devices of 2 processes" in done[0].out and "step 60/60" in done[0].out
    assert not processes.words(done[1].out)


@pytest.mark.slow
def test_four_processes_that_each_read_their_rows_train_as_one_does(tmp_path: Path) -> None:
    done = run(4, "--resident", False, "--strategy", "fsdp", "--run-dir", tmp_path / "run")
    assert [process.status for process in done] == [0] * 4, done
    assert_same_numbers(tmp_path / "run", alone())


@pytest.mark.slow
def test_what_one_two_or_four_processes_saved_any_others_go_on_from(tmp_path: Path) -> None:
    path = tmp_path / "run"
    # From each number of processes to each other once.
    lives = [(1, "fsdp", 2), (2, "data", 1), (4, "fsdp", 1), (1, "pmap", 4), (4, "data", 1), (2, "fsdp", 2)]
    lives.append((1, "data", 2))
    for number, (count, strategy, devices) in enumerate(lives):
        where = ("--resume", path) if number else ("--run-dir", path)
        done = run(count, *where, "--strategy", strategy, "--num-steps", 60 + 20 * number, devices=devices)
        assert [process.status for process in done] == [0] * count, done
    expected = jn.fit(
        several.experiment.replace(num_steps=60 + 20 * (len(lives) - 1)),
        progress="none", record=False, steps_per_call=5, report_every=5, eval_every=20,
    )  # fmt: skip
    assert_same_numbers(path, expected)
    changed = [told["changed"] for told in tiny.read(path)["resumed"]]
    assert [change[0] for change in changed] == [
        "the layout fsdp data=2 → data data=2",
        "the layout data data=2 → fsdp data=4",
        "the layout fsdp data=4 → pmap data=4",
        "the layout pmap data=4 → data data=4",
        "the layout data data=4 → fsdp data=4",
        "the layout fsdp data=4 → data data=2",
    ]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_step_to_go_on_from_bit_for_bit(tmp_path: Path) -> None:
    flags = ("--strategy", "data", "--eval-every", 0, "--checkpoint-every", 50)
    path = tmp_path / "run"
    with starting(2, *flags, "--num-steps", 40_000, "--run-dir", path) as running:
        wait_for_checkpoint(path, 50)
        running.signal(1, signal.SIGTERM)
        done = running.finish(SECONDS)
    assert [process.status for process in done] == [RESUMABLE, RESUMABLE], done
    assert tiny.read(path)["status"] == "interrupted"
    stopped = reported(path)[-1]["step"]
    assert stopped % 5 == 0 and (path / "checkpoints" / str(stopped)).is_dir()
    other = tmp_path / "other"
    for where in (("--resume", path), ("--run-dir", other)):
        assert [process.status for process in run(2, *flags, "--num-steps", stopped + 20, *where)] == [0, 0]
    assert reported(path) == reported(other)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_lost_process_ends_the_others_and_the_last_checkpoint_is_whole(tmp_path: Path, killed: int) -> None:
    path = tmp_path / "run"
    flags = ("--strategy", "fsdp", "--num-steps", 40_000, "--eval-every", 0, "--checkpoint-every", 100)
    with starting(2, *flags, "--run-dir", path) as running:
        wait_for_checkpoint(path, 200)
        running.signal(killed, signal.SIGKILL)
        done = running.finish(60)
    survivor = done[1 - killed]
    assert survivor.status == RESUMABLE, survivor
    assert f"process {killed}" in survivor.err and f"--resume {path}" in survivor.err
    assert "Traceback" not in survivor.err
    steps = sorted(int(name.name) for name in (path / "checkpoints").iterdir() if name.name.isdecimal())
    assert steps and steps[-1] >= 200
    resumed = jn.fit(several.experiment.replace(num_steps=steps[-1] + 5), resume=path, progress="none")
    assert resumed.summary.status == "finished" and np.isfinite(resumed.summary.metrics["train_loss"])


# What process 1 has other than process 0, as a field of the experiment.
DIFFERENCES = {
    "learning_rate": "config=tiny.Config(learning_rate=0.2, num_steps=60)",
    "the program of a step": "optimizer=lambda config: optax.adam(0.02)",
    "the order or augmentation of the data": "data=lambda _: jn.data.with_augmentation(tiny.splits(), lambda _, x: -x)",
    "the evaluation": "task=lambda _: CLASSES._replace(derive_metrics=lambda m: m | {'doubled': 2 * m['loss']})",
    "the data": "data=lambda _: jn.data.arrays(train=tiny.points(37, 2), test=tiny.points(23, 1))",
}


@pytest.mark.slow
def test_processes_with_another_config_code_or_data_are_refused(tmp_path: Path) -> None:
    code = """
import dataclasses, optax
from tests import several, tiny
CLASSES = jn.tasks.classification(several.MODEL)

def fit(**other):
    mine = dataclasses.replace(several.experiment, **other if rank else {})
    jn.fit(mine, strategy="data", run_dir=RUN, progress="none")

def tell(**other):
    try:
        fit(**other)
    except jn.ConfigError as error:
        say(error)
"""
    *first, last = DIFFERENCES.values()
    code += "".join(f"\ntell({difference})" for difference in first) + f"\nfit({last})"
    done = processes.run(f"RUN = {str(tmp_path / 'run')!r}" + code, seconds=SECONDS)
    assert [process.status for process in done] == [2, 2], done
    for process in done:
        # One that ends before the other has heard of it says so for it.
        for name, line in zip(DIFFERENCES, [*processes.words(process.out), process.err], strict=True):
            what = "config" if name == "learning_rate" else "code or data"
            assert f"process 1 was started with another {what} ({name} is" in line
            assert line.count(" in process 0") == 1, "what is the same is not listed"
    assert not (tmp_path / "run").exists()


def test_a_state_saved_by_hand_in_two_processes_is_whole_and_read_by_two_and_by_one(tmp_path: Path) -> None:
    done = processes.run(
        STATE
        + f"""
for number in range(3):
    jn.save_checkpoint("{tmp_path}/" + str(number), state(number))
    assert os.path.exists("{tmp_path}/" + str(number) + "/SHA256SUMS"), "not whole when the first returns"
found = jn.load_checkpoint("{tmp_path}/2", state(0))
for name, wanted in state(2).items():
    for left, right in zip(parts(found[name]), parts(wanted), strict=True):
        np.testing.assert_array_equal(left, right)
""",
        devices=2,
    )
    assert [(process.status, process.err) for process in done] == [(0, ""), (0, "")], done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    lengths = {"split": 4, "same": 2, "host": 3}
    like = {name: np.zeros(length, np.float32) for name, length in lengths.items()} | {"number": 0.0}
    found = jn.load_checkpoint(tmp_path / "1", like)
    np.testing.assert_array_equal(found["split"], [1, 2, 3, 4])
    np.testing.assert_array_equal(found["same"], [1, 1])
    np.testing.assert_array_equal(found["host"], [1, 1, 1])
    assert found["number"] == 1


def test_what_two_processes_cannot_save_is_one_sentence_in_both(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    tries = [("there", "state(0)"), ("file/state", "state(0)"), ("new", "{'a': {'b': jax.numpy.ones(2)}}")]
    code = "".join(f"\ntell(lambda: jn.save_checkpoint({str(tmp_path / name)!r}, {tree}))" for name, tree in tries)
    # Once more, where Orbax has written and the sums or the name fail.
    code += f"\nbreak_sums()\ntell(lambda: jn.save_checkpoint({str(tmp_path / 'late')!r}, state(0)))"
    done = processes.run(STATE + code, devices=2)
    assert [process.status for process in done] == [0, 0], done
    for rank, process in enumerate(done):
        assert processes.words(process.out) == [
            f"RecordError: {tmp_path}/there exists already: choose a new path, or delete it first.",
            f"RecordError: {tmp_path}/file/state cannot be written (File exists): check that the folder exists, may be "
            "written, and that no other process writes there, or choose another path.",
            f"RecordError: {tmp_path}/new is to hold a.b, which is on the devices of process {rank} alone: spread it "
            "over those of all 2 processes, or save it as a NumPy array, which process 0 writes.",
            f"RecordError: {tmp_path}/late cannot be written (No space left on device): free disk space, or choose "
            "another path.",
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]
