"""How sure a sweep is: importance of its fields, and its best point with fresh seeds."""

import dataclasses

import numpy as np
import pytest

import jaxnn as jn
from tests import swept, tiny


def planted(path, count: int, effect: float = 4.0) -> jn.Sweep:
    """Losses over decades, by the learning rate and, less, by the kind; dropout has no effect."""
    rng, points = np.random.default_rng(count), {}
    for _ in range(count):
        rate, kind = 10.0 ** rng.uniform(-4, 0), str(rng.choice(["a", "b", "c"]))
        power = effect * (abs(np.log10(rate) + 2) / 2 + 0.3 * (kind == "b")) + 0.05 * rng.normal()
        points[(rate, rng.uniform(), kind)] = np.exp(power)
    return swept.sweep(path, points, "learning_rate", "model.dropout", "kind")


def test_importance_finds_the_fields_that_matter(tmp_path):
    sweep = planted(tmp_path / "s", 60)
    found = sweep.importance()
    rate, kind, dropout = (found.fields[name] for name in ("learning_rate", "kind", "model.dropout"))
    assert 0.4 < rate.low < rate.value < rate.high <= 1 and 0.05 < kind.low and found.total.value > 0.8
    assert abs(dropout.value) < 0.02 and dropout.low < 0 < dropout.high and not found.warnings
    assert "log test_loss over 60 members" in repr(found)
    (bars,) = (axes for axes in sweep.plot().axes if axes.get_xlabel() == "% of the variation")
    widths = {
        label.get_text(): bar.get_width() for label, bar in zip(bars.get_yticklabels(), bars.patches, strict=True)
    }
    assert widths == pytest.approx({name: 100 * share.value for name, share in found.fields.items()})
    # Of a search: at the last step that half of the members reached.
    better = {member.index for member in sweep.ranked()[:25]}
    members = (one if one.index in better else dataclasses.replace(one, status="pruned") for one in sweep.members)
    lines = tuple(line for line in sweep.lines if line["step"] == 10 or line["member"] in better)
    sweep = dataclasses.replace(sweep, members=tuple(members), lines=lines)
    assert (found := sweep.importance()).step == 10 and len(found.members) == 60
    with pytest.warns(UserWarning, match=r"25 members are few: .* 3 fields needs 30|may explain nothing"):
        assert {*sweep.importance(step=20).members} == better
    with pytest.warns(UserWarning, match=r"may explain nothing of test_loss: R² is -\d+ %"):
        planted(tmp_path / "noise", 40, effect=0.0).importance()


def test_fresh_seeds_show_what_was_luck(tmp_path, capsys):
    experiment, path = tiny.experiment(learning_rate=1e-4), tmp_path / "sweep"
    # Rates that compute nearly the same, each with a seed of its own: the best is the luckiest.
    points = jn.search.zip(learning_rate=[0.1 + 1e-6 * seed for seed in range(8)], seed=range(8))
    sweep = jn.sweep(experiment, points, run_dir=path, patience=9, **tiny.MEMBERS)
    best, runner_up, config = (found := sweep.confirm(4, progress="none")).candidates.values()
    assert found.member == sweep.best() and best.found < runner_up.found < best.fresh.spread.mean
    assert [one.verdict for one in found.comparisons.values()] == ["not separable", "better"] and np.isnan(config.found)
    assert {member.point["seed"] for member in found.sweep.members} == {8, 9, 10, 11} and found.sweep.dir is not None
    record = (found.sweep.dir / "record.json").read_bytes()
    again = jn.open_sweep(path, experiment.replace(learning_rate=1.0)).confirm(4, progress="none")
    assert repr(again) == repr(found) and record == (found.sweep.dir / "record.json").read_bytes(), "trained once"
    assert b'"patience": 9' in record and "4 fresh seeds" in repr(found)
    jn.main(experiment, ["sweep", *"--seed 0 1 --no-record --progress none --confirm 2".split()])
    assert "2 fresh seeds" in capsys.readouterr().out
