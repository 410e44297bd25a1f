"""The equations of a traced program, at any depth."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def equations(jaxpr: Any, scopes: str = "") -> Iterator[tuple[Any, str]]:
    """The equations of ``jaxpr`` and of all jaxprs within it, each once as written, with their named scopes.

    Scopes have the outermost first, ``jvp(Model)/Conv_0``; ``scopes`` are around all of it. Equations made by a
    transformation have scopes in ``jvp(…)``, ``transpose(…)`` and so on.
    """
    for equation in jaxpr.eqns:
        # Within a jit or a scan, names start again.
        within = f"{scopes}/{equation.source_info.name_stack}"
        yield equation, within
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner, within)
