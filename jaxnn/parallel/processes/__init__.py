"""Runs of several processes: how they start together, agree, and end together.

``start_processes`` calls the roll over one TCP connection a process to process 0, then starts JAX's own distributed
runtime, which goes over the same port. Afterwards ``jax.devices()`` are those of all processes. The connections stay:
who dies is noticed at once, and every other process ends with a sentence and a status that say: go on later.
"""

from __future__ import annotations

from jaxnn.parallel.processes.agreement import StopVote as StopVote
from jaxnn.parallel.processes.agreement import all_agree as all_agree
from jaxnn.parallel.processes.agreement import barrier as barrier
from jaxnn.parallel.processes.agreement import broadcast_from_primary as broadcast_from_primary
from jaxnn.parallel.processes.agreement import process_count as process_count
from jaxnn.parallel.processes.place import Place as Place
from jaxnn.parallel.processes.place import detect_place as detect_place
from jaxnn.parallel.processes.start import is_primary as is_primary
from jaxnn.parallel.processes.start import joined as joined
from jaxnn.parallel.processes.start import set_resume_hint as set_resume_hint
from jaxnn.parallel.processes.start import start_processes as start_processes
from jaxnn.parallel.processes.start import stop_processes as stop_processes
