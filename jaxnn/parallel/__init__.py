"""Devices, meshes and strategies: how one program is spread over many devices, and many processes over machines."""

from jaxnn.parallel.devices import PLATFORMS as PLATFORMS
from jaxnn.parallel.devices import choose_devices as choose_devices
from jaxnn.parallel.devices import computing_on as computing_on
from jaxnn.parallel.devices import find_devices as find_devices
from jaxnn.parallel.devices import first_devices as first_devices
from jaxnn.parallel.layout import SINGLE as SINGLE
from jaxnn.parallel.layout import STRATEGIES as STRATEGIES
from jaxnn.parallel.layout import Layout as Layout
from jaxnn.parallel.layout import make_layout as make_layout
from jaxnn.parallel.mesh import DATA as DATA
from jaxnn.parallel.mesh import check_divides as check_divides
from jaxnn.parallel.mesh import format_mesh as format_mesh
from jaxnn.parallel.mesh import make_mesh as make_mesh
from jaxnn.parallel.mesh import parse_mesh as parse_mesh
from jaxnn.parallel.processes import StopVote as StopVote
from jaxnn.parallel.processes import all_agree as all_agree
from jaxnn.parallel.processes import barrier as barrier
from jaxnn.parallel.processes import from_leader as from_leader
from jaxnn.parallel.processes import is_leader as is_leader
from jaxnn.parallel.processes import process_count as process_count
from jaxnn.parallel.processes import when_lost as when_lost
from jaxnn.parallel.shardings import shardings_of as shardings_of
