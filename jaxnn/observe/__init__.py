"""Instruments: clocks, compilations, memory, devices, placement, precision, implementations, throughput, tables."""

from jaxnn._text import text_table
from jaxnn.observe._clock import Clock, Throughput, steady_throughput
from jaxnn.observe._compiler_options import given_up, known_faults
from jaxnn.observe._equations import equations
from jaxnn.observe._half_sums import half_sums
from jaxnn.observe._hlo import Work, work_of
from jaxnn.observe._machine import (
    Placement,
    available_bytes,
    describe_devices,
    device_kind,
    device_name,
    missing_gpu,
    nbytes,
    observe_placement,
    peak_memory_bytes,
)
from jaxnn.observe._programs import (
    Compilation,
    Lowered,
    compile_totals,
    compiled_in_threads,
    implementations,
    lower_ahead,
    operations,
    plain_convolutions,
    product_dtypes,
    product_flops,
    temporary_bytes,
)
from jaxnn.types import cpu_count

__all__ = [
    "cpu_count",
    "describe_devices",
    "device_name",
    "given_up",
    "half_sums",
    "known_faults",
    "missing_gpu",
    "nbytes",
    "text_table",
]
