"""Which classes a classifier takes for which others: counts, a table and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxnn._figures import draw_confusion
from jaxnn._text import Table
from jaxnn.data import padded_indices
from jaxnn.types import ConfigError, Source, check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ConfusionMatrix(NamedTuple):
    """How often examples of each class were predicted as each class; prints as a table with a row per class."""

    counts: np.ndarray  # ``[classes, classes]`` int64: a row is a true class, a column a predicted one
    class_names: tuple[str, ...]
    title: str

    @property
    def accuracy(self) -> float:
        """The share of examples whose class was predicted."""
        return float(np.trace(self.counts) / max(1, self.counts.sum()))

    def plot(self) -> Figure:
        """Returns a matplotlib figure: shares of each true class as colours, and up to 20 classes counts."""
        return draw_confusion(self.counts, self.class_names, f"{self.title}: accuracy {100 * self.accuracy:.4g} %")

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        rows = []
        for label, (name, counts) in enumerate(zip(self.class_names, self.counts, strict=True)):
            wholes = counts.sum(), self.counts[:, label].sum()
            shares = [f"{100 * counts[label] / whole:.4g} %" if whole else "–" for whole in wholes]
            wrong = [other for other in np.argsort(-counts, kind="stable") if other != label and counts[other]]
            mistakes = ", ".join(f"{self.class_names[other]} {counts[other]:,}" for other in wrong[:3])
            rows.append((name, f"{counts.sum():,}", *shares, mistakes))
        note = f"{self.title}: {self.counts.sum():,} examples, accuracy {100 * self.accuracy:.4g} %"
        return Table(("class", "examples", "recall", "precision", "most often taken for"), rows, [note])


def count_confusions(
    source: Source, predict: Callable[[Any], Any], batch_size: int, class_names: Sequence[str], title: str
) -> ConfusionMatrix:
    """Returns the confusion matrix of all of ``source``, which is read and predicted in batches.

    ``predict`` returns an array ``[batch, classes]``, or a logit ``[batch]`` of two classes.
    """
    size, total = min(check_int("batch_size", batch_size), source.num_examples), np.zeros((1, 1), np.int64)
    for rows, mask in zip(*padded_indices(source.num_examples, size), strict=True):
        inputs, labels = source.read(rows)
        outputs, counts = predict(inputs), mask > 0
        if isinstance(inputs, Mapping) and "weight" in inputs:
            counts = counts & (inputs["weight"] > 0)  # rows that pad a table of trees have none
        shape = np.shape(outputs)
        if np.shape(labels) == shape and shape[1:] > (1,):
            labels = labels.argmax(axis=-1)  # probabilities
        is_label = getattr(getattr(labels, "dtype", None), "kind", "f") in "iu" and np.shape(labels) == shape[:1]
        if not is_label or len(shape) > 2 or shape[1:] == (1,):
            raise ConfigError(
                "a confusion matrix needs integer labels [examples] and outputs [examples, classes], as of a "
                f"classification, not targets {list(np.shape(labels))} and outputs {list(shape)}."
            )
        classes, found = (2, outputs > 0) if len(shape) == 1 else (shape[1], outputs.argmax(axis=1))
        if not ((labels >= 0) & (labels < classes))[counts].all():
            raise ConfigError(f"some label is none of the {classes} classes that the model predicts.")
        pairs = labels[counts].astype(np.int64) * classes + found[counts]
        total = total + np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    names = class_names if len(class_names) == len(total) else range(len(total))
    return ConfusionMatrix(total, tuple(map(str, names)), title)
