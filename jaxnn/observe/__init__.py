"""Instruments: clocks, compilations, memory, devices, placement, precision, implementations, throughput."""

from jaxnn.observe.allocator import MAPPED_BYTES as MAPPED_BYTES
from jaxnn.observe.allocator import can_keep_freed_memory as can_keep_freed_memory
from jaxnn.observe.allocator import keeping_freed_memory as keeping_freed_memory
from jaxnn.observe.allocator import page_faults as page_faults
from jaxnn.observe.allocator import share_heap as share_heap
from jaxnn.observe.clock import Clock as Clock
from jaxnn.observe.compiles import Compilation as Compilation
from jaxnn.observe.compiles import Ledger as Ledger
from jaxnn.observe.compiles import compile_ahead as compile_ahead
from jaxnn.observe.compiles import temporary_bytes as temporary_bytes
from jaxnn.observe.devices import cpu_count as cpu_count
from jaxnn.observe.devices import describe_devices as describe_devices
from jaxnn.observe.devices import missing_gpu as missing_gpu
from jaxnn.observe.kernels import implementations as implementations
from jaxnn.observe.kernels import plain_convolutions as plain_convolutions
from jaxnn.observe.memory import available_bytes as available_bytes
from jaxnn.observe.memory import format_bytes as format_bytes
from jaxnn.observe.memory import nbytes as nbytes
from jaxnn.observe.memory import peak_memory_bytes as peak_memory_bytes
from jaxnn.observe.placement import Placement as Placement
from jaxnn.observe.placement import TreePlacement as TreePlacement
from jaxnn.observe.placement import observe_placement as observe_placement
from jaxnn.observe.precision import product_dtypes as product_dtypes
from jaxnn.observe.throughput import Throughput as Throughput
from jaxnn.observe.throughput import Window as Window
from jaxnn.observe.throughput import steady_throughput as steady_throughput
