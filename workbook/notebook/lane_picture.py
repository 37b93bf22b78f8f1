"""Lanes as SVG: small enough to be sent several times a second, and without matplotlib's time.

A slot is filled from below by the share of its time that each kind of work took.
"""

import html
import itertools
from collections.abc import Sequence

import numpy as np

from labkit.units import format_seconds
from workbook.notebook.lanes import Shares
from workbook.plots.palette import styles_of

# In pixels of the picture.
_WIDTH = 850
_LEFT = 60
_RIGHT = 632
_TOP = 34
_LEGEND_WIDTH = 122
_LANE = 22
_PITCH = 28
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
    """The lanes of the ranks from 0 on as an SVG element, up to ``extent_s`` at their right end.

    ``head`` stands above the lanes, and a text of ``beside`` to the right of each. ``progress`` is
    the bar above them, 0 to 1, or None. ``name`` begins the ids of the hatches, which a whole
    page has in common.
    """
    styles = styles_of(itertools.chain(*lanes))
    bottom = _TOP + _PITCH * len(lanes)
    parts = [_text(0, 13, head)]
    # The path of all boxes of a kind.
    boxes = dict.fromkeys(styles, "")
    if progress is not None:
        parts.append(_rect(_LEFT, 19, (_RIGHT - _LEFT), 6, _EMPTY))
        parts.append(_rect(_LEFT, 19, (_RIGHT - _LEFT) * min(1.0, progress), 6, "#0072B2"))
    for rank, (lane, words) in enumerate(zip(lanes, beside, strict=True)):
        top = _TOP + _PITCH * rank
        parts.append(_rect(_LEFT, top, _RIGHT - _LEFT, _LANE, _EMPTY))
        parts.append(_text(_LEFT - 8, top + 15, f"rank {rank}", "end"))
        parts.append(_text(_RIGHT + 8, top + 15, words))
        filled = np.zeros(len(next(iter(lane.values()), [])))
        for kind in styles:
            if kind in lane:
                shares = np.minimum(lane[kind], 1 - filled)
                boxes[kind] += _boxes(shares, filled, top)
                filled = filled + shares
    parts.append(_text(_LEFT, bottom + 8, "0", "middle"))
    parts.append(_text(_RIGHT, bottom + 8, format_seconds(extent_s), "middle"))
    per_row = _WIDTH // _LEGEND_WIDTH
    for index, (kind, style) in enumerate(styles.items()):
        look = f"{name}{index}"
        lines = _HATCHES.get(style.hatch[:1], "")
        x = _LEGEND_WIDTH * (index % per_row)
        y = bottom + 22 + 20 * (index // per_row)
        label = kind
        if len(kind) >= 15:
            label = f"{kind[:13]}…"
        parts += [
            f'<pattern id="{look}" width="8" height="8" patternUnits="userSpaceOnUse">',
            _rect(0, 0, 8, 8, style.color),
            f'<path d="{lines}" stroke="{style.ink}" fill="none"/></pattern>',
            f'<path fill="url(#{look})" d="{boxes[kind]}"/>',
            _rect(x, y, 26, 12, f"url(#{look})"),
            _text(x + 32, y + 10, label),
        ]
    height = bottom + 22 + 20 * -(-len(styles) // per_row)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        # Its name stays the same, so that a screen reader does not read it again and again.
        f'aria-label="Live timeline of {len(lanes)} ranks" font-family="system-ui,sans-serif" '
        f'font-size="12" fill="currentColor" style="display:block;width:100%;'
        f'max-width:{_WIDTH}px;color:{_TEXT}">{"".join(parts)}</svg>'
    )


def _boxes(shares: np.ndarray, below: np.ndarray, top: float) -> str:
    """The path of a kind's boxes in one lane, each above the shares ``below`` it."""
    path = ""
    edges = np.linspace(_LEFT, _RIGHT, len(shares) + 1).round().astype(int)
    for left, right, below_share, share in zip(edges, edges[1:], below, shares):
        if share > 0.02:
            floor = f"{top + _LANE * (1 - below_share):.1f}"
            height = f"{_LANE * share:.1f}"
            path += f"M{left} {floor}v-{height}h{right - left}v{height}z"
    return path


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'
