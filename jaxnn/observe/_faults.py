"""Known faults of the compiler that change numbers, and the way round them."""

import importlib.metadata
from typing import NamedTuple


class Fault(NamedTuple):
    """A pattern that some versions of jaxlib compile to wrong numbers."""

    versions: tuple[str, ...]  # of jaxlib
    platform: str
    pattern: str
    way_round: str  # and what it costs


_FAULTS = (
    Fault(
        ("0.12.0", "0.12.0.1"),
        "cpu",
        "a product with an array of one value, such as x @ jnp.full_like(x, c), whose result is reduced",
        "set XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=, at 5 to 30 % of the speed",
    ),
)


def known_faults(platform: str, version: str | None = None) -> list[Fault]:
    """Returns the known faults of a ``version`` of jaxlib, by default this one, on a ``platform`` such as ``"cpu"``.

    >>> len(jn.observe.known_faults("cpu", "0.12.0.1")), jn.observe.known_faults("gpu", "0.12.0.1")
    (1, [])
    """
    version = importlib.metadata.version("jaxlib") if version is None else version
    return [fault for fault in _FAULTS if fault.platform == platform and version in fault.versions]
