"""One meaning has one look everywhere: a colour of the Okabe-Ito palette and a hatch.

So no figure needs colour alone. Cool colours work (compute, update, data, evaluate), warm ones
move bytes (communicate and its phases), grey waits; backward is forward's green, darkened. What
was measured is filled with its colour; a prediction is pale, hatched, and says "model".
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE = "#E69F00", "#D55E00", "#CC79A7"
DEEP_GREEN = "#005F46"
DARK, GREY, GRID = "#1A1A1A", "#BFBFBF", "#D9D9D9"

_MODEL_HATCH = "////"


@dataclass(frozen=True)
class Style:
    """How one meaning looks: its colour, its hatch, and the hatch's own colour on that colour."""

    color: str
    hatch: str = ""
    ink: str = "white"

    @property
    def model(self) -> "Style":
        """The same meaning, predicted: pale, with the hatch that nothing measured has."""
        red, green, blue = (0.75 * part for part in to_rgb(self.color))
        return Style(tint(self.color, 0.2), _MODEL_HATCH, ink=to_hex((red, green, blue)))

    @property
    def fill(self) -> dict[str, Any]:
        """The keywords that matplotlib's bars and patches take."""
        return {
            "facecolor": self.color,
            "edgecolor": self.ink if self.hatch else self.color,
            "hatch": self.hatch or None,
            "linewidth": 0.8 if self.hatch == _MODEL_HATCH else 0,
        }


STYLES = {
    "compute": Style(GREEN),
    "forward": Style(GREEN, "||"),
    "backward": Style(DEEP_GREEN, "--"),
    "update": Style(BLUE, "\\\\\\"),
    "data": Style(PURPLE, "..."),
    "evaluate": Style(SKY, "oo", DARK),
    "communicate": Style(VERMILION, "xx"),
    "share_reduce": Style(ORANGE, "++", DARK),
    "share_only": Style(YELLOW, "--", DARK),
    "all_reduce": Style(ORANGE, "xx", DARK),
    "push": Style(VERMILION, "||"),
    "pull": Style(ORANGE, "\\\\\\", DARK),
    # Over the cut between two stages, forward and backward.
    "activation": Style(VERMILION, ".."),
    "gradient": Style(ORANGE, "--", DARK),
    "wait": Style(GREY, "..", "#595959"),
    # Time in no span: Python between the spans.
    "other": Style("#F2F2F2", "//", GREY),
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

# Bar, marker and line of what is compared with each other: runs, algorithms.
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
    """The styles of these kinds, in the table's order."""
    present = set(kinds)
    styles = {kind: style for kind, style in STYLES.items() if kind in present}
    return styles | dict(zip(sorted(present - styles.keys()), itertools.cycle(_SPARE)))


def tint(color: str, strength: float) -> str:
    """``color`` thinned with white: 1 leaves it, 0 is white."""
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(color))
    return to_hex((red, green, blue))


def swatch(label: str, style: Style, model: bool = False) -> Patch:
    """A legend's entry for bars of this style, or for bars that predict it, which says so."""
    if model:
        label, style = f"{label} (model)", style.model
    return Patch(label=label, **style.fill)
