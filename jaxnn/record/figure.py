"""A matplotlib figure that notebooks show; imported where something is drawn, since matplotlib takes long to import."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure of no window, which a notebook shows as a picture even before ``pyplot`` was imported there."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
