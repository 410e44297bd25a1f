"""What is printed before a run's first step: the device, what was placed where, what was chosen, what to change."""

from __future__ import annotations

from typing import Any

import jax

from jaxnn.engine import Choice, Trainer
from jaxnn.nn import platform
from jaxnn.observe import cpu_count, device_kind, missing_gpu
from jaxnn.parallel import find_devices

# The rows of the device and of the startup report are aligned: the longest name is "implementations".
NAME_WIDTH = 15
# A loop this much slower than a step alone is worth a word.
SLOW_LOOP = 1.5


def device_rows(num_used: int | None = None) -> list[tuple[str, str | None]]:
    """Rows of name and value: the first device, how many of how many are used, CPU cores, JAX's version, a warning."""
    devices = find_devices()
    device, num_devices = devices[0], len(devices)
    place = f"{device.platform}:{device.id} ({device_kind(device)})"
    used = "" if num_used is None else f"{num_used} of "
    among = f", {used}{num_devices} devices" if num_devices > 1 else ""
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    described = f"{place}{among}{processes}; {cpu_count()} CPU cores; jax {jax.__version__}"
    return [("device", described), ("warning", missing_gpu())]


def startup_report(
    trainer: Trainer, record: str | None, resumed: dict[str, Any] | None
) -> list[tuple[str, str | None]]:
    """Rows of name and value."""
    choice = trainer.choice
    assert isinstance(choice, Choice)
    parameters = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(trainer.state.params)})
    products = ", ".join(f"{count} in {dtype}" for dtype, count in trainer.programs.product_dtypes.items())
    used = (f"{operation} {' and '.join(names)}" for operation, names in trainer.programs.implementations.items())
    tried = ", ".join(f"{n}: {_milliseconds(seconds)} a step" for n, seconds in choice.seconds_per_step.items())
    return [
        ("strategy", _strategy(trainer)),
        *(("placement", str(tree)) for tree in trainer.placement()),
        ("precision", f"parameters {', '.join(parameters)}; matrix products and convolutions: {products or 'none'}"),
        ("implementations", ", ".join(used) or None),
        ("steps per call", f"{choice.steps_per_call} ({tried})" if tried else str(choice.steps_per_call)),
        ("hint", convolution_hint(trainer)),
        ("record", record),
        ("resumed", None if resumed is None else _resumed(resumed)),
    ]


def convolution_hint(trainer: Trainer) -> str | None:
    """What to change if convolutions that are not jaxnn's make loops slow, with the cost here."""
    count, choice = trainer.programs.plain_convolutions, trainer.choice
    assert isinstance(choice, Choice)
    if count == 0 or platform() != "cpu":
        return None
    if choice.seconds_per_step:
        alone = choice.seconds_per_step[1]
        looped = min((seconds for steps, seconds in choice.seconds_per_step.items() if steps > 1), default=0.0)
        cost = f"{_milliseconds(alone)} a step alone, {_milliseconds(looped)} in a loop"
        slow = looped > SLOW_LOOP * alone
    else:
        cost, slow = "not measured here", choice.steps_per_call > 1
    if not slow:
        return None
    subject = "1 convolution is" if count == 1 else f"{count} convolutions are"
    return (
        f"{subject} not jaxnn's, and slow in a loop on a CPU ({cost}): use jn.nn.Conv, which has the same parameters, "
        "or flax.linen.Conv(…, conv_general_dilated=jn.nn.conv_general_dilated)"
    )


def _strategy(trainer: Trainer) -> str | None:
    """How the run is placed on its devices; what to do if others are idle."""
    layout, size = trainer.programs.layout, trainer.experiment.config.batch_size
    if layout.mesh is None:
        idle = len(find_devices()) - 1
        return f"1 device; --devices all would use the other {idle} too" if idle else None
    return f"{layout}: a batch of {size} is {layout.data_size} × {size // layout.data_size} examples"


def _resumed(resumed: dict[str, Any]) -> str:
    changed = "; ".join(resumed["changed"])
    note = f", not bit for bit, since these changed: {changed}" if changed else ""
    return "; ".join([f"after step {resumed['step']}{note}", *resumed["damaged"]])


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
