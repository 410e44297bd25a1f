"""The study of what a run costs: steps, prices and cents by hand; a price stays with the figure it was given for."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from articles.studies import cost
from articles.studies.study_training import network

from jaxnn.bench import (
    Machine,
    Measured,
    NotMeasured,
    Quantity,
    Results,
    Row,
    Rows,
    bench,
    findings_table,
    merge,
    write_page,
)

CPU, GPU = "CPU, Chip, 2 cores", "GPU, H100"


def row(script: str, seconds: tuple[float, ...], dollars: float | None, share: float = 0.01) -> Row:
    """A call that is ``share`` of a run, on a device at ``dollars`` an hour."""
    observed: dict[str, Any] = {} if dollars is None else {"dollars an hour": dollars, "price": "as given"}
    return Row({"script": script}, seconds, share, "run", observed)


def results(label: str, rows: Rows) -> Results:
    machine = Machine(label, {}, None, "2026-11-21")
    return {"cost": Measured(cost.STUDY.definition(cost.QUICK), {label: (machine, rows)})}


def test_a_run_costs_its_calls_times_the_price_of_an_hour() -> None:
    # A hundredth of a run takes 0.9, 1.8 and 3.6 s: the run 90, 180 and 360 s, or a twentieth of an hour; $2 an hour.
    found = row("mnist_mlp", (0.9, 3.6, 1.8), dollars=2.0)
    assert cost.run_time(found) == Quantity(180.0, 90.0, 360.0, "s")
    cents = cost.run_cost(found)
    assert cents is not None and cents.unit == "cents"
    assert cents[:3] == pytest.approx((10.0, 5.0, 20.0))
    assert cost.run_cost(row("mnist_mlp", (), 2.0)) is None and cost.run_cost(row("mnist_mlp", (1.0,), None)) is None


def test_data_have_the_shape_of_the_article_s() -> None:
    counts = {}
    for name, make in cost.DATA.items():
        source, experiment = make().train, network(name)
        assert source.num_examples == cost.EXAMPLES[name]
        batch = jax.eval_shape(source.as_batch, source.read(np.arange(2)))
        params, _ = jax.eval_shape(experiment.task(experiment.config).init, jax.random.key(0), batch)
        counts[name] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert counts == {"mnist_mlp": 669_706, "mnist_cnn": 1_199_882, "imdb_lstm": 2_658_945}


def test_the_article_s_headline_follows_from_its_figures() -> None:
    runs = {name: cost.article_runs(name) for name in cost.PUBLISHED}
    cents = {name: (found["16 vCPUs"][1], found["K80"][1]) for name, found in runs.items() if found}
    assert len(cents) == 6 and [name for name, (cpu, gpu) in cents.items() if cpu > gpu] == ["mnist_cnn"]
    # 562.5 s of $0.12 an hour, and 129.9 s of $0.4975.
    assert cents["mnist_cnn"] == pytest.approx((1.875, 1.795), abs=0.001)


def test_a_price_is_known_or_asked_for() -> None:
    assert cost.price_of("cpu", "cpu", 16).dollars == pytest.approx(0.8208)
    assert cost.price_of("gpu", "NVIDIA H100 80GB HBM3", 16).dollars == 6.88
    assert cost.price_of("gpu", "NVIDIA A100-SXM4-40GB", 16).dollars == 2.745
    for other in ("NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Abacus"):
        with pytest.raises(NotMeasured, match=f"no price of {other} is known: add it to GPUS"):
            cost.price_of("gpu", other, 16)


def test_the_price_stays_with_the_figure_when_results_are_merged(tmp_path: Path) -> None:
    write_page(results(CPU, Rows([row("mnist_cnn", (3.6,), 0.5)])), tmp_path / "a", {}, ())
    write_page(results(GPU, Rows([row("mnist_cnn", (0.36,), 4.0)])), tmp_path / "b", {}, ())
    merged = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    table, _ = findings_table(cost.STUDY, merged)
    assert table[0][3:] == ("6 min", "36 s, 10×")
    # 360 s of $0.50 an hour are 5 cents, 36 s of $4 are 4.
    assert table[1][1:] == (
        "mnist_cnn, 12 epochs: cost",
        "K80 1.8 cents, 16 vCPUs 1.9 cents",
        "5 cents; at $0.5 an hour",
        "4 cents; at $4 an hour",
    )


def test_it_says_what_a_gpu_must_be_worth_and_who_was_cheapest() -> None:
    cpu = Rows(row(name, (seconds,), 0.1) for name, seconds in zip(cost.DATA, (1.0, 10.0, 1.0), strict=True))
    gpu = Rows(row(name, (0.1,), 2.0) for name in cost.DATA)
    told = cost.STUDY.conclude({CPU: cpu, GPU: gpu})
    # Ten times as fast is too little for twenty times the price, a hundred times is enough.
    assert f"To be cheaper than {CPU}, {GPU} must be more than 20× as fast." in told
    assert told[-1].startswith("A CPU is cheapest in 2 of 3 scripts; in the article ")
    assert len(told) == 4  # and each price


def test_without_a_gpu_it_says_what_one_of_a_given_price_must_be_worth() -> None:
    observed = {"dollars an hour": 0.1, "price": "", "dollars an hour of a GPU": 2.5, "price of a GPU": "dated"}
    found = row("mnist_mlp", (1.0,), None)._replace(observed=observed)
    told = cost.STUDY.conclude({CPU: Rows([found])})
    assert told[1:] == [f"To be cheaper than {CPU}, a GPU at $2.5 an hour (dated) must be more than 25× as fast."]


def test_a_run_on_this_machine_has_its_cost_on_the_page(tmp_path: Path) -> None:
    quick = dataclasses.replace(cost.QUICK, scripts=("mnist_mlp",), steps=1, seconds=0.0)
    study = dataclasses.replace(cost.STUDY, quick=quick)
    found = bench(study, devices=("cpu",), quick=True, out=tmp_path, say=lambda line: None)
    (rows,) = found["cost"].rows.values()
    assert rows.one(script="mnist_mlp").work == pytest.approx(1 / 9380)
    page = (tmp_path / "results.md").read_text()
    assert "| A18 | mnist_mlp, 20 epochs: cost | K80 0.89 cents, 16 vCPUs 0.26 cents | " in page
    assert "virtual CPUs of Amazon EC2 c7a" in page
