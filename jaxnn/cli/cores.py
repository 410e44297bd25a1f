"""All cores of a CPU as devices of their own, on for scripts that sweep: members lie on each."""

from __future__ import annotations

import contextlib
import os

import jax

from jaxnn.observe import cpu_count

# Data lie on every device, so that more copies than this would cost more memory than cores are worth.
MOST_DEVICES = 16


def use_all_cores() -> None:
    """Has JAX make a device of each CPU core, unless another number is configured or a backend runs already.

    XLA computes small operations on one core, whatever there are; members on several devices use several. A
    process-wide setting of JAX, which is why only command lines make it.
    """
    configured = jax.config.jax_num_cpu_devices > 0 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not configured:
        with contextlib.suppress(RuntimeError):  # a backend runs already
            jax.config.update("jax_num_cpu_devices", min(cpu_count() or 1, MOST_DEVICES))
