"""What all figures share: settings, axes, legends, words for repeats, alt text and caption.

Figures do not use pyplot, so that no figure is shown twice or stays open, and ignore the style
that a notebook has set.
"""

import base64
import contextlib
import html
import io
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from labkit.files import write_atomically
from labkit.units import format_number
from workbook.plots.palette import DARK, GRID

WIDTH_IN = 8.5
# An inch of the figure is 100 pixels on the page, so 10 points are 14 pixels. The picture itself
# has more pixels, for sharp text on dense screens.
PAGE_DPI = 100
WIDTH_PX = WIDTH_IN * PAGE_DPI
_PICTURE_DPI = 160
_SETTINGS = {
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.labelsize": 11,
    "axes.edgecolor": DARK,
    "axes.labelcolor": DARK,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": DARK,
    "xtick.color": DARK,
    "ytick.color": DARK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "font.size": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "labkit",
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
    place = (left / width, bottom / height, (right - left) / width, (top - bottom) / height)
    return figure.add_axes(place)


def label_lanes(axes: Axes, names: list[str]) -> None:
    """Label one lane per name, the first on top; of more than 32 lanes, label every n-th."""
    every = math.ceil(len(names) / 32)
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def number_axis(axis: Any, words: Callable[[float], str] = format_number) -> None:
    """Write the ticks of an axis, often a logarithmic one, as ``words``; none between them."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axis.set_minor_formatter(NullFormatter())


def add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Add a legend below the axes, in as few rows as fit; none for a single series."""
    if len(handles) < 2:
        return
    column_in = 0.85 + 0.08 * max(len(handle.get_label()) for handle in handles)
    columns = max(1, int(figure.get_figwidth() / column_in))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / math.ceil(len(handles) / columns)),
        handlelength=2.8,
        handleheight=1.2,
    )


def add_title(figure: Figure, title: str) -> None:
    """Add a title above several axes."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")


def quartiles(repeats: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile; for a single value, that value twice."""
    low, high = np.quantile(repeats, (0.25, 0.75)).tolist()
    return low, high


def range_words(values: Iterable[float]) -> str:
    """``0.889 to 1.25``, or ``2`` where both ends are written the same."""
    values = list(values)
    low, high = format_number(min(values)), format_number(max(values))
    return low if low == high else f"{low} to {high}"


def ratio_words(ratios: Sequence[float], look: str) -> str:
    """``What was measured is 2 times the model (hatched).``; empty without ratios."""
    if not ratios:
        return ""
    times = range_words(ratios)
    times = "equal to" if times == "1" else f"{times} times"
    return f"What was measured is {times} the model ({look})."


def repeats_words(
    series: Iterable[Sequence[float]], what: str, noun: str = "repeats", span: str = "all of them"
) -> str:
    """``Bars are medians of 5 repeats; whiskers span all of them.``; empty without repeats.

    Args:
        series: the repeats of each value.
        what: "Bars", whose spread are whiskers, or "Points", with bands.
        noun: what was repeated.
        span: what the spread shows.
    """
    counts = sorted({len(repeats) for repeats in series})
    if not counts or counts[-1] == 1:
        return ""
    times, spread = " or ".join(map(str, counts)), "whiskers" if what == "Bars" else "bands"
    return f"{what} are medians of {times} {noun}; {spread} span {span}."


def joined(*sentences: str) -> str:
    """The sentences that are not empty."""
    return " ".join(filter(None, sentences))


class CaptionedFigure:
    """A matplotlib figure with its alt text and its caption; Jupyter shows all three.

    Attributes:
        figure: the matplotlib figure.
        alt: the takeaway in words and numbers, for readers who do not see the picture.
        caption: the text below the picture.

    Raises:
        ValueError: the alt text is too short, or the caption is empty.
    """

    def __init__(self, figure: Figure, *, alt: str, caption: str):
        if len(alt.strip()) < 15:
            raise ValueError(f"alt text must say what the figure shows, got {alt!r}")
        if not caption.strip():
            raise ValueError("a figure needs a caption: a sentence with what to take from it")
        self.figure = figure
        self.alt = alt.strip()
        self.caption = caption.strip()
        self._png: bytes | None = None

    def png(self) -> bytes:
        """The picture as the bytes of a PNG file, drawn at the first call."""
        if self._png is None:
            self._png = _with_palette(self._pixels())
        return self._png

    def html(self) -> str:
        """``<figure>`` with the picture inside, its alt text and its caption."""
        picture = base64.b64encode(self.png()).decode()
        width = round(self.figure.get_figwidth() * PAGE_DPI)
        return (
            '<figure style="margin: 0">'
            f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{picture}" '
            f'width="{width}" style="max-width: 100%; height: auto">'
            f'<figcaption style="max-width: {width}px">{html.escape(self.caption)}</figcaption>'
            "</figure>"
        )

    _repr_html_ = html

    def save(self, path: str | Path) -> Path:
        """Write a ``.png`` or ``.svg`` file, complete or not at all, and return its path.

        Raises:
            ValueError: another suffix, or a path that can never be written.
            OutputError: writing failed.
        """
        path = Path(path)
        if path.suffix not in (".png", ".svg"):
            raise ValueError(f"cannot save {path.name}: a figure is saved as .png or .svg")
        write_atomically(path, self.png() if path.suffix == ".png" else self._svg())
        return path

    def __repr__(self) -> str:
        return f"[figure] {self.alt}"

    def _svg(self) -> bytes:
        target = io.BytesIO()
        with _own_settings():
            self.figure.savefig(target, format="svg", metadata={"Date": None})
        return target.getvalue()

    def _pixels(self) -> np.ndarray:
        """[height, width, RGBA], drawn once; ``savefig`` would draw twice."""
        page_dpi = self.figure.get_dpi()
        with _own_settings():
            try:
                self.figure.set_dpi(_PICTURE_DPI)
                canvas = FigureCanvasAgg(self.figure)
                canvas.draw()
            finally:
                self.figure.set_dpi(page_dpi)
        return np.asarray(canvas.buffer_rgba())


def _with_palette(picture: np.ndarray) -> bytes:
    """[height, width, RGBA] as a PNG of its 256 most common colours, small enough for notebooks.

    Fills keep their exact colours; only the soft edges of letters and lines are rounded.
    (Pillow's quantizers change every colour a little, white too.)
    """
    from PIL import Image

    # There are far fewer runs of one colour than pixels: working on runs keeps sliders quick.
    plain = picture.view(np.uint32).ravel()
    starts = np.concatenate(([0], np.flatnonzero(plain[1:] != plain[:-1]) + 1))
    lengths = np.diff(starts, append=len(plain))
    codes = picture.view(">u4").ravel()[starts].astype(np.uint32)
    found, place = np.unique(codes, return_inverse=True)
    count = np.bincount(place, lengths)
    colors = np.stack([found >> 24, found >> 16 & 255, found >> 8 & 255], axis=1).astype(int)
    palette = colors[np.argsort(-count, kind="stable")[:256]]
    # |a - b|^2 = |a|^2 - 2ab + |b|^2, and |a|^2 is the same for all b.
    nearest = ((palette**2).sum(axis=1) - 2 * colors @ palette.T).argmin(axis=1)
    indices = np.repeat(nearest[place].astype(np.uint8), lengths)
    image = Image.fromarray(indices.reshape(picture.shape[:2]), "L")
    image.putpalette(palette.astype(np.uint8).tobytes())
    target = io.BytesIO()
    # The highest level saves another tenth of the bytes and takes eight times as long.
    image.save(target, "png", compress_level=6)
    return target.getvalue()
