"""Decisions: verdicts, what is trained for them and what is not, sessions, interruptions, and the shell."""

import dataclasses
import json
import math
import os
import signal

import jax
import pytest

import jaxnn as jn
from jaxnn.cli import command
from jaxnn.decisions import Decision, DecisionInterrupted
from jaxnn.observe import cpu_count
from jaxnn.types import ConfigError, TrainingError
from tests import shell, tiny

QUIET = {"progress": "none"}
WORSE = {"learning_rate": 0.01}
LOSS = "test_loss"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a decision was made."""
    path = tmp_path_factory.mktemp("decisions")
    assert decide(path).verdict == "discard"
    return path


def decide(folder, b=WORSE, metric=LOSS, experiment=None, **options) -> Decision:
    return jn.decide(experiment or tiny.experiment(), b, metric, run_dir=folder, **{**QUIET, **options})


def sweeps(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("side-*/seeds-*")}


def test_pairs_are_members_with_equal_seeds(folder):
    found = decide(folder)
    assert found.verdict == "discard" and found.exit_code == 1 and [pair.seed for pair in found.pairs] == [*range(8)]
    for seed in (0, 5):
        for rate, value in ((0.1, found.pairs[seed].a), (0.01, found.pairs[seed].b)):
            alone = jn.fit(tiny.experiment(learning_rate=rate, seed=seed), record=False, **QUIET)
            assert value == pytest.approx(alone.final[LOSS], rel=1e-5)
    low, high = found.interval
    assert 0 < low < found.difference < high
    assert "discard: B is worse" in repr(found) and "learning_rate 0.01" in repr(found)
    assert len(found.plot().axes) == 2


def test_repeated_decision_trains_nothing(folder):
    before = sweeps(folder)
    found = decide(folder, max_seeds=100)
    assert found.repeated and found.verdict == "discard" and sweeps(folder) == before


def test_members_of_a_baseline_serve_all_candidates(folder):
    before = sweeps(folder)
    better = decide(folder, {"learning_rate": 0.3}, max_seeds=8)
    # One new sweep, of the candidate; the mirrored decision needs none.
    assert len(sweeps(folder) - before) == 1
    mirrored = decide(folder, tiny.experiment(), experiment=tiny.experiment(learning_rate=0.3), max_seeds=8)
    assert len(sweeps(folder) - before) == 1 and mirrored.difference == -better.difference
    assert {better.verdict, mirrored.verdict} in ({"keep", "discard"}, {"undecided"})
    assert [pair.a for pair in better.pairs] == [pair.a for pair in decide(folder).pairs]


def test_undecided_ones_continue_and_small_effects_are_no_difference(folder):
    near = {"learning_rate": 0.0999}
    found = decide(folder, near, max_seeds=8)
    assert found.verdict == "undecided" and "8 pairs" in found.why and found.exit_code == 3
    more = decide(folder, near, max_seeds=12)
    assert len(more.pairs) == 12 and not more.repeated and more.pairs[:8] == found.pairs
    assert decide(folder, near, max_seeds=10).repeated
    small = decide(folder, near, min_effect=0.1, max_seeds=12)
    assert small.verdict == "no difference" and small.exit_code == 2 and small.pairing_gain > 10
    few = decide(folder, near, max_steps=2 * 20 * 5, test="ranks")
    assert len(few.pairs) == 5 and few.verdict == "undecided"
    late = decide(folder, {"learning_rate": 0.0998}, max_seeds=32, budget="0.001 s")
    assert "0.001 s" in late.why and len(late.pairs) == 8


def test_initial_parameters_that_differ_are_not_called_the_same(tmp_path):
    task = tiny.TASK._replace(init=lambda key, batch: tiny.TASK.init(jax.random.fold_in(key, 1), batch))
    found = decide(tmp_path, tiny.experiment(task=lambda config: task), max_seeds=2)
    assert found.pairing == "initial parameters of the same shapes from the same seed and the same batches"
    assert found.names == ("tiny", "test_decide")  # of one config class: the files of their tasks


def test_a_session_bounds_the_share_of_false_discoveries(folder):
    rates = [{"learning_rate": rate} for rate in (0.01, 0.3, 0.0999)]
    found = [decide(folder, rate, session="s", alpha=0.2, max_seeds=12) for rate in rates]
    assert [one.number for one in found] == [1, 2, 3] and found[0].level < 0.2
    kept = [one.verdict for one in found[:2]].count("keep")
    again = decide(folder, rates[1], session="s", alpha=0.2, max_seeds=12)
    assert (again.number, again.level) == (2, found[1].level)
    fresh = decide(folder, {"learning_rate": 0.0998}, session="other", alpha=0.2, max_seeds=8)
    assert fresh.level == found[0].level and fresh.kept == 0 and found[2].kept == kept


def test_lost_members_do_not_flatter(tmp_path):
    with pytest.raises(TrainingError, match="B 8"):
        decide(tmp_path, {"learning_rate": math.inf}, max_seeds=8)


def test_an_interrupted_decision_continues_to_the_same_one(folder, tmp_path):
    class Interrupting:
        def __init__(self):
            self.left = 3

        def write(self, lines):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(DecisionInterrupted, match="ask again"):
        decide(tmp_path, writers=(Interrupting(),), report_every=2)
    assert not (tmp_path / "decisions.jsonl").exists()
    found = decide(tmp_path, writers=(), report_every=2)
    assert found.verdict == "discard" and [pair.a for pair in found.pairs] == pytest.approx(
        [pair.a for pair in decide(folder).pairs], rel=1e-6
    )


def test_folders_of_decisions_are_listed_and_shown(folder, capsys):
    command(["runs", str(folder)])
    listed = capsys.readouterr().out
    assert "seeds-0-7" not in listed and "decisions" in listed
    command(["show", str(folder)])
    shown = capsys.readouterr().out
    assert "learning_rate 0.01 against learning_rate 0.1" in shown and "discard" in shown


def test_skewed_differences_are_named(folder):
    found = decide(folder)
    pairs = tuple(one._replace(b=one.a + (0.01 if one.seed else 1.0)) for one in found.pairs)
    assert "skewed" in repr(dataclasses.replace(found, pairs=pairs)) and "skewed" not in repr(found)


def test_a_torn_line_of_the_ledger_does_not_count(tmp_path):
    found = decide(tmp_path, max_seeds=8)
    file = tmp_path / "decisions.jsonl"
    file.write_text(file.read_text() + file.read_text()[:50])
    assert decide(tmp_path, max_seeds=8).repeated
    assert decide(tmp_path, test="ranks", max_seeds=8).pairs == found.pairs
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 2


def test_mistakes_are_named_before_training(tmp_path):
    for words, b, options in (
        ("A and B are the same", {"learning_rate": 0.1}, {}),
        ("did you mean 'test_loss'", WORSE, {"metric": "test_los"}),
        ("less than two pairs", WORSE, {"max_steps": 30}),
        ("resume is no option of decide", WORSE, {"resume": tmp_path}),
        ("b is 3", 3, {}),
    ):
        with pytest.raises(ConfigError, match=words):
            decide(tmp_path / "none", b, **options)
    with pytest.raises(ConfigError, match="A and B are the same"):
        decide(tmp_path / "none", {"learning_rate": 1}, experiment=tiny.experiment(learning_rate=1.0))
    assert not (tmp_path / "none").exists()


SCRIPT = """
import jaxnn as jn
from tests import tiny
experiment = tiny.experiment({})
if __name__ == "__main__":
    jn.main(experiment)
"""


def test_the_shell_exits_with_the_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, fields in (("base", ""), ("slow", "learning_rate=0.01"), ("same", "num_steps=20")):
        (tmp_path / f"{name}_of_decide.py").write_text(SCRIPT.format(fields))
    words = ["--metric", LOSS, "--max-seeds", "8", "--progress", "none"]
    base, slow, same = (f"{name}_of_decide.py" for name in ("base", "slow", "same"))
    with pytest.raises(SystemExit) as caught:
        command(["decide", base, slow, *words, "--json", "--picture", "d.png"])
    found = json.loads(capsys.readouterr().out)
    assert caught.value.code == 1 and found["verdict"] == "discard" and (tmp_path / "d.png").stat().st_size > 1000
    both = ["--both", "learning_rate=0.003", "num_steps=19", "--learning-rate", "0.3", "--seed", "7"]
    command(["decide", base, *both, *words[:2], *words[4:], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "keep" and found["pairs"][0]["seed"] == 7
    assert found["names"] == ["learning_rate 0.003, with num_steps=19", "learning_rate 0.3, with num_steps=19"]
    assert "are the same" in shell.fails(capsys, command, "decide", base, same, *words, status=4)
    assert "did you mean" in shell.fails(capsys, command, "decide", base, "--both", "learnin_rate=1", status=4)
    shell.fails(capsys, command, "decide", base, slow, "--alpha", "x", status=4)


@pytest.mark.slow
def test_the_shell_decides_on_all_cores():
    script = (
        "import jax, jaxnn as jn\nfrom tests import tiny\n"
        "try: jn.main(tiny.experiment(), ['decide', '--learning-rate', '0.2', '--metric', 'none'])\n"
        "except SystemExit as error: print(error.code, jax.device_count())\n"
    )
    done = shell.python("-c", script)
    assert done.stdout.split() == ["4", str(min(cpu_count(), 16))], done.stderr
