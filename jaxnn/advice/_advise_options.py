"""Options of advice: which devices are compared, and how far the search goes."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxnn.engine import check_choice, check_count


@dataclasses.dataclass(frozen=True)
class AdviseOptions:
    """How to measure; flags of every script's ``advise`` and keyword arguments of ``jn.advise``."""

    devices: tuple[str, ...] | None = None
    """Kinds of device to compare, such as cpu gpu; default: all that there are."""
    members: int = 64
    """The most members of a sweep to try side by side; 1: none are tried."""
    progress: Literal["auto", "none"] = "auto"
    """Whether to say what is being done."""

    def __post_init__(self) -> None:
        check_count("members", self.members, 1)
        check_choice("progress", self.progress, ("auto", "none"))
