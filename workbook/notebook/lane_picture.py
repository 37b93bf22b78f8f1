"""Lanes as SVG: small enough to be sent several times a second, and without matplotlib's time.

A slot is filled from below by the share of its time that each kind of work took.
"""

import html
from collections.abc import Sequence

import numpy as np

from labkit.units import format_seconds
from workbook.notebook.lanes import Shares
from workbook.plots.palette import Style, styles_of

_WIDTH, _LEFT, _RIGHT, _TOP, _LEGEND_WIDTH = 850, 60, 632, 34, 122
_TEXT = "var(--jp-ui-font-color1, var(--vscode-foreground, #1a1a1a))"
_EMPTY = "var(--jp-layout-color2, rgba(128, 128, 128, 0.2))"
# matplotlib's hatches, as lines in a square of 8 pixels.
_HATCHES = {
    "|": "M2 0v8M6 0v8",
    "-": "M0 2h8M0 6h8",
    "+": "M4 0v8M0 4h8",
    "/": "M-2 2l4-4M0 8l8-8M6 10l4-4",
    "\\": "M-2 6l4 4M0 0l8 8M6-2l4 4",
    "x": "M0 0l8 8M8 0l-8 8",
    ".": "M1 2h2M5 6h2",
    "o": "M1 2a1 1 0 0 0 3 0a1 1 0 0 0-3 0M5 6a1 1 0 0 0 3 0a1 1 0 0 0-3 0",
}


def draw(
    lanes: Sequence[Shares],
    extent_s: float,
    head: str,
    beside: Sequence[str],
    progress: float | None,
    name: str,
) -> str:
    """The lanes as SVG elements in a ``<div>``.

    Args:
        lanes: of the ranks from 0 on.
        extent_s: the time at the right end of the lanes.
        head: the line above the lanes.
        beside: a text for each lane, to its right.
        progress: the bar above the lanes, 0 to 1; None for no bar.
        name: begins the ids of the hatches, which are common to a whole page.
    """
    styles = styles_of(kind for lane in lanes for kind in lane)
    pitch = 30 if len(lanes) <= 8 else 20
    bottom = _TOP + pitch * len(lanes)
    parts = [_patterns(styles, name), _text(0, 13, head)]
    if progress is not None:
        parts.append(_rect(_LEFT, 19, (_RIGHT - _LEFT), 6, _EMPTY))
        parts.append(_rect(_LEFT, 19, (_RIGHT - _LEFT) * min(1.0, progress), 6, "#0072B2"))
    boxes = dict.fromkeys(styles, "")
    for rank, (lane, words) in enumerate(zip(lanes, beside, strict=True)):
        height, floor = pitch - 6, _TOP + pitch * (rank + 1) - 6
        middle = floor - height / 2 + 4
        parts.append(_rect(_LEFT, floor - height, _RIGHT - _LEFT, height, _EMPTY))
        parts.append(_text(_LEFT - 8, middle, f"rank {rank}", "end"))
        parts.append(_text(_RIGHT + 8, middle, words))
        # A box for each slot and kind, one above the other.
        slots = len(next(iter(lane.values()), []))
        edges, tops = np.linspace(_LEFT, _RIGHT, slots + 1).round().astype(int), np.zeros(slots)
        for kind in filter(lane.__contains__, boxes):
            sizes = np.minimum(lane[kind], 1 - tops)
            for left, right, top, size in zip(edges, edges[1:], tops, sizes):
                if size > 0.02:
                    up = f"{height * size:.1f}"
                    boxes[kind] += f"M{left} {floor - height * top:.1f}v-{up}h{right - left}v{up}z"
            tops += sizes
    for index, path in enumerate(boxes.values()):
        parts.append(f'<path fill="url(#{name}{index})" d="{path}"/>')
    for part in (0.0, 0.5, 1.0):
        time = format_seconds(part * extent_s) if part else "0"
        parts.append(_text(_LEFT + part * (_RIGHT - _LEFT), bottom + 8, time, "middle"))
    per_row = _WIDTH // _LEGEND_WIDTH
    for index, kind in enumerate(styles):
        x, y = _LEGEND_WIDTH * (index % per_row), bottom + 22 + 20 * (index // per_row)
        parts.append(_rect(x, y, 26, 12, f"url(#{name}{index})"))
        parts.append(_text(x + 32, y + 10, kind if len(kind) < 15 else f"{kind[:13]}…"))
    height = bottom + 22 + 20 * -(-len(styles) // per_row)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        # Its name stays the same, so that a screen reader does not read it again and again.
        f'aria-label="Live timeline of {len(lanes)} ranks" font-family="system-ui,sans-serif" '
        f'font-size="12" fill="currentColor" style="display:block;width:100%;'
        f'max-width:{_WIDTH}px;color:{_TEXT}">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def _patterns(styles: dict[str, Style], name: str) -> str:
    patterns = ""
    for index, style in enumerate(styles.values()):
        lines = _HATCHES.get(style.hatch[:1], "")
        patterns += f'<pattern id="{name}{index}" width="8" height="8" '
        patterns += f'patternUnits="userSpaceOnUse">{_rect(0, 0, 8, 8, style.color)}'
        patterns += f'<path d="{lines}" stroke="{style.ink}" fill="none"/></pattern>'
    return f"<defs>{patterns}</defs>"
