"""The equations of a traced program, at any depth, and their lines in the source."""

import re
from collections.abc import Iterator
from typing import Any

from jax.extend import core, source_info_util

_OWN = __file__.rpartition("_equations")[0]
_LIBRARY = re.compile(rf"{re.escape(_OWN)}|[^(]*/site-packages/(flax|optax|chex)/")
_FRAMES = 24  # that are looked at, from the innermost


def equations(jaxpr: Any, scopes: str = "") -> Iterator[tuple[Any, str]]:
    """The equations of ``jaxpr`` and of all jaxprs within it, each once as written, with their named scopes.

    Scopes have the outermost first, ``jvp(Model)/Conv_0``; ``scopes`` are around all of it. Equations made by a
    transformation have scopes in ``jvp(…)``, ``transpose(…)`` and so on.
    """
    for path, within in equation_paths(jaxpr, scopes):
        yield path[-1], within


def equation_paths(jaxpr: Any, scopes: str = "", path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """As `equations`, each equation after those around it, outermost first."""
    for equation in jaxpr.eqns:
        # Within a jit or a scan, names start again.
        within = f"{scopes}/{equation.source_info.name_stack}"
        yield (*path, equation), within
        for inner in core.jaxprs_in_params(equation.params):
            yield from equation_paths(inner, within, (*path, equation))


def source_line(equation: Any) -> str:
    """Returns the line of code that made an ``equation``, as ``train.py:31 (task)``, with the file's path.

    It is the innermost in the user's code, else in a library other than JAX; empty if there is none.
    """
    # Frames as "train.py:31:4 (task)".
    frames = source_info_util.summarize(equation.source_info, num_frames=_FRAMES).splitlines()[::-1]
    # At the top level of a script stands the call that trains.
    own = (frame for frame in frames if not _LIBRARY.match(frame) and not frame.endswith(" (<module>)"))
    place, _, function = next(own, next(iter(frames), "")).rpartition(" (")
    file, _, line = (place if place.count(":") < 2 else place.rpartition(":")[0]).rpartition(":")
    file = file.rpartition("/site-packages/")[2].replace(_OWN, "jaxnn/")
    return f"{file}:{line} ({function.replace('.<locals>', '')}" if place else ""


def constants_and_carries(scan: Any, body: Any) -> tuple[int, int]:
    """The number of constants of a ``scan``, its first inputs, and of its carries, which follow them.

    Both have the same shape in its ``body``; what has an axis of steps does not.
    """

    def alike(outside: Any, inside: Any) -> int:
        return sum(x.aval.shape == y.aval.shape for x, y in zip(outside, inside, strict=True))

    carries = alike(scan.outvars, body.outvars)
    return alike(scan.invars, body.invars) - carries, carries
