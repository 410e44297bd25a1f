"""Streamed data in runs of several processes: the losses of one, and each process reads only its rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import jaxnn as jn
from tests import processes, tiny

BATCH_SIZE, NUM_STEPS = 8, 10
# An epoch is longer than what is read, ahead of the last step too: no two steps have an example in common.
NUM_TRAIN, NUM_TEST = 800, 40


class Reader:
    """Points, and which of them were read."""

    def __init__(self, num_examples: int, seed: int) -> None:
        inputs, self.targets = tiny.points(num_examples, seed)
        self.examples = list(zip(inputs, self.targets, strict=True))
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        self.read.append(int(index))
        return self.examples[index]

    def fingerprint(self, digest: Any) -> None:
        digest.update(np.asarray(self.targets).tobytes())


def augment(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    return inputs + rng.normal(scale=0.1, size=inputs.shape).astype(np.float32)


def mirrored(rng: np.random.Generator, picture: np.ndarray) -> np.ndarray:
    return picture[:, ::-1] if rng.random() < 0.5 else picture


def losses(splits: jn.Splits, strategy: str, model: Any = None) -> list[dict[str, float]]:
    """What a run on ``splits`` reports, without what depends on the clock."""
    experiment = tiny.experiment(data=splits, model=model, num_steps=NUM_STEPS, batch_size=BATCH_SIZE)
    run = tiny.fit(experiment, strategy=strategy, eval_every=5, eval_batch_size=BATCH_SIZE)
    kept = ("step", "train_loss", "test_loss", "test_accuracy", "validation_loss", "validation_accuracy")
    return [{name: line[name] for name in kept if name in line} for line in run._trainer.logs[0].lines]


def streamed(strategy: str) -> tuple[list[dict[str, float]], list[int], list[int]]:
    """The losses of a run on streamed points, and what was read of both splits, in order."""
    train, test = Reader(NUM_TRAIN, 0), Reader(NUM_TEST, 1)
    found = losses(jn.data.stream(train, test, augment=augment, num_workers=0), strategy)
    return found, train.read, test.read


def pictures(root: str, strategy: str) -> list[dict[str, float]]:
    """The losses of a run on pictures that stay files."""
    splits = jn.data.image_folder(root, (4, 4), stream=True, augment=mirrored, num_workers=0)
    return losses(splits, strategy, jn.models.MLP((5, 2)))


def in_two(call: str) -> list[Any]:
    """What a call of a function in here gives in each of two processes."""
    done = processes.run(
        f"import json\nfrom tests.parallel import test_distributed_stream as here\nsay(json.dumps(here.{call}))"
    )
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2, done
    return [json.loads(process.out.splitlines()[-1]) for process in done]


def assert_same_losses(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == NUM_STEPS // 5
    for line, wanted in zip(found, expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "fsdp", "pmap"])
def test_two_processes_that_stream_train_as_one_does_and_read_only_their_rows(strategy: str) -> None:
    expected, *_ = streamed("data")
    order = jn.data.stream(Reader(NUM_TRAIN, 0), num_workers=0).train.order(0, np.arange(NUM_STEPS * 2), BATCH_SIZE)
    batches = np.arange(NUM_TEST).reshape(-1, BATCH_SIZE)
    for rank, (found, train, test) in enumerate(in_two(f"streamed({strategy!r})")):
        assert_same_losses(found, expected)
        own = slice(None) if strategy == "pmap" else slice(4 * rank, 4 * rank + 4)
        # The first examples are looked at for their shapes.
        shown = set(range(BATCH_SIZE))
        assert {*order[:NUM_STEPS, own].flat} <= {*train} <= {*order[:, own].flat} | shown
        assert {*test} - shown == {*batches[:, own].flat} - shown
        # They are read twice before, under pmap once more to compare devices, and may come again; nothing else does.
        assert len(train) - len({*train}) <= (3 if strategy == "pmap" else 2) * BATCH_SIZE


@pytest.mark.slow
def test_two_processes_train_on_pictures_that_stay_files_as_one_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, number, name in itertools.product(("train", "val"), range(12), ("cats", "dogs")):
        path = tmp_path / split / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 5, 3), np.uint8)).save(path)
    expected = pictures(str(tmp_path), "data")
    assert "validation_loss" in expected[-1]
    for found in in_two(f"pictures({str(tmp_path)!r}, 'fsdp')"):
        assert_same_losses(found, expected)
