"""Devices, meshes and strategies: one program on many devices, in one process or several."""

from jaxnn._transfers import PINNED, fetching
from jaxnn.parallel._devices import (
    DATA,
    choose_devices,
    computing_on,
    find_devices,
    first_devices,
    format_mesh,
    make_mesh,
    parse_mesh,
)
from jaxnn.parallel._layout import SINGLE_DEVICE, Layout
from jaxnn.parallel._link import Ending, Link
from jaxnn.parallel._place import Place, is_primary, process_count
from jaxnn.parallel._processes import StopVote, all_agree, broadcast_from_primary, joined, set_resume_hint
from jaxnn.parallel._strategies import STRATEGIES, Strategy, strategy_for

__all__ = ["STRATEGIES", "Place", "Strategy", "joined"]
