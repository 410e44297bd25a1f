"""Where, when and with what a benchmark was run."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from jaxnn.record.provenance import git_state


def about(device: str) -> dict[str, Any]:
    """What goes into a results file beside the results; ``device`` is a platform, as "cpu" or "cuda"."""
    return {
        "date": datetime.date.today().isoformat(),
        "git": git_state(Path(__file__).parent),
        "device": device_name(device),
        "cpu_count": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
    }


def device_name(device: str) -> str:
    """What the processor calls itself."""
    if device != "cpu":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
