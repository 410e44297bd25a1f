"""Instruments: compilations, memory, devices, placement, precision, implementations, tables."""

from jaxnn._text import Table, text_table
from jaxnn.observe._compiler_options import given_up, known_faults
from jaxnn.observe._half_sums import half_sums
from jaxnn.observe._hlo import Work
from jaxnn.observe._machine import (
    Placement,
    available_bytes,
    describe_devices,
    device_kind,
    device_name,
    missing_gpu,
    nbytes,
    peak_memory_bytes,
)
from jaxnn.observe._programs import Compilation, Lowered, Traced, temporary_bytes
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
