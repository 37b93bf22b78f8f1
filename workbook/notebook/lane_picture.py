"""Lanes as SVG: small enough to be sent several times a second, and without matplotlib's time.

A slot is filled from below by the share of its time that each kind of work took.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.units import format_seconds
from workbook.notebook.lanes import Lane
from workbook.plots.palette import Style, styles_of

WIDTH, _LEFT, _RIGHT = 850, 60, 632
MOST_LANES = 16
_MOST_SLOTS, _MOST_BYTES, _BYTES_PER_SLOT = 96, 10_000, 6.5
_TOP, _BESIDE_HEIGHT, _LEGEND_WIDTH = 34, 5, 122
# A lane of this height has room for two lines.
_TALL = 24


@dataclass(frozen=True)
class Colors:
    """Of text, the background, and of a lane where nothing is known."""

    text: str
    page: str
    lane: str


THEMED = Colors(
    "var(--jp-ui-font-color1, var(--vscode-foreground, #1a1a1a))",
    "none",
    "var(--jp-layout-color2, rgba(128, 128, 128, 0.2))",
)
# As in all other figures.
ON_WHITE = Colors("#1a1a1a", "white", "#eeeeee")


@dataclass(frozen=True)
class Picture:
    """What is drawn.

    Attributes:
        lanes: at most ``MOST_LANES``.
        extent_s: the time at the right end of the lanes.
        head: the line above the lanes.
        beside: a text for each lane, to its right.
        progress: the bar above the lanes, 0 to 1; None for no bar.
    """

    lanes: Sequence[Lane]
    extent_s: float
    head: str
    beside: Sequence[str]
    progress: float | None = None


def num_slots(num_areas: int) -> int:
    """So many slots per lane that a picture with this many areas has some kilobytes.

    An area is one kind of work in one lane.
    """
    slots = _MOST_BYTES / (_BYTES_PER_SLOT * max(1, num_areas))
    return max(8, min(_MOST_SLOTS, int(slots)))


def draw(picture: Picture, name: str, colors: Colors, attributes: str) -> str:
    """The picture as an ``<svg>``.

    Args:
        picture: what to draw.
        name: begins the ids of the hatches, which are common to a whole page.
        colors: of text and background.
        attributes: of the ``<svg>``, such as its role.
    """
    styles = styles_of(kind for lane in picture.lanes for kind in {**lane.shares, **lane.beside})
    pitch = 30 if len(picture.lanes) <= 8 else 20
    bottom = _TOP + pitch * len(picture.lanes)
    per_row = WIDTH // _LEGEND_WIDTH
    height = bottom + 22 + 20 * -(-len(styles) // per_row)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {attributes} '
        f'style="display:block;width:100%;max-width:{WIDTH}px;color:{colors.text}" '
        'font-family="system-ui,sans-serif" font-size="12" fill="currentColor">',
        f'<rect width="{WIDTH}" height="{height}" fill="{colors.page}"/>',
        _hatches(styles, name),
        _text(0, 13, picture.head),
    ]
    if picture.progress is not None:
        parts.append(_bar(picture.progress, colors))
    tops = [_TOP + pitch * row for row in range(len(picture.lanes))]
    for lane, words, top in zip(picture.lanes, picture.beside, tops, strict=True):
        parts.append(_lane(lane, words, top, pitch - 6, colors))
    parts.append(_areas(picture.lanes, tops, pitch - 6, list(styles), name))
    parts.append(_axis(picture.extent_s, bottom))
    for index, kind in enumerate(styles):
        row, column = divmod(index, per_row)
        parts.append(_swatch(kind, name, index, _LEGEND_WIDTH * column, bottom + 22 + 20 * row))
    return "".join(parts) + "</svg>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _bar(progress: float, colors: Colors) -> str:
    bar = f'<rect x="{_LEFT}" y="19" height="6" rx="3"'
    width = _RIGHT - _LEFT
    return (
        f'{bar} width="{width}" fill="{colors.lane}"/>'
        f'{bar} width="{width * min(1.0, progress):.0f}" fill="#0072B2"/>'
    )


def _lane(lane: Lane, words: str, top: int, height: int, colors: Colors) -> str:
    """An empty lane, with its name and its words; a tall one has its device below its name."""
    middle = top + height / 2 + 4
    name = _text(_LEFT - 8, middle, f"rank {lane.rank}", "end")
    if lane.device and height >= _TALL:
        name = _text(_LEFT - 8, middle - 6, f"rank {lane.rank}", "end")
        name += _text(_LEFT - 8, middle + 7, lane.device, "end")
    return (
        f'<rect x="{_LEFT}" y="{top}" width="{_RIGHT - _LEFT}" height="{height}" '
        f'fill="{colors.lane}"/>' + name + _text(_RIGHT + 8, middle, words)
    )


def _areas(
    lanes: Sequence[Lane], tops: Sequence[int], height: int, kinds: list[str], name: str
) -> str:
    """One path per kind, for all lanes; each is drawn over those that reach higher."""
    paths = dict.fromkeys(kinds, "")
    for lane, top in zip(lanes, tops):
        thin = _BESIDE_HEIGHT if lane.beside else 0
        for shares, floor, size in (
            (lane.shares, top + height - thin - bool(thin), height - thin - bool(thin)),
            (lane.beside, top + height, thin),
        ):
            filled: Any = 0.0
            for kind in filter(shares.__contains__, kinds):
                filled = np.minimum(filled + shares[kind], 1.0)
                paths[kind] += _outline(filled * size, floor)
    parts = [
        f'<path fill="url(#{name}{index})" d="{path}"/>'
        for index, path in enumerate(paths.values())
        if path
    ]
    return "".join(reversed(parts))


def _outline(heights: np.ndarray, floor: int) -> str:
    """An area of these heights, slot by slot, above ``floor``."""
    levels = np.round(2 * heights) / 2
    edges = np.round(np.linspace(_LEFT, _RIGHT, len(levels) + 1)).astype(int)
    changes = np.flatnonzero(np.diff(levels, prepend=0.0))
    if not len(changes):
        return ""
    across = np.diff(edges[changes], prepend=_LEFT)
    up = np.diff(levels[changes], prepend=0.0)
    moves = "".join(f"h{x}v{-y:g}" for x, y in zip(across, up))
    return f"M{_LEFT} {floor}{moves}H{_RIGHT}V{floor}z"


def _axis(extent_s: float, y: float) -> str:
    ticks = [(part, _LEFT + part * (_RIGHT - _LEFT)) for part in (0.0, 0.5, 1.0)]
    return "".join(
        _text(x, y + 8, format_seconds(part * extent_s) if part else "0", "middle")
        for part, x in ticks
    )


def _swatch(kind: str, name: str, index: int, x: float, y: float) -> str:
    box = f'<rect x="{x}" y="{y}" width="26" height="12" fill="url(#{name}{index})"/>'
    return box + _text(x + 32, y + 10, kind if len(kind) < 15 else f"{kind[:13]}…")


def _hatches(styles: dict[str, Style], name: str) -> str:
    patterns = [
        f'<pattern id="{name}{index}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{style.color}"/>{_hatch(style)}</pattern>'
        for index, style in enumerate(styles.values())
    ]
    return f"<defs>{''.join(patterns)}</defs>"


_LINES = {
    "|": "M2 0v8M6 0v8",
    "-": "M0 2h8M0 6h8",
    "+": "M4 0v8M0 4h8",
    "/": "M-2 2l4-4M0 8l8-8M6 10l4-4",
    "\\": "M-2 6l4 4M0 0l8 8M6-2l4 4",
    "x": "M0 0l8 8M8 0l-8 8",
}


def _hatch(style: Style) -> str:
    mark = style.hatch[:1]
    if mark in _LINES:
        return f'<path d="{_LINES[mark]}" stroke="{style.ink}" stroke-width=".8" fill="none"/>'
    if mark == ".":
        return _dots(f'r=".9" fill="{style.ink}"')
    if mark == "o":
        return _dots(f'r="1.5" stroke="{style.ink}" stroke-width=".7" fill="none"')
    return ""


def _dots(look: str) -> str:
    return f'<circle cx="2" cy="2" {look}/><circle cx="6" cy="6" {look}/>'
