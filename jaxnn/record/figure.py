"""A matplotlib figure that notebooks show; matplotlib is imported when the first is made, for it takes long."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(**arguments: Any) -> Figure:
    """A figure without a window, which a notebook shows even before ``pyplot`` was imported there.

    Args:
        **arguments: as for ``matplotlib.figure.Figure``.
    """
    return _figure_class()(**arguments)


@functools.cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    return ShownFigure
