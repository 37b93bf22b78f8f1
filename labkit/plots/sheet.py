"""Drawing for a slider's hand: boxes, lines and words in few artists, in places of one's own.

A slider moves thirty times a second. Matplotlib lays out and draws an empty axes in tens of
milliseconds, and a text in one; here all boxes of one look are one collection, and all words are
another, outlines that are made once and then moved. Places are in points, 72 to the inch, from
the lower left corner.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.collections import Collection, LineCollection, PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from labkit.plots.figure import DARK, Style
from labkit.units import format_number

_POINTS = 72
# Between two lines of the model's hatch, along the base.
_STRIPE = 7.2
_SHIFTS = {"left": 0.0, "center": 0.5, "right": 1.0}


class Box(NamedTuple):
    """A rectangle by its edges."""

    left: float
    bottom: float
    right: float
    top: float


class Sheet(Figure):
    """A figure without axes: ``finish`` draws what has been put on it.

    Attributes:
        boxes: by meaning and style, the rectangles.
        words: by place, what is written there.
    """

    def __init__(self, width_in: float, height_in: float):
        super().__init__(figsize=(width_in, height_in), layout="none")
        self.width, self.height = _POINTS * width_in, _POINTS * height_in
        self.boxes: dict[tuple[str, Style], list[Box]] = defaultdict(list)
        self.words: dict[tuple[float, float], str] = {}
        self._outlines: list[Path] = []
        self._lines: list[Sequence[tuple[float, float]]] = []

    def box(self, meaning: str, style: Style, box: Box) -> None:
        self.boxes[meaning, style].append(box)

    def line(self, *corners: tuple[float, float]) -> None:
        self._lines.append(corners)

    def write(
        self,
        text: str,
        x: float,
        y: float,
        *,
        align: str = "center",
        size: float = 10,
        bold: bool = False,
        upwards: bool = False,
    ) -> None:
        """Write with the left end, center or right end of the baseline at (x, y)."""
        corners, codes, width = _outline(text, size, bold)
        corners = corners - (_SHIFTS[align] * width, 0)
        if upwards:
            corners = corners[:, ::-1] * (-1, 1)
        self._outlines.append(Path(np.add(corners, (x, y)), codes))
        self.words[x, y] = text

    def legend(self, entries: Sequence[tuple[str, Style]], y: float) -> None:
        """A line of swatches with their names, in the middle of the sheet."""
        swatch, gap, between = 28, 7, 20
        widths = [swatch + gap + _outline(name, 10, False)[2] for name, _ in entries]
        left = (self.width - sum(widths) - between * (len(entries) - 1)) / 2
        for (name, style), width in zip(entries, widths):
            self.box("legend", style, Box(left, y - 2, left + swatch, y + 9))
            self.write(name, left + swatch + gap, y, align="left")
            left += width + between

    def finish(self) -> None:
        """Draw the boxes, then lines and words on top of them."""
        for (meaning, style), boxes in self.boxes.items():
            corners = [
                [(b.left, b.bottom), (b.left, b.top), (b.right, b.top), (b.right, b.bottom)]
                for b in boxes
            ]
            look = {"facecolors": style.color, "gid": meaning}
            if style.is_model:
                look |= {"edgecolors": style.ink, "linewidths": 0.8}
                stripes = [stripe for box in boxes for stripe in _stripes(box)]
            elif style.hatch:
                look |= {"edgecolors": style.ink, "linewidths": 0, "hatch": style.hatch}
            self._put(PolyCollection(corners, **look))
            if style.is_model:
                self._put(LineCollection(stripes, colors=style.ink, linewidths=0.8))
        self._put(LineCollection(self._lines, colors=DARK, linewidths=0.8))
        self._put(PathCollection(self._outlines, facecolors=DARK, linewidths=0))

    def _put(self, collection: Collection) -> None:
        collection.set_transform(Affine2D().scale(1 / _POINTS) + self.dpi_scale_trans)
        self.add_artist(collection)


def _stripes(box: Box) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The model's hatch: rising lines, drawn many times as fast as matplotlib's own hatch."""
    left, bottom, right, top = box
    first = math.ceil((left - top) / _STRIPE) * _STRIPE
    # A line is where x - y is the same.
    return [
        (
            (max(left, c + bottom), max(bottom, left - c)),
            (min(right, c + top), min(top, right - c)),
        )
        for c in np.arange(first, right - bottom, _STRIPE).tolist()
    ]


@functools.lru_cache(maxsize=4096)
def _outline(text: str, size: float, bold: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """[corners, (x, y)] from the baseline's left end, the path's codes, and the width."""
    corners, codes, width = [], [], 0.0
    for character in text:
        glyph, glyph_codes, advance = _glyph(character, size, bold)
        corners.append(np.add(glyph, (width, 0)))
        codes.append(glyph_codes)
        width += advance
    return np.concatenate(corners), np.concatenate(codes), width


@functools.lru_cache(maxsize=1024)
def _glyph(character: str, size: float, bold: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """As ``_outline``: every move writes new numbers, but with the same digits."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    # A bar behind it tells where the next letter begins (and a space has no path of its own).
    bar, both = (TextPath((0, 0), t, size=size, prop=font) for t in ("|", character + "|"))
    advance = both.vertices[:, 0].max() - bar.vertices[:, 0].max()
    count = len(both.vertices) - len(bar.vertices)
    return both.vertices[:count], both.codes[:count], float(advance)


class Panel:
    """A part of a sheet: a title, and below it a frame whose upright axis counts from 0.

    Attributes:
        sheet: what it is drawn on.
        frame: the box between its axes.
    """

    def __init__(self, sheet: Sheet, frame: Box, title: str, quantity: str, highest: float):
        """``quantity``: the name of the axis; ``highest``: what has to fit below the top."""
        self.sheet, self.frame = sheet, frame
        highest = highest or 1.0
        # Room for a number above the highest bar.
        self._scale = (frame.top - frame.bottom - 14) / highest
        left, bottom, right, top = frame
        sheet.write(title, left, top + 8, align="left", size=12, bold=True)
        sheet.write(quantity, left - 34, (bottom + top) / 2, size=11, upwards=True)
        sheet.line((left, top), (left, bottom), (right, bottom))
        for tick in MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(0, highest):
            if (y := self.y(tick)) <= top:
                sheet.line((left - 3.5, y), (left, y))
                sheet.write(format_number(tick), left - 6, y - 3.6, align="right")

    def y(self, value: float) -> float:
        """Where a value is on the upright axis."""
        return self.frame.bottom + self._scale * value

    def places(self, count: int) -> list[float]:
        """The centers of ``count`` equal parts of the level axis."""
        left, _, right, _ = self.frame
        return [left + (right - left) * (place + 0.5) / count for place in range(count)]
