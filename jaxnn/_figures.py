"""Figures in the style of the package, and the curves of a run. Matplotlib is imported for the first figure."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxnn._json import metrics_of
from jaxnn.types import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from PIL.Image import Image

STYLE = "jaxnn.figure"
MIDDLE_GREY = 0.5
MOST_RATE = 1e300  # steps per second that are drawn: axes have finite limits
MOST_CELLS_WITH_NUMBERS = 20  # in a row of a confusion matrix
MOST_NAMED_CLASSES = 120  # more are named in part
COLOURS = {"train_": "C0", "validation_": "C2", "test_": "C1", "probe_": "C4"}
STYLE_LOCK = threading.RLock()  # matplotlib's settings are global, and any thread may draw


def new_figure(**arguments: Any) -> Figure:
    """A styled figure without a window, which a notebook shows even before it imports ``pyplot``."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    class StyledFigure(Figure):
        def add_subplot(self, *args: Any, **kwargs: Any) -> Any:
            with STYLE_LOCK, style.context(STYLE):
                return super().add_subplot(*args, **kwargs)

        def draw(self, renderer: Any) -> None:
            for text in self.findobj(Text):
                # Of a name: matplotlib would warn, with the character in its warning.
                if (shown := printable(text.get_text())) != text.get_text():
                    text.set_text(shown)
            with STYLE_LOCK, style.context(STYLE):  # creates ticks
                super().draw(renderer)

        def _repr_png_(self) -> bytes:
            self.savefig(picture := io.BytesIO(), format="png")
            return picture.getvalue()

    return StyledFigure(facecolor="white", **arguments)


def draw_picture(content: Any) -> Image:
    """The RGB picture of a matplotlib figure, or of an array ``[height, width]`` or ``[height, width, 1, 3 or 4]``.

    ``[rows, columns, height, width, channels]`` are pictures in a grid, with black lines between them. Integers are
    0…255, floats 0…1. ValueError or TypeError if it is none.
    """
    import PIL.Image

    if hasattr(content, "savefig"):
        content.savefig(drawn := io.BytesIO(), format="png", dpi=100)
        return PIL.Image.open(drawn).convert("RGB")
    pixels = np.asarray(content)
    if pixels.ndim == 5:
        framed = np.pad(pixels, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
        pixels = np.concatenate(np.concatenate(framed, axis=1), axis=1)
    if pixels.ndim not in (2, 3):
        raise ValueError(f"its shape is {list(pixels.shape)}")
    if np.issubdtype(pixels.dtype, np.floating):
        pixels = np.rint(255 * np.clip(np.nan_to_num(pixels), 0, 1))
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels
    return PIL.Image.fromarray(pixels.astype(np.uint8)).convert("RGB")


def new_panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels, at most three in a row."""
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    figure = new_figure(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def label_ticks(axis: Axis, metric: str = "") -> None:
    """Labels ticks plainly: accuracies in per cent, logarithmic axes 0.2, 0.5, 1; powers over many decades."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    if metric.endswith("accuracy"):
        axis.set_major_formatter(lambda value, _: format_value(metric, value))
    elif axis.get_scale() == "log" and 1e-4 < low < high < min(1e6, 1e4 * low):
        dense = (1, 1.5, 2, 3, 4, 6, 8) if high < 10 * low else (1, 2, 5)
        subs = dense if high < (30 if axis is axis.axes.xaxis else 1000) * low else (1,)
        axis.set_major_locator(LogLocator(subs=subs) if high > 2.5 * low else MaxNLocator(5))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def format_value(metric: str, value: float) -> str:
    """The value with four digits, of an accuracy in per cent."""
    return f"{100 * value:.4g} %" if metric.endswith("accuracy") else f"{value:.4g}"


def write_in_cells(
    axes: Axes, values: np.ndarray, colour: Callable[[Any], Any], text: Callable[[Any], str], above: float = 0.0
) -> None:
    """Writes a text into each cell of a picture whose value is finite; ``colour`` and ``text`` are of its place."""
    for place in zip(*np.nonzero(np.isfinite(values)), strict=True):
        shade = "white" if np.mean(colour(place)[:3]) < MIDDLE_GREY else "black"
        axes.text(place[1], place[0] + above, text(place), c=shade, fontsize="small", ha="center", va="center")


def draw_confusion(counts: np.ndarray, names: Sequence[str], title: str) -> Figure:
    """Draws a confusion matrix ``[classes, classes]``: colours are shares of each true class, numbers are counts."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    count, longest = len(counts), min(20, max(map(len, names)))
    width = max(0.42, 0.09 * len(f"{counts.max():,}"))  # of a cell in inches, for its number
    side = min(12.0, max(2.2, width * count)) + 0.09 * longest
    figure = new_figure(figsize=(side + 1.4, side + 0.4), layout="constrained")
    axes = figure.add_subplot()
    # The root: rare mistakes would have no colour.
    colours, norm = colormaps["Blues"], PowerNorm(0.5, 0, 1)
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    axes.imshow(shares, cmap=colours, norm=norm, interpolation="nearest")
    axes.grid(visible=False)
    if count <= MOST_CELLS_WITH_NUMBERS:
        texts = np.where(counts > 0, counts, np.nan)
        write_in_cells(axes, texts, lambda at: colours(norm(shares[at])), lambda at: f"{counts[at]:,}")
    shown = range(0, count, -(-count // MOST_NAMED_CLASSES))
    size = min(9.0, max(4.0, 72 * 12 / count / 1.4))
    short = [name if len(name) <= longest else f"{name[: longest - 1]}…" for name in (str(names[at]) for at in shown)]
    axes.set_xticks(shown, short, rotation=90 if longest > 2 else 0, fontsize=size)
    axes.set_yticks(shown, short, fontsize=size)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(title, fontsize="medium")
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, label="share of the true class", shrink=0.8)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    return figure


def draw_curves(lines: Sequence[Mapping[str, Any]], run: str = "", data: str = "") -> Figure:
    """Draws ``lines`` of ``metrics.jsonl``: a panel per metric, and one for throughput.

    The title is ``run``, and ``data`` unless ``run`` contains it. Save the figure, or return it from a notebook's cell.
    """
    found = dict.fromkeys(key.partition("_")[::2] for line in lines for key in metrics_of(line))
    names = sorted({name for _, name in found}, key=lambda name: (name != "loss", name))
    prefixes = dict.fromkeys(f"{split}_" for split, _ in found)
    colours = COLOURS | {prefix: f"C{3 + i}" for i, prefix in enumerate(p for p in prefixes if p not in COLOURS)}
    figure, panels = new_panels(len(names) + 1)
    for name, axes in zip(names, panels, strict=False):
        for prefix, colour in colours.items():
            if points := [(line["step"], line[prefix + name]) for line in lines if prefix + name in line]:
                marker, label = "" if prefix == "train_" else "o", f"{prefix[:-1]} {format_value(name, points[-1][1])}"
                axes.plot(*zip(*points, strict=True), marker=marker, ms=3, c=colour, label=label)
        if name == "loss" and all(line.get("train_loss", 1.0) > 0 for line in lines):
            axes.set_yscale("log")
        label_ticks(axes.yaxis, name)
    reported = [line for line in lines if 0 <= line.get("steps_per_second", -1) < MOST_RATE]
    steps, rates = [line["step"] for line in reported], [line["steps_per_second"] for line in reported]
    # Single windows of a millisecond measure when the host wakes up.
    smooth = [median(rates[max(0, index - 2) : index + 3]) for index in range(len(rates))]
    if smooth:
        panels[-1].plot(steps, rates, c="lightgray")
        panels[-1].plot(
            steps, smooth, c="C7", label=f"running median, last {smooth[-1]:,.{1 if smooth[-1] < 100 else 0}f}"
        )
        panels[-1].set_ylim(0, 1.5 * max(smooth))
        panels[-1].yaxis.set_major_formatter("{x:,.10g}")
    for name, axes in zip([*names, "steps per second"], panels, strict=True):
        axes.set_title(name.replace("_", " "), fontsize="medium")
        axes.set_xlabel("step")
        if axes.lines:
            axes.legend(fontsize="small")
    figure.suptitle(run if data in run else f"{run} · {data}", fontsize="medium")
    return figure
