"""An all-reduce over several hosts on paper: who sends how much to whom, round by round."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyBboxPatch

from labkit.schedules import hierarchical
from labkit.schedules.hierarchical import Hosts, Round, host_of
from labkit.units import check_choice, format_count
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn
from workbook.plots.palette import DARK, GREY, ORANGE, VERMILION

_SCHEDULES = {
    "ring": hierarchical.flat_ring,
    "hierarchical": hierarchical.hierarchical_all_reduce,
}
_INSIDE = {"color": ORANGE, "linewidth": 1.6}
_BETWEEN = {"color": VERMILION, "linewidth": 2.6}
_RADIUS, _HOST_APART = 0.3, 1.7
_MOST_PANELS = 24


@drawn
def hosts_rounds(
    hosts: Hosts, algorithm: str = "hierarchical", *, title: str | None = None
) -> CaptionedFigure:
    """Draw the rounds of an all-reduce: hosts as boxes, ranks as circles, messages as arrows.

    Rounds in a row in which the same ranks send to the same ranks are drawn once. Above them
    stands what leaves a host in each of these rounds, as a part of the tensor S.

    Args:
        hosts: the ranks of each host, for example ((0, 1), (2, 3)), or ``comm.hosts``.
        algorithm: ``hierarchical``, or ``ring`` for the flat ring in the order of the ranks.
        title: above the figure.

    Raises:
        ValueError: an unknown algorithm, fewer than 2 ranks, or too much to draw.
    """
    check_choice("algorithm", algorithm, _SCHEDULES)
    found = hierarchical.rounds(_SCHEDULES[algorithm], hosts)
    cards = [_over_card(steps, hosts, num_blocks(algorithm, hosts)) for steps in found]
    panels = _alike(found, cards)
    if not 0 < len(panels) <= _MOST_PANELS:
        raise ValueError(
            f"an all-reduce over the hosts {hosts} has {format_count(len(panels), 'kind')} of "
            f"rounds to draw: choose hosts with 1 to {_MOST_PANELS}"
        )
    figure, all_axes = _panels(len(panels), hosts, title is not None)
    for axes, (first, last) in zip(all_axes, panels):
        _draw_round(axes, found[first], hosts)
        axes.set_title(_heading(first, last, cards[first]), fontsize=10)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    if title:
        add_title(figure, title)
    entries = [Line2D([], [], label="inside a host", **_INSIDE)]
    entries.append(Line2D([], [], label="between hosts", **_BETWEEN))
    add_legend(figure, entries)
    caption = (
        f"{format_count(len(found), 'round')}, in {sum(card > 0 for card in cards)} of them "
        f"messages between hosts. In all, {_part(sum(cards, Fraction()))} leaves a host and as "
        "much arrives."
    )
    return CaptionedFigure(figure, alt=_alt(algorithm, panels, cards, hosts), caption=caption)


def num_blocks(algorithm: str, hosts: Hosts) -> int:
    """Into how many blocks the tensor is cut."""
    return sum(map(len, hosts)) if algorithm == "ring" else hierarchical.num_blocks(hosts)


def _over_card(steps: Round, hosts: Hosts, count: int) -> Fraction:
    """The part of the tensor that leaves the host that sends most."""
    left = [Fraction()] * len(hosts)
    for rank, step in steps.items():
        if step.is_between:
            left[host_of(rank, hosts)] += Fraction(step.send[1] - step.send[0], count)
    return max(left)


def _alike(found: Sequence[Round], cards: Sequence[Fraction]) -> list[tuple[int, int]]:
    """The first and the last of each row of rounds that look the same."""
    looks = [
        (sorted((rank, step.dst) for rank, step in steps.items()), card)
        for steps, card in zip(found, cards)
    ]
    rows = [list(row) for _, row in itertools.groupby(range(len(found)), looks.__getitem__)]
    return [(row[0], row[-1]) for row in rows]


def _heading(first: int, last: int, card: Fraction) -> str:
    if first == last:
        return f"round {first + 1}\ncard: {_part(card)}"
    each = " each" if card else ""
    return f"rounds {first + 1} to {last + 1}\ncard: {_part(card)}{each}"


def _part(part: Fraction) -> str:
    """``3 S/2``, ``S/2``, ``S`` or ``nothing``."""
    if part == 0:
        return "nothing"
    top = "S" if part.numerator == 1 else f"{part.numerator} S"
    return top if part.denominator == 1 else f"{top}/{part.denominator}"


def _panels(count: int, hosts: Hosts, has_title: bool) -> tuple[Figure, list[Axes]]:
    """A panel per row of rounds, as many beside each other as fit."""
    width_in = max(1.7, 0.72 * len(hosts) + 0.3)
    height_in = 0.55 * max(map(len, hosts)) + 0.75
    lines = math.ceil(count / int(WIDTH_IN / width_in))
    columns = math.ceil(count / lines)
    size = max(columns * width_in, 4.0), lines * height_in + 0.4 + 0.4 * has_title
    figure = Figure(figsize=size)
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def _draw_round(axes: Axes, steps: Round, hosts: Hosts) -> None:
    tallest, place = max(map(len, hosts)), {}
    for host, ranks in enumerate(hosts):
        x = _HOST_APART * host
        box = FancyBboxPatch((x - 0.5, 0.5 - len(ranks)), 1.0, len(ranks))
        box.set(boxstyle="round,pad=0,rounding_size=0.15", facecolor="none", edgecolor=GREY)
        axes.add_patch(box)
        for at, rank in enumerate(ranks):
            place[rank] = x, -float(at)
            axes.add_patch(Circle(place[rank], _RADIUS, fc="white", ec=DARK, zorder=3))
            axes.text(x, -at, str(rank), ha="center", va="center", fontsize=10, zorder=4)
    ways = {(rank, step.dst) for rank, step in steps.items()}
    for rank, step in steps.items():
        (x, y), (to_x, to_y) = place[rank], place[step.dst]
        # Bent, so that the way back is another arrow, and no rank is crossed out.
        is_bent = (
            (step.dst, rank) in ways or abs(to_x - x) > 2 or (to_x == x and abs(to_y - y) > 1)
        )
        arrow = {"arrowstyle": "-|>", "shrinkA": 8, "shrinkB": 8}
        arrow["connectionstyle"] = f"arc3,rad={0.25 * is_bent}"
        arrow |= _BETWEEN if step.is_between else _INSIDE
        axes.annotate("", (to_x, to_y), (x, y), arrowprops=arrow, zorder=5)
    axes.set(xlim=(-0.75, _HOST_APART * len(hosts) - 0.95), ylim=(0.35 - tallest, 0.65))
    axes.set_aspect("equal")
    axes.set_axis_off()


def _alt(
    algorithm: str,
    panels: Sequence[tuple[int, int]],
    cards: Sequence[Fraction],
    hosts: Hosts,
) -> str:
    name = {"ring": "The flat ring", "hierarchical": "The hierarchical all-reduce"}[algorithm]
    places = "; ".join(
        f"host {host} has {format_count(len(ranks), 'rank')} ({', '.join(map(str, ranks))})"
        for host, ranks in enumerate(hosts)
    )
    rows = "; ".join(
        _heading(first, last, cards[first]).replace("\ncard:", ", over a card")
        for first, last in panels
    )
    return f"{name}: {places}. {rows[0].upper()}{rows[1:]}."
