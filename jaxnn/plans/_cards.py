"""Graphics cards: the published figures that a program is compiled for and bounded by."""

import functools
import json
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp

from jaxnn import engine
from jaxnn.observe import available_bytes, device_name
from jaxnn.types import ConfigError, suggest

MEMORY_SHARE = 0.75  # of a card's memory: JAX's default; the rest is for libraries, and for fragments
GB, KIB, MIB, TERA = 10**9, 2**10, 2**20, 10**12


class Card(NamedTuple):
    """A graphics card by its published figures; sizes in bytes, speeds per second, products without sparsity.

    A TOML file with these fields describes another: ``jn.plan(experiment, device="my_card.toml")``.

    Attributes:
        name: as the driver reports it.
        capability: compute capability, such as ``9.0``; empty for a CPU.
        cores: streaming multiprocessors; 0 for a device whose speeds were measured.
        clock_ghz: highest clock.
        memory: in bytes.
        bandwidth: of the memory.
        l2: second-level cache.
        shared_memory: per core.
        fpus: float32 units per core.
        threads: largest number per core.
        float32: FLOP/s outside tensor cores.
        tf32: FLOP/s of float32 products on tensor cores, ``float32`` if they have none.
        half: FLOP/s of float16 products, and of bfloat16 from capability 8.0.
        link: to other cards of a machine, one direction.
    """

    name: str
    capability: str
    cores: int
    clock_ghz: float
    memory: int
    bandwidth: float
    l2: int
    shared_memory: int
    fpus: int
    threads: int
    float32: float
    tf32: float
    half: float
    link: float

    def flops(self, dtype: str) -> float:
        """At most the FLOP/s of products in ``dtype``; XLA computes float32 products in TF32 by default."""
        # Before capability 8.0, tensor cores take float16 only. Products of one byte are at most twice as fast.
        brain = self.half if self.is_measured or float(self.capability) >= 8 else self.float32
        known = {"bfloat16": brain, "float16": self.half, "float32": self.tf32}
        return known.get(dtype, 2 * self.half if jnp.dtype(dtype).itemsize == 1 else self.float32)

    @property
    def usable(self) -> float:
        """Bytes that a run can allocate by default: JAX takes three quarters of a card."""
        return MEMORY_SHARE * self.memory

    @property
    def is_measured(self) -> bool:
        """Whether its speeds were measured, so that it has no published peak."""
        return not self.cores

    def target(self) -> str:
        """The card as XLA's ``GpuTargetConfigProto``, in text form; no GPU is needed to compile for it."""
        # CUDA 13 compiles for capability 7.5 and above.
        major, minor = max(self.capability, "7.5", key=float).split(".")
        features = "ACCELERATED_FEATURES" if int(major) >= 9 else "NONE"
        per_block = self.shared_memory - KIB if int(major) >= 8 else self.shared_memory
        fields = {
            **{"threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 48 * KIB},
            **{"shared_memory_per_core": self.shared_memory, "threads_per_core_limit": self.threads},
            **{"core_count": self.cores, "fpus_per_core": self.fpus, "block_dim_limit_x": 2**31 - 1},
            **{"block_dim_limit_y": 2**16 - 1, "block_dim_limit_z": 2**16 - 1, "memory_bandwidth": int(self.bandwidth)},
            **{"l2_cache_size": self.l2, "clock_rate_ghz": self.clock_ghz, "device_memory_size": self.memory},
            **{"shared_memory_per_block_optin": per_block, "registers_per_core_limit": 2**16},
            **{"registers_per_block_limit": 2**16, "thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024},
            "thread_dim_limit_z": 64,
        }
        lines = [f"  {name}: {value}" for name, value in fields.items()]
        capability = f"major: {major} minor: {minor} feature_extension: {features}"
        # XLA finds the libraries' versions on the machine otherwise, and compiles without cuDNN if there is none.
        versions = 'runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"'
        body = "\n".join([*lines, f"  cuda_compute_capability {{ {capability} }}", f"  {versions}"])
        return (
            f'gpu_device_info {{\n{body}\n}}\nplatform_name: "CUDA"\ndevice_description_str: {json.dumps(self.name)}\n'
        )


# Sources: NVIDIA's architecture white papers (V100 2017, T4 2018, A100 2020, Ada 2022, H100 2022, Blackwell 2024) and
# data sheets (L4 2023, H200 2023); clocks, caches and memory as the cards report them, which XLA's own target
# configurations of V100, A100, H100, H200 and B200 list. Products are dense, with accumulation in float32.
CARDS = {
    "v100": Card(
        *("Tesla V100-SXM2-16GB", "7.0", 80, 1.53, 16_935_682_048, 898 * GB, 6 * MIB, 96 * KIB, 64, 2048),
        *(15.7 * TERA, 15.7 * TERA, 125 * TERA, 150 * GB),
    ),
    "t4": Card(
        *("Tesla T4", "7.5", 40, 1.59, 15_843_721_216, 320 * GB, 4 * MIB, 64 * KIB, 64, 1024),
        *(8.1 * TERA, 8.1 * TERA, 65 * TERA, 16 * GB),
    ),
    "a100": Card(
        *("NVIDIA A100-SXM4-80GB", "8.0", 108, 1.41, 85_100_068_864, 2039 * GB, 40 * MIB, 164 * KIB, 64, 2048),
        *(19.5 * TERA, 156 * TERA, 312 * TERA, 300 * GB),
    ),
    "l4": Card(
        *("NVIDIA L4", "8.9", 58, 2.04, 23_580_639_232, 300 * GB, 48 * MIB, 100 * KIB, 128, 1536),
        *(30.3 * TERA, 60 * TERA, 121 * TERA, 32 * GB),
    ),
    "rtx4090": Card(
        *("NVIDIA GeForce RTX 4090", "8.9", 128, 2.52, 25_386_352_640, 1008 * GB, 72 * MIB, 100 * KIB, 128, 1536),
        *(82.6 * TERA, 82.6 * TERA, 165.2 * TERA, 32 * GB),
    ),
    "h100": Card(
        *("NVIDIA H100 80GB HBM3", "9.0", 132, 1.98, 84_942_979_072, 3352 * GB, 50 * MIB, 228 * KIB, 128, 2048),
        *(66.9 * TERA, 494.7 * TERA, 989.4 * TERA, 450 * GB),
    ),
    "h200": Card(
        *("NVIDIA H200", "9.0", 132, 1.98, 151_397_597_184, 4800 * GB, 50 * MIB, 228 * KIB, 128, 2048),
        *(66.9 * TERA, 494.7 * TERA, 989.4 * TERA, 450 * GB),
    ),
    "b200": Card(
        *("NVIDIA B200", "10.0", 148, 1.965, 191_514_411_008, 7672 * GB, 126 * MIB, 228 * KIB, 128, 2048),
        *(75 * TERA, 1_125 * TERA, 2_250 * TERA, 900 * GB),
    ),
}


def find_card(name: str | Path | Card) -> Card:
    """Returns a card by its name in `CARDS`, or of a TOML file; ConfigError if there is none."""
    if isinstance(name, Card):
        return name
    if not isinstance(name, str | Path):
        raise ConfigError(f"device must name a card, such as h100 or my_card.toml, not be {name!r}.")
    if (name := str(name)).endswith(".toml"):
        try:
            fields = tomllib.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the card {name} cannot be read: {error}.") from error
        if wrong := {*fields} ^ {*Card._fields}:
            reason = f"it must have the fields {', '.join(Card._fields)}, and differs in {', '.join(sorted(wrong))}"
            raise ConfigError(f"the card {name} cannot be read: {reason}.")
        for field, kind in get_type_hints(Card).items():
            value, form = fields[field], 'a text, such as "8.0"' if kind is str else "a number above 0"
            valid = type(value) is str if kind is str else type(value) in (int, float) and 0 < value < math.inf
            if not valid or (field == "capability" and not re.fullmatch(r"\d+\.\d", value)):
                raise ConfigError(f"the card {name} cannot be read: {field} must be {form}, not {value!r}.")
            fields[field] = kind(value)
        return Card(**fields)
    if name.lower() not in CARDS:
        raise ConfigError(f"the card {name!r} is unknown: {suggest(name.lower(), CARDS)}; or describe it in a .toml.")
    return CARDS[name.lower()]


@functools.cache
def _measured_speeds(device: jax.Device) -> tuple[float, float, float]:
    """FLOP/s of products in float32 and in bfloat16, and bytes/s of sums, measured in about a second."""
    # On a GPU so large that the overhead of a call is small beside them.
    size, width = (2**10, 2**24) if device.platform == "cpu" else (2**13, 2**27)

    def seconds(function: Callable[..., Any], *shapes: tuple[tuple[int, ...], str]) -> float:
        arrays = [jnp.ones(shape, dtype, device=device) for shape, dtype in shapes]
        call = jax.jit(function)
        return min(engine.Trial.measure(1, 1, lambda: call(*arrays), 0).seconds for _ in range(3))

    single, half = (
        2 * size**3 / seconds(jnp.matmul, *[((size, size), dtype)] * 2) for dtype in ("float32", "bfloat16")
    )
    return single, half, 12 * width / seconds(jnp.add, *[((width,), "float32")] * 2)


def card_here(device: jax.Device) -> Card:
    """The card of `CARDS` with the name of the ``device`` at hand; if there is none, one with measured speeds."""
    if (known := next((card for card in CARDS.values() if card.name == device.device_kind), None)) is not None:
        return known
    single, half, bandwidth = _measured_speeds(device)
    memory = available_bytes(device) or 0
    unknown = dict.fromkeys(("cores", "l2", "shared_memory", "fpus", "threads"), 0)
    return Card(
        name=device_name(device),
        capability="" if device.platform == "cpu" else str(getattr(device, "compute_capability", device.platform)),
        clock_ghz=0.0,
        memory=memory,
        bandwidth=bandwidth,
        link=bandwidth,
        float32=single,
        tf32=single,
        half=half,
        **unknown,
    )
