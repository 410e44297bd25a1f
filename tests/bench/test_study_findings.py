"""Findings and conclusions of the studies, of the published pages and by hand; the networks and prices."""

from pathlib import Path

import jax
import numpy as np
import pytest
from articles.studies import (
    bandwidth,
    cats_vs_dogs,
    cost,
    keras_scripts,
    latency,
    networks,
    pipeline,
    text,
    transfer,
)
from articles.studies.study_devices import faster_from, shared_sizes
from articles.studies.study_training import network, training_cases

from jaxnn import data
from jaxnn.bench import (
    NotMeasured,
    Quantity,
    Row,
    Rows,
    find_studies,
    findings_table,
    load_study,
    merge,
    read_results,
    write_page,
)
from jaxnn.nn import unbox
from jaxnn.types import Splits
from tests import shell
from tests.studies import CPU, GPU, cases_of, on_cpu, results_of, sized, two_devices

# Of each network: parameters, as published or counted in the original code; shape of an input, vocabulary or 0, labels.
NETWORKS: dict[str, tuple[int, tuple[int, ...], int, int]] = {
    "mnist_mlp": (669_706, (28, 28, 1), 0, 10),
    "mnist_cnn": (1_199_882, (28, 28, 1), 0, 10),
    "cifar10_cnn": (1_250_858, (32, 32, 3), 0, 10),
    "imdb_lstm": (2_658_945, (100,), 20_000, 2),
    "imdb_fasttext": (60_151_751, (400,), 20_000, 2),
    "lstm_text_generation": (91_047, (40,), 39, 39),
    "text_generator": (444_546, (40,), 39, 39),
    "fcn5": (14_205_962, (28, 28, 1), 0, 10),
    "alexnet_r": (85_098, (32, 32, 3), 0, 10),
    "resnet56": (855_770, (32, 32, 3), 0, 10),
    "ptb_lstm": (6_180_624, (32,), 10_000, 10_000),
    "cats_and_dogs": (1_994_305, (150, 150, 3), 0, 2),
    "news_bag": (1_280_260, (64,), 20_000, 4),
    "news_lstm": (2_659_332, (64,), 20_000, 4),
}


def random_data(name: str, num_examples: int) -> Splits:
    """Random data in the shape of a network's own."""
    _, shape, tokens, classes = NETWORKS[name]
    random = np.random.default_rng(0)
    inputs = random.integers(0, tokens or 256, (num_examples, *shape), np.int32 if tokens else np.uint8)
    labels = random.integers(0, classes, inputs.shape if name == "ptb_lstm" else num_examples, np.int32)
    return data.arrays(train=(inputs, labels), name=name)


def test_article_scripts_fit_a_page_and_state_their_claim() -> None:
    scripts = shell.ROOT / "experiments" / "articles"
    files = {path.stem: path.read_text().splitlines() for path in scripts.glob("*.py")}
    assert set(files) == set(NETWORKS) >= {*keras_scripts.SCRIPTS, *networks.BATCH_SIZES}
    for lines in files.values():
        assert len(lines) <= 40 and [line.split()[0] for line in lines[2:5]] == ["Claim", "Command", "Result"]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_published_number_of_parameters(name: str) -> None:
    task, source = network(name).task(network(name).config), random_data(name, 2).train
    batch = source.as_batch(source.read(np.arange(2)))
    params, _ = jax.eval_shape(lambda key: task.init(key, batch), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(unbox(params))) == NETWORKS[name][0]


@pytest.mark.parametrize("name", ["articles_cpu", "scaling_cpu"])
def test_published_pages_are_those_of_the_recorded_results(name: str, tmp_path: Path) -> None:
    published = shell.ROOT / "experiments" / "results" / name
    own = load_study(str(shell.ROOT / "experiments" / "scaling.py"), {})
    write_page(read_results(published), tmp_path, find_studies() | {own.name: own}, ())
    for file in ("results.md", "results.json"):
        assert (tmp_path / file).read_text() == (published / file).read_text()


def test_bandwidth_counts_the_bytes_that_are_read_and_written() -> None:
    cases = cases_of(bandwidth.STUDY, two_devices(bandwidth.Settings((64, 256, 1024), largest_on_cpu=256)))
    work = {case.what["operation"]: case.work for case in cases if case.what["size"] == 256}
    assert work == {"copy": 512, "scale": 512, "sum": 256} and {case.unit for case in cases} == {"B"}
    assert {case.device for case in cases if case.what["size"] == 1024} == {"gpu"}


def test_the_knee_is_the_smallest_batch_with_half_of_the_best_throughput() -> None:
    for times, expected in (
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.6}, 4),  # 1, 2, 4 and 5 examples/s
        ({4: 1.0, 2: 1.0, 1: 1.0}, 2),  # exactly half, in another order
        ({1: 1.0, 8: 1.0, 9: 3.0, 20: 2.0}, 8),  # 1, 8, 3 and 10 examples/s
    ):
        found = latency.knee(sized("batch", times))
        assert found is not None and found.what["batch"] == expected
    assert latency.knee(Rows()) is None and latency.knee(Rows([Row({"batch": 1}, missing="no memory")])) is None


def test_latency_conclusions() -> None:
    cpu = sized("batch", {1: 0.001, 10: 0.002, 100: 0.025}, network="MLP")  # 1000, 5000, 4000 examples/s
    gpu = sized("batch", {1: 0.004, 10: 0.004, 100: 0.005}, network="MLP")  # 250, 2500, 20000 examples/s
    assert latency.STUDY.conclude({"CPU, a": cpu, "GPU, b": gpu}) == [
        "CPU, a, MLP: a batch of 10 has 2× the latency of one example and 5× its throughput.",
        "GPU, b, MLP: a batch of 100 has 1.25× the latency of one example and 80× its throughput.",
        "MLP, GPU, b relative to CPU, a: latency of one example 4×, best throughput 4×; lower latency from batch size "
        "100.",
    ]
    slow = sized("batch", {1: 0.004, 10: 0.02, 100: 0.25}, network="MLP")  # 250, 500, 400 examples/s
    own, compared = latency.STUDY.conclude({"CPU, a": cpu, "GPU, b": slow})[1:]
    assert own == "GPU, b, MLP: batch size 1 already reaches half of the best throughput."
    assert compared.endswith("lower latency at no batch size measured on both.")


def test_crossover_of_two_devices() -> None:
    slow = sized("size", {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    for times, expected in (
        ({1: 3.0, 2: 3.0, 4: 3.0, 8: 3.0}, 4),
        ({1: 0.5, 2: 3.0, 4: 3.0, 8: 3.0}, 4),  # faster at one small size by chance
        ({1: 0.5, 2: 0.5, 4: 0.5, 8: 0.5}, 1),
        ({1: 0.5, 2: 0.5, 4: 0.5, 8: 8.0}, None),
    ):
        assert faster_from(sized("size", times), slow, "size") == expected
    first, second = sized("size", {8: 1.0, 2: 1.0, 1: 1.0}), sized("size", {1: 2.0, 4: 9.0, 8: 2.0})
    missing = Rows([*second, Row({"size": 2}, missing="no memory")])
    assert shared_sizes(first, missing, "size") == [1, 8] and faster_from(first, missing, "size") == 1
    assert shared_sizes(first, Rows(), "size") == [] and faster_from(first, Rows(), "size") is None


def test_transfer_findings_and_conclusions() -> None:
    study, here, moved = transfer.STUDY, transfer.IN_PLACE, transfer.THERE_AND_BACK
    cpu = sized("size", {10: 1.0, 1000: 2.0, 100_000: 30.0}, operation="relu", form=here)
    resident = sized("size", {10: 1.5, 1000: 1.5, 100_000: 2.0}, operation="relu", form=here)
    gpu = Rows([*resident, *sized("size", {10: 9.0, 1000: 9.0, 100_000: 50.0}, operation="relu", form=moved)])
    assert study.conclude({"CPU, a": cpu, "GPU, b": gpu}) == [
        "ReLU: GPU, b is faster than CPU, a from 1,000 elements with data on the device; with transfers both ways, at "
        "no size up to 100,000 elements."
    ]
    assert study.conclude({"CPU, a": cpu}) == [] == study.conclude({"GPU, b": gpu})
    assert [finding.quantity and finding.quantity.median for finding in study.findings(gpu)] == [2.0, 50.0]


def test_pipeline_verdict_at_a_tenth_of_waiting() -> None:
    rows = [Row({}, (1.0,), observed={} if share is None else {"waited": share}) for share in (0.1, 0.09, None)]
    assert [pipeline.verdict(one) for one in rows] == ["input-bound", "not input-bound", ""]
    assert pipeline.waited(rows[0]) == Quantity(10.0, 10.0, 10.0, "%")


def test_costs_and_prices(tmp_path: Path) -> None:
    def run(script: str, *seconds: float, dollars: float | None) -> Row:
        observed = {} if dollars is None else {"dollars an hour": dollars, "price": "as given"}
        return Row({"script": script}, seconds, 0.01, "run", observed)

    assert cost.run_cost(run("mnist_mlp", dollars=2.0)) is cost.run_cost(run("mnist_mlp", 1.0, dollars=None)) is None
    prices = [cost.price_of(*device, 16).dollars for device in (("cpu", "cpu"), ("gpu", "NVIDIA A100-SXM4-40GB"))]
    assert prices == pytest.approx([0.8208, 2.745])
    for other in ("NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        with pytest.raises(NotMeasured, match="no price"):
            cost.price_of("gpu", other, 16)
    # A merged table keeps the price of each result: 360 s at $0.50 per hour are 5 cents, 36 s at $4 are 4 cents.
    for label, seconds, dollars in ((CPU, 3.6, 0.5), (GPU, 0.36, 4.0)):
        column = {label: Rows([run("mnist_cnn", seconds, dollars=dollars)])}
        write_page(results_of(cost.STUDY, cost.QUICK, column), tmp_path / label, {}, ())
    table, _ = findings_table(cost.STUDY, merge([tmp_path / CPU, tmp_path / GPU], tmp_path / "both"))
    assert table[0][3:] == ("6 min", "36 s, 10×")
    assert table[1][2:] == ("K80 1.8 cents, 16 vCPUs 1.9 cents", "5 cents; at $0.5 per hour", "4 cents; at $4 per hour")

    cpu = Rows(run(name, seconds, dollars=0.1) for name, seconds in zip(cost.DATA, (1.0, 10.0, 1.0), strict=True))
    gpu = Rows(run(name, 0.1, dollars=2.0) for name in cost.DATA)
    sentences = cost.STUDY.conclude({CPU: cpu, GPU: gpu})
    # Ten times as fast is too little for twenty times the price, a hundred times is enough.
    assert f"To be cheaper than {CPU}, {GPU} must be more than 20× as fast." in sentences
    assert sentences[-1].startswith("A CPU is cheapest in 2 of 3 scripts; in the article ") and len(sentences) == 4


def test_training_studies_compare_devices_and_time_steps_first() -> None:
    images = Row({"network": "cats_and_dogs", "batch_size": 150}, (2.0,), 150, "examples")
    columns = {"CPU, Chip": Rows([images]), "GPU, Chip": Rows([images._replace(seconds=(0.1,))])}
    (compared,) = cats_vs_dogs.STUDY.conclude(columns)
    assert compared.startswith("GPU, Chip is 20× as fast as CPU, Chip; in the article")
    # Steps of all networks are timed before the first is trained to its end.
    cases = [case for group in training_cases(on_cpu(text.STUDY.full)) for case in group]
    order = [(case.what["network"], case.observe is not None) for case in cases]
    assert order == [("news_bag", False), ("news_lstm", False), ("news_bag", True), ("news_lstm", True)]
