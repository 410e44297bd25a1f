"""What a run reports before its first step: what was placed where, what was chosen, and what to change."""

from __future__ import annotations

import jax

from jaxnn.loop.session import Session
from jaxnn.nn import platform
from jaxnn.parallel import find_devices

# A loop this much slower than a step alone is worth a word.
SLOW_LOOP = 1.5


def introduction(session: Session) -> list[tuple[str, str]]:
    """Rows of what and value, for a table."""
    choice = session.choice
    rows: list[tuple[str, str | None]] = [
        ("strategy", _strategy(session)),
    ]
    rows += [("placement", line) for line in session.placement().lines()]
    rows += [
        ("precision", _precision(session)),
        ("implementations", _implementations(session.programs.implementations)),
        ("steps per call", _explain(choice.steps_per_call, choice.seconds_per_step)),
        ("allocator", session.allocation.line(choice.steps_per_call)),
        ("hint", convolution_hint(session)),
        ("record", None if session.record is None else str(session.record.path)),
        ("resumed", _resumed(session)),
    ]
    return [(name, value) for name, value in rows if value is not None]


def convolution_hint(session: Session) -> str | None:
    """What to change where convolutions that are not jaxnn's make loops slow, with what that costs here."""
    count, choice = session.programs.plain_convolutions, session.choice
    if count == 0 or platform() != "cpu":
        return None
    if choice.seconds_per_step:
        alone = choice.seconds_per_step[1]
        looped = min((seconds for steps, seconds in choice.seconds_per_step.items() if steps > 1), default=0.0)
        cost = f"{_format_milliseconds(alone)} a step alone, {_format_milliseconds(looped)} in a loop"
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


def _strategy(session: Session) -> str | None:
    """How the run lies on its devices; what to do where others are idle."""
    layout, size = session.programs.layout, session.experiment.config.batch_size
    if layout.mesh is None:
        idle = len(find_devices()) - 1
        return f"1 device; --devices all would use the other {idle} too" if idle else None
    return f"{layout}: a batch of {size} is {layout.data_size} × {size // layout.data_size} examples"


def _precision(session: Session) -> str:
    parameters = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(session.state.params)})
    products = session.programs.product_dtypes
    listed = ", ".join(f"{count} in {dtype}" for dtype, count in products.items())
    return f"parameters {', '.join(parameters)}; matrix products and convolutions: {listed or 'none'}"


def _implementations(found: dict[str, list[str]]) -> str | None:
    return ", ".join(f"{operation} {' and '.join(names)}" for operation, names in found.items()) or None


def _explain(steps_per_call: int, measured: dict[int, float]) -> str:
    tried = ", ".join(f"{n}: {_format_milliseconds(seconds)} a step" for n, seconds in measured.items())
    return f"{steps_per_call} ({tried})" if tried else str(steps_per_call)


def _resumed(session: Session) -> str | None:
    if session.resumed is None:
        return None
    changed = "; ".join(session.resumed["changed"])
    told = f", not bit for bit, since these changed: {changed}" if changed else ""
    return "; ".join([f"after step {session.resumed['step']}{told}", *session.resumed["damaged"]])


def _format_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
