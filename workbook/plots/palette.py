"""The look of each meaning in all figures: a color of the Okabe-Ito palette and a hatch.

Because of the hatch, no figure depends on color alone. Cool colors are for work on a rank
(compute, update, data, evaluate), warm ones for communication and its phases, gray for waiting;
backward is a darker green than forward. A measurement is filled with its color; a prediction is
pale, hatched and labeled "predicted".
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
DEEP_GREEN = "#005F46"
YELLOW = "#F0E442"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
DARK = "#1A1A1A"
GRAY = "#BFBFBF"
GRID = "#D9D9D9"

_MODEL_HATCH = "////"
# The end of a prediction's label.
PREDICTED = " (predicted)"


@dataclass(frozen=True)
class Style:
    """The look of one meaning: its color, its hatch, and the hatch's color (``ink``)."""

    color: str
    hatch: str = ""
    ink: str = "white"

    @property
    def model(self) -> "Style":
        """The look of a prediction: pale, with a hatch that no measurement has."""
        red, green, blue = to_rgb(self.color)
        ink = to_hex((0.75 * red, 0.75 * green, 0.75 * blue))
        return Style(tint(self.color, 0.2), _MODEL_HATCH, ink)

    @property
    def fill(self) -> dict[str, Any]:
        """The keywords that matplotlib's bars and patches take."""
        return {
            "facecolor": self.color,
            "edgecolor": self.ink,
            "hatch": self.hatch or None,
            "linewidth": 0.8 if self.hatch == _MODEL_HATCH else 0,
        }


STYLES = {
    "compute": Style(GREEN),
    "forward": Style(GREEN, "||"),
    "backward": Style(DEEP_GREEN, "--"),
    # The halves of a backward.
    "backward_input": Style(DEEP_GREEN, "\\\\"),
    "backward_weight": Style(SKY, "//", DARK),
    "update": Style(BLUE, "\\\\\\"),
    "data": Style(PURPLE, "..."),
    "evaluate": Style(SKY, "oo", DARK),
    "communicate": Style(VERMILION, "xx"),
    "share_reduce": Style(ORANGE, "++", DARK),
    "share_only": Style(YELLOW, "--", DARK),
    "all_reduce": Style(VERMILION, "++"),
    "push": Style(VERMILION, "||"),
    "pull": Style(ORANGE, "\\\\\\", DARK),
    # What crosses the cut between two stages, in forward and in backward.
    "activation": Style(VERMILION, ".."),
    "gradient": Style(ORANGE, "--", DARK),
    # While hosts fail.
    "train": Style(DEEP_GREEN),
    "run again": Style(SKY, "xx", DARK),
    "checkpoint": Style(BLUE),
    "down": Style(DARK),
    "recover": Style(PURPLE, "xx"),
    "wait": Style(GRAY, "..", "#595959"),
    # Time outside all spans: Python between the spans.
    "other": Style("#F2F2F2", "//", GRAY),
}
# For communication phases without a row above, in the order of their names.
_SPARE = (
    Style(YELLOW, "oo", DARK),
    Style(VERMILION, "--"),
    Style(ORANGE, "..", DARK),
    Style(YELLOW, "xx", DARK),
    Style(VERMILION, "oo"),
    Style(YELLOW, "\\\\\\", DARK),
)

# Bar, marker and line style of the series of one figure, such as runs or algorithms.
SERIES = (
    (Style(BLUE), "o", "-"),
    (Style(VERMILION, ".."), "s", "--"),
    (Style(GREEN, "\\\\"), "^", "-."),
    (Style(PURPLE, "xx"), "D", ":"),
    (Style(ORANGE, "--", DARK), "v", "-"),
    (Style(SKY, "oo", DARK), "P", "--"),
    (Style(DARK, "||"), "X", "-."),
)


def styles_of(kinds: Iterable[str]) -> dict[str, Style]:
    """The styles of these kinds of span, in the order of ``STYLES``; kinds not in it come last."""
    present = set(kinds)
    styles = {kind: style for kind, style in STYLES.items() if kind in present}
    return styles | dict(zip(sorted(present - styles.keys()), itertools.cycle(_SPARE)))


def tint(color: str, strength: float) -> str:
    """Mix ``color`` with white: strength 1 is the color itself, 0 is white."""
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(color))
    return to_hex((red, green, blue))


def swatch(label: str, style: Style, model: bool = False) -> Patch:
    """A legend entry for bars of this style; with ``model``, for predictions, and labeled so."""
    if model:
        return Patch(label=label + PREDICTED, **style.model.fill)
    return Patch(label=label, **style.fill)
