"""What differs between two recorded runs, from which step, and the likeliest cause."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxnn as jn
from jaxnn import _fingerprints
from jaxnn._disk import write_json
from jaxnn.cli import command
from tests import tiny

ROW = 5
ORDER = np.asarray(tiny.splits().train.order(0, np.arange(20, dtype=np.int32), 8))
FIRST = 1 + int(np.argmax((ORDER == ROW).any(axis=1)))  # the first step whose batch has the row


def other_row() -> jn.Splits:
    inputs, labels = tiny.points(tiny.NUM_TRAIN)
    inputs[ROW, 1] += 1
    return jn.data.arrays(train=(inputs, labels), test=tiny.points(tiny.NUM_TEST, 1), name="points")


def half_loss(*given: Any) -> Any:
    total, rest = tiny.TASK.loss(*given)
    return 0.5 * total, rest  # the line that the difference names


def other_init(*given: Any) -> Any:
    return {**tiny.init(*given), "bias": jnp.ones(3)}


DERIVED = tiny.TASK._replace(derive_metrics=lambda means: {**means, "loss": means["loss"] + 1})
# What is planted: the experiment, the part that is the cause and words of it, and the first step; None: none parts.
PLANTS: dict[str, tuple[dict[str, Any], str, str, int | None]] = {
    "nothing": ({}, "", "", None),
    "config": ({"learning_rate": 0.2}, "config", "learning_rate 0.1 → 0.2", 1),
    "seed": ({"seed": 1}, "config", "seed 0 → 1", 0),
    "row": ({"data": other_row()}, "data", f"1 of 37 rows ({ROW}) of train/inputs", FIRST),
    "loss": ({"task": lambda config: tiny.TASK._replace(loss=half_loss)}, "program", "test_diff.py", 1),
    "init": ({"model": (other_init, tiny.apply)}, "program", "the initial values", 0),
    "evaluation": ({"task": lambda config: DERIVED}, "program", "the evaluation", None),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.fit(tiny.experiment(), tmp_path_factory.mktemp("base") / "run").dir


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_difference_is_named_with_its_first_step(plant: str, base: Path, tmp_path: Path):
    parts, part, words, step = PLANTS[plant]
    experiment = tiny.experiment(**parts)
    found = jn.diff(base, tiny.fit(experiment, tmp_path / "run"), (tiny.experiment(), experiment))
    assert (found.parting and found.parting.step) == step
    assert (found.parted is None) == (step is None) and found.why_no_parting == ""
    assert [one.part for one in found.causes[:1]] == ([part] if part else [])
    assert not part or words in str(found.causes[0])
    if plant == "nothing":
        assert found.headline == "Nothing differs up to step 20 (digests)."
    if plant == "row":
        assert found.parting is not None and found.parting.batch is not None and found.parting.batch.numbers == 1
        assert found.headline.startswith(f"Equal until step {step - 1} (replayed); step {step} differs, its batch")


def test_records_without_the_newer_facts_are_compared_by_their_metrics(base: Path, tmp_path: Path):
    old = shutil.copytree(base, tmp_path / "old")
    facts = tiny.read(old)
    del facts["code"], facts["groups"][0]["arrays"], facts["groups"][0]["fingerprint"]["start"]
    facts["groups"][0]["fingerprint"]["data"] = "other"
    write_json(old / "record.json", facts)
    lines = [{name: value for name, value in line.items() if name != "digest"} for line in tiny.lines(old)]
    lines[-1]["train_loss"] += 1
    (old / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert jn.diff(base, old).headline == jn.diff(old, base).headline
    found = jn.diff(old, base)
    assert [(one.name, one.first, one.largest) for one in found.metrics] == [("train_loss", 20, pytest.approx(1))]
    lacking = "digests of the states, what is not committed, the program of the initial values and the digests of rows"
    assert found.not_recorded == (f"{lacking}, by A",) and "train_loss differ from step 20" in found.headline


def test_members_and_a_run_are_compared_on_the_command_line(base: Path, tmp_path: Path, capsys: Any):
    swept = jn.sweep(tiny.experiment(), jn.grid(seed=[0, 3]), run_dir=tmp_path / "sweep", **tiny.MEMBERS).dir
    command(["diff", str(swept), str(swept), "--member", "0", "1"])
    assert "cause: seed 0 → 3 (config)" in capsys.readouterr().out.splitlines()[0]
    command(["diff", str(base), str(swept), "--member", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [one["text"] for one in found["differences"] if one["part"] == "config"] == ["seed 0 → 3"]
    with pytest.raises(jn.ConfigError, match="no record"):
        jn.diff(base, dataclasses.replace(jn.open_run(base), dir=None))


def test_listing_is_cut_and_rows_in_another_order_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_fingerprints, "MOST_LISTED", 12)
    assert _fingerprints.program_listing({"step": ["abc", "defghi"]}).splitlines() == [
        "# step",
        "abc",
        _fingerprints.CUT,
    ]
    rows = np.arange(300.0).reshape(100, 3).astype(np.float32)
    one, other = (_fingerprints.block_digests(jn.data.arrays(x))["train/inputs"] for x in (rows, rows[::-1]))
    assert one["sum"] == other["sum"] and one["digests"] != other["digests"] and one["block"] == 2
