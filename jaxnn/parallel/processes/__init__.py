"""Runs of several processes: how they start together, agree, and end together.

``start_processes`` calls the roll over one TCP connection a process to process 0, then starts JAX's own distributed
runtime, which goes over the same port. Afterwards ``jax.devices()`` are those of all processes. The connections stay:
who dies is noticed at once, and every other process ends with a sentence and a status that say: go on later.
"""

from __future__ import annotations

from jaxnn.parallel.processes.agreement import StopVote as StopVote
from jaxnn.parallel.processes.agreement import all_agree as all_agree
from jaxnn.parallel.processes.agreement import barrier as barrier
from jaxnn.parallel.processes.agreement import from_leader as from_leader
from jaxnn.parallel.processes.agreement import process_count as process_count
from jaxnn.parallel.processes.place import Place as Place
from jaxnn.parallel.processes.place import detect_place as detect_place
from jaxnn.parallel.processes.start import is_leader as is_leader
from jaxnn.parallel.processes.start import joined as joined
from jaxnn.parallel.processes.start import start_processes as start_processes
from jaxnn.parallel.processes.start import stop_processes as stop_processes
from jaxnn.parallel.processes.start import when_lost as when_lost
