"""A search on Ray: all workers share one searcher; workers and the driver are killed."""

from pathlib import Path
from typing import Any

import pytest

import jaxnn as jn
from tests import shell, swept, tiny

LONG = tiny.experiment(num_steps=54)
RATE = {"learning_rate": jn.search.log_uniform(1e-3, 1.0)}
QUIET: Any = {"executor": "ray", "progress": "none", "vmap_size": 1, "steps_per_call": 2, "checkpoint_every": 6}

pytestmark = pytest.mark.slow


def check(path: Path, searcher: jn.search.Searcher) -> jn.Sweep:
    """Returns the sweep in ``path``: its decisions follow from the recorded reports, its members equal solo runs."""
    state, told, training = searcher.init(), dict[int, float](), 0
    for event in tiny.lines(path, "search.jsonl")[1:]:
        if "ask" in event:
            state, proposals = searcher.ask(state, event["ask"])
            members = [one.get("promote", one.get("fork", one.get("drop"))) for one in event["proposals"]]
            assert [getattr(one, "member", None) for one in proposals] == members
            training += sum("drop" not in one for one in event["proposals"])
        else:
            reports = [jn.search.Reached(one[0], one[1], float(one[2]), one[3]) for one in event["tell"]]
            assert all(told.get(one.member, 0) < one.share for one in reports)  # what is known is not told again
            told |= {one.member: one.share for one in reports}
            state, verdicts = searcher.tell(state, reports)
            assert verdicts == event["verdicts"] == ["pause"] * len(reports)
            training -= len(reports)
    assert training == 0 and not searcher.ask(state, 4)[1]
    sweep = jn.open_sweep(path, LONG)
    assert sweep.status == "finished" and sweep.dir == path
    assert [(one.index, one.step) for one in sweep.members] == [(n, round(54 * told[n])) for n in sorted(told)]
    lines = [(line["member"], line["step"]) for line in sweep.lines]
    assert len(lines) == len({*lines}) and dict(sorted(lines)) == {one.index: one.step for one in sweep.members}
    firsts = {one.step: one for one in reversed(sweep.members[:6])}  # no copies
    assert len(firsts) > 1
    for step, member in firsts.items():
        alone = tiny.fit(LONG.replace(**member.point), report_every=6, eval_every=6)
        at = list(alone.metrics["step"]).index(step)
        assert member.final["test_loss"] == pytest.approx(alone.metrics["test_loss"][at], rel=1e-5)
    return sweep


def test_workers_share_one_searcher(cluster, tmp_path):
    searcher, path = jn.search.asha(RATE, num=18), tmp_path / "sweep"
    found = jn.sweep(LONG, searcher, run_dir=path, lanes=4, **QUIET)
    assert found.rows() == check(path, searcher).rows()
    shards = [{one["member"] for one in tiny.lines(path / f"shards/{n}-of-2", "members.jsonl")} for n in (1, 2)]
    assert all(shards) and shards[0] | shards[1] == {*range(18)} and not shards[0] & shards[1]
    pruned = next(one for one in found.members if one.step == 18)
    rest = jn.fit(LONG, resume=path, member=pruned.index, run_dir=tmp_path / "rest", progress="none")
    assert rest.summary.step == 54 and rest.config.learning_rate == pruned.point["learning_rate"]
    assert found.run(found.best()).evaluate()["loss"] == pytest.approx(found.best().final["test_loss"], rel=1e-5)
    with pytest.raises(jn.RecordError, match="resume it with --resume .* --executor ray"):
        jn.sweep(LONG, resume=path)
    with pytest.raises(jn.ConfigError, match="the searcher of the sweep in .* is not this one"):
        jn.sweep(LONG, jn.search.asha(RATE, num=17), resume=path, **QUIET)


def test_members_of_a_killed_worker_are_asked_again(cluster, tmp_path):
    searcher, path = jn.search.pbt(RATE, 6, generations=3), tmp_path / "swept"
    jn.sweep(swept.killed_once(LONG, tmp_path), searcher, run_dir=path, lanes=4, **QUIET)
    resumed = [tiny.read(folder).get("resumed", []) for folder in (path / "shards").iterdir()]
    assert sorted(map(len, resumed)) == [0, 1] and max(resumed)[0]["step"] > 0
    check(path, searcher)


SCRIPT = """
import os, sys, pathlib, ray
import jaxnn as jn
from tests import swept, tiny
ray.init(address="local", num_cpus=4, num_gpus=int(sys.argv.pop(1)), include_dashboard=False)
jn.main(swept.killed_once(tiny.experiment(num_steps=54), pathlib.Path(sys.argv.pop(1)), os.getpid()))
"""


def test_a_search_whose_driver_was_killed_continues_on_one_gpu(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    (tmp_path / "script.py").write_text(SCRIPT)
    path = tmp_path / "swept"
    words = "--search asha --space learning_rate=log:1e-3:1 --num 18 --lanes 4 --checkpoint-every 6"
    how = "--executor ray --vmap-size 1 --steps-per-call 2 --progress none".split()

    def sweep(gpus: int, *given: Any) -> int:  # Ray is to believe that there are some
        done = shell.python(tmp_path / "script.py", gpus, tmp_path, "sweep", *given, *how, JAX_PLATFORMS="cpu")
        assert done.returncode <= 0, done.stdout + done.stderr
        return done.returncode

    assert sweep(2, *words.split(), "--run-dir", path) == -9
    events = (path / "search.jsonl").read_text()
    assert jn.open_sweep(path).status != "finished"  # workers may live on for a moment
    # A worker that waits for the other shard's members leaves the GPU to it.
    assert sweep(1, "--resume", path) == 0
    assert (path / "search.jsonl").read_text().startswith(events) and jn.open_sweep(path).status == "finished"
    check(path, jn.search.asha(RATE, num=18))
