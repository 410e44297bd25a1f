"""The examples of a batch as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxnn._figures import new_figure
from jaxnn.types import Batch, ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_batch(batch: Batch, num_examples: int, title: str, class_names: tuple[str, ...]) -> Figure:
    """Returns a figure of the first examples, with their targets; ConfigError if they are no pictures."""
    inputs = np.asarray(batch.inputs) if hasattr(batch.inputs, "shape") else np.zeros(0)
    if inputs.ndim == 4 and inputs.shape[-1] not in (1, 3, 4) or inputs.ndim not in (3, 4):
        raise ConfigError(
            f"the inputs are no pictures: look at replay.batch, {inputs.dtype}{list(inputs.shape)}, as arrays."
        )
    count, columns = min(num_examples, len(inputs)), 8
    rows = -(-count // columns)
    figure = new_figure(figsize=(10, 0.6 + 1.3 * rows), layout="constrained")
    figure.suptitle(title)
    targets = np.asarray(batch.targets)
    for index in range(count):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_axis_off()
        picture = inputs[index, ..., 0] if inputs.ndim == 4 and inputs.shape[-1] == 1 else inputs[index]
        if np.issubdtype(picture.dtype, np.floating):  # of any range
            low, high = picture.min(), picture.max()
            picture = (picture - low) / (high - low) if high > low else picture * 0
        axes.imshow(picture, cmap="gray")
        if targets.ndim == 1:
            known = np.issubdtype(targets.dtype, np.integer) and 0 <= targets[index] < len(class_names)
            axes.set_title(class_names[targets[index]] if known else f"{targets[index]:.4g}", fontsize=8)
    return figure
