"""Benchmark harness: cases, an interleaved timer, statistics, and results as JSON and Markdown."""

from harness._results import (
    Machine,
    Measured,
    Part,
    Results,
    bench,
    describe_machine,
    findings_table,
    markdown_table,
    merge,
    read_results,
    write_page,
)
from harness._study import (
    Bench,
    Case,
    Finding,
    NotMeasured,
    Plain,
    Quantity,
    Row,
    Rows,
    Study,
    find_studies,
    format_ratio,
    load_study,
    quantity,
    ratios,
)
from harness._timer import interleaved, measure, measure_group, median_interval, per_call

__all__ = [
    "Case",
    "Finding",
    "NotMeasured",
    "Quantity",
    "Row",
    "Rows",
    "Study",
    "bench",
    "find_studies",
    "interleaved",
    "per_call",
    "quantity",
    "ratios",
]
