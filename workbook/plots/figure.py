"""The parts that all figures share: settings, axes, legends, alt text and caption.

Figures do not use pyplot, so that no figure is shown twice or stays open, and ignore the style
that a notebook has set.
"""

import base64
import contextlib
import html
import io
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple

from labkit.engine.files import write_atomically
from labkit.units import format_number
from workbook.plots.palette import GRID, PREDICTED

WIDTH_IN = 8.5
# An inch of the figure is 100 pixels on the page, so 10 points are 14 pixels. The picture itself
# has more pixels, for sharp text on dense screens.
PAGE_DPI = 100
WIDTH_PX = WIDTH_IN * PAGE_DPI
_PICTURE_DPI = 160
# With more entries than that in a legend, two that belong together share one.
_MOST_ENTRIES = 4
_PAIRS = (
    ("forward", "backward"),
    ("share_reduce", "share_only"),
    ("the straggler", "other workers"),
)
_SETTINGS = {
    "figure.constrained_layout.use": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
}
# matplotlib's settings are global to the process, and JupyterLab may handle a slider in another
# thread than the cells.
_LOCK = threading.RLock()


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Draw with the settings above within the block, whatever the notebook has set."""
    with _LOCK, matplotlib.style.context(["default", _SETTINGS]):
        yield


# As a decorator: the function draws under these settings.
drawn = _own_settings()


def new_axes(height_in: float, title: str) -> tuple[Figure, Axes]:
    """A figure as wide as the page with one pair of axes."""
    figure = Figure(figsize=(WIDTH_IN, height_in))
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def fixed_axes(figure: Figure, left: float, right: float, bottom: float, top: float) -> Axes:
    """Axes at a fixed place, given in points: 72 to the inch, from the lower left corner.

    A layout engine would take as long as drawing, and would move the axes under a slider.
    """
    figure.set_layout_engine("none")
    width, height = 72 * figure.get_size_inches()
    bounds = (left / width, bottom / height, (right - left) / width, (top - bottom) / height)
    return figure.add_axes(bounds)


def label_lanes(axes: Axes, names: list[str]) -> None:
    """Label one lane per name, the first on top; of more than 32 lanes, label every n-th."""
    stride = math.ceil(len(names) / 32)
    axes.set_yticks(range(0, len(names), stride), names[::stride])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Add a legend below the axes, in as few rows as fit; none for a single series."""
    if len(handles) < 2:
        return
    entries = _entries(handles)
    column_in = 0.85 + 0.08 * max(map(len, entries))
    columns = int(figure.get_figwidth() / column_in) or 1
    size: dict[str, Any] = {"handlelength": 2.8, "handleheight": 1.2}
    figure.legend(
        handles=list(entries.values()),
        labels=list(entries),
        ncols=columns,
        loc="outside lower center",
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.2)},
        **size,
    )


def _entries(handles: Sequence[Any]) -> dict[str, Any]:
    """Handle by label, or two handles where a pair shares its label."""
    entries = {handle.get_label(): handle for handle in handles}
    for pair in _PAIRS:
        both = [label for label in entries if label.removesuffix(PREDICTED) in pair]
        if len(both) == 2 and len(entries) > _MOST_ENTRIES:
            entries = _shared(entries, *both)
    return entries


def _shared(entries: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    """The entries with the second one beside the first, under one label."""
    shared = {}
    for label, handle in entries.items():
        if label == first:
            both = f"{first.removesuffix(PREDICTED)}, {second}"
            shared[both] = (handle, entries[second])
        elif label != second:
            shared[label] = handle
    return shared


def add_title(figure: Figure, title: str) -> None:
    """Add a title above several axes."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")


def ratio_words(ratios: Sequence[float], look: str) -> str:
    """``What was measured is 2 times what was predicted (hatched).``; empty without ratios."""
    if not ratios:
        return ""
    low = format_number(min(ratios))
    high = format_number(max(ratios))
    times = f"{low} to {high} times"
    if low == high:
        times = f"{low} times"
    if low == high == "1":
        times = "equal to"
    return f"What was measured is {times} what was predicted ({look})."


def repeats_words(series: Iterable[Sequence[float]], sentence: str) -> str:
    """The sentence with the numbers of repeats in the place of ``{}``; empty without repeats."""
    counts = sorted({len(repeats) for repeats in series})
    if not counts or counts[-1] == 1:
        return ""
    return sentence.format(" or ".join(map(str, counts)))


def joined(*sentences: str) -> str:
    """The sentences that are not empty."""
    return " ".join(filter(None, sentences))


class CaptionedFigure:
    """A matplotlib figure with its alt text and its caption; Jupyter shows all three.

    Attributes:
        figure: the matplotlib figure.
        alt: the takeaway in words and numbers, for readers who do not see the picture.
        caption: the text below the picture.
    """

    def __init__(self, figure: Figure, *, alt: str, caption: str):
        self.figure = figure
        self.alt = alt
        self.caption = caption

    def png(self) -> bytes:
        """The picture as the bytes of a PNG file, small enough for notebooks."""
        from PIL import Image

        target = io.BytesIO()
        # Among Pillow's methods, median cut is the one that keeps white and all fills as they are.
        picture = Image.open(io.BytesIO(self._file("png"))).convert("RGB")
        picture.quantize(dither=Image.Dither.NONE).save(target, "png")
        return target.getvalue()

    def html(self) -> str:
        """``<figure>`` with the picture inside, its alt text and its caption."""
        picture = base64.b64encode(self.png()).decode()
        width = round(self.figure.get_figwidth() * PAGE_DPI)
        return (
            '<figure style="margin: 0">'
            f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{picture}" '
            f'width="{width}" style="max-width: 100%; height: auto">'
            f'<figcaption style="max-width: {width}px">{html.escape(self.caption)}</figcaption>'
            # Dark on a dark page: this turns lightness over, and hues stay.
            '<style>[data-jp-theme-light="false"] figure > img '
            "{ filter: invert(0.93) hue-rotate(180deg) }</style></figure>"
        )

    _repr_html_ = html

    def save(self, path: str | Path) -> Path:
        """Write a file of the suffix's format, complete or not at all, and return its path.

        Raises:
            ValueError: matplotlib does not write such files.
            OutputError: writing failed.
        """
        path = Path(path)
        data = self.png() if path.suffix == ".png" else self._file(path.suffix[1:])
        write_atomically(path, data)
        return path

    def __repr__(self) -> str:
        return f"[figure] {self.alt}"

    def _file(self, format: str) -> bytes:
        target = io.BytesIO()
        with _own_settings():
            self.figure.savefig(target, format=format, dpi=_PICTURE_DPI)
        return target.getvalue()
