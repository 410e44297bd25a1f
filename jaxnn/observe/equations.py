"""Every equation of a traced program, wherever it hides, with the named scopes around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def equations(jaxpr: Any, scopes: str = "") -> Iterator[tuple[Any, str]]:
    """The equations of ``jaxpr`` and of all jaxprs within it, each once as written.

    Args:
        jaxpr: what ``jax.make_jaxpr`` gives.
        scopes: the named scopes around the whole.

    Returns:
        Pairs of an equation and its scopes, outermost first: ``jvp(Model)/Conv_0``. What a transformation made stands
        in ``jvp(…)``, ``transpose(…)`` and so on.
    """
    for equation in jaxpr.eqns:
        # Within a jit or a scan, names begin anew.
        within = f"{scopes}/{equation.source_info.name_stack}"
        yield equation, within
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner, within)
