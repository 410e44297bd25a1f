"""A benchmark harness: cases, an interleaved timer, statistics, and results as JSON and Markdown."""

from jaxnn.bench.figures import (
    Plain,
    Quantity,
    Row,
    Rows,
    exactly,
    format_ratio,
    median_interval,
    quantity,
    ratios,
    relative,
)
from jaxnn.bench.machine import Machine, describe_machine
from jaxnn.bench.results import (
    FILE,
    Measured,
    Part,
    Results,
    findings_table,
    machines_of,
    make_page,
    markdown_table,
    read_results,
    write_results,
)
from jaxnn.bench.runner import bench, measure_group, merge
from jaxnn.bench.study import Bench, Case, Finding, NotMeasured, Prepared, Study, find_studies, load_study
from jaxnn.bench.timer import interleaved, per_call
from jaxnn.bench.training import call_on, training_call

__all__ = [
    "FILE",
    "Bench",
    "Case",
    "Finding",
    "Machine",
    "Measured",
    "NotMeasured",
    "Part",
    "Plain",
    "Prepared",
    "Quantity",
    "Results",
    "Row",
    "Rows",
    "Study",
    "bench",
    "call_on",
    "describe_machine",
    "exactly",
    "find_studies",
    "findings_table",
    "format_ratio",
    "interleaved",
    "load_study",
    "machines_of",
    "make_page",
    "markdown_table",
    "measure_group",
    "median_interval",
    "merge",
    "per_call",
    "quantity",
    "ratios",
    "read_results",
    "relative",
    "training_call",
    "write_results",
]
