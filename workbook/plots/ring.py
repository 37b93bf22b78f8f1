"""A ring all-reduce on paper: which ranks' values each chunk holds, one grid per state."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from labkit.schedules.ring import ring_all_reduce, ring_contributions
from labkit.units import format_count
from workbook.plots.figure import (
    WIDTH_IN,
    CaptionedFigure,
    add_legend,
    add_title,
    drawn,
    fixed_axes,
)
from workbook.plots.palette import DARK, ORANGE, VERMILION, tint

_LINES = "#808080"
# Fill and ink of a cell with the parts of one rank, of some and of all ranks.
_OWN = ("white", DARK)
_PARTIAL = (tint(ORANGE, 0.5), DARK)
_ALL = (DARK, "white")


@dataclass(frozen=True)
class RingState:
    """One moment of an all-reduce on paper: P ranks, and as many chunks.

    Attributes:
        contributions: [P][P], the ranks whose values are summed in that rank's chunk.
        values: [P][P], the sum of their numbers.
        messages: (source rank, destination rank, chunk) of each message that has just arrived.
        title: above this grid.
    """

    contributions: Sequence[Sequence[Collection[int]]]
    values: Sequence[Sequence[float]]
    messages: Sequence[tuple[int, int, int]]
    title: str

    @property
    def complete(self) -> int:
        """The number of cells that hold the sum over all ranks."""
        sizes = map(len, itertools.chain(*self.contributions))
        return list(sizes).count(len(self.contributions))


def ring_states(
    world_size: int, values: Sequence[Sequence[float]] | None = None
) -> list[RingState]:
    """The states of a ring all-reduce: the start, then one state for each of the 2 (P - 1) steps.

    Args:
        world_size: P, at least 2.
        values: [P][P], the number that each rank has in each chunk. By default rank r has
            (c + 1) x 10^r in chunk c: the digits of a sum show which ranks' numbers it contains.
    """
    ranks = range(world_size)
    if values is None:
        values = []
        for rank in ranks:
            values.append([(chunk + 1) * 10**rank for chunk in ranks])
    timetables = [list(ring_all_reduce(rank, world_size)) for rank in ranks]
    states = []
    for number, contributions in enumerate(ring_contributions(world_size)):
        sums = []
        for row in contributions:
            row_sums = []
            for chunk, cell in enumerate(row):
                row_sums.append(sum(values[rank][chunk] for rank in cell))
            sums.append(row_sums)
        title = "start"
        messages = []
        if number > 0:
            moves = [timetable[number - 1] for timetable in timetables]
            messages = [(rank, move.dst, move.send_chunk) for rank, move in enumerate(moves)]
            title = f"step {number}: {moves[0].phase}"
        states.append(RingState(contributions, sums, messages, title))
    return states


@drawn
def ring_steps(states: Sequence[RingState], *, title: str) -> CaptionedFigure:
    """Draw states of an all-reduce in reading order: rows are ranks, columns are chunks.

    Args:
        states: all of the same size, for example ``ring_states(3)``.
    """
    ranks = len(states[0].values)
    width_in = _width_in(states)
    columns = min(len(states), max(1, int(WIDTH_IN / width_in)))
    lines = math.ceil(len(states) / columns)
    figure = Figure(figsize=(columns * width_in, lines * (0.48 * ranks + 0.8) + 0.9))
    grids = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in grids.flat:
        axes.set_axis_off()
    for axes, state in zip(grids.flat, states):
        axes.set_axis_on()
        _draw_grid(axes, state)
    add_title(figure, title)
    add_legend(figure, _legend())
    progress = "; ".join(f"{state.title}, {state.complete}" for state in states)
    return CaptionedFigure(
        figure,
        alt=f"Grid of {ranks} ranks by {ranks} chunks in {format_count(len(states), 'state')}. "
        f"Cells that hold the sum of all ranks, of {ranks**2}: {progress}.",
        caption="Each cell shows its value, and below it names the ranks summed in it. Arrows "
        f"show what has just moved, {ranks} messages per step. At the end {states[-1].complete} "
        f"of {ranks**2} cells hold the sum of all ranks.",
    )


@drawn
def ring_step(step: int, world_size: int) -> CaptionedFigure:
    """Draw one step of ring all-reduce: its messages, and what each rank holds after it.

    All steps of one ring are drawn at the same size, so that nothing moves from step to step.

    Args:
        step: 0 (the start) to 2 (P - 1) (the end).
        world_size: P, at least 2.
    """
    states = ring_states(world_size)
    title = states[step].title.replace(":", f" of {len(states) - 1}:")
    state = replace(states[step], title=title)
    width_in = max(_width_in(states), 4.6)
    height_in = 0.48 * world_size + 1.4
    figure = Figure(figsize=(width_in, height_in))
    axes = fixed_axes(figure, 36, 72 * width_in - 7.2, 75.6, 72 * height_in - 25.2)
    _draw_grid(axes, state)
    add_legend(figure, _legend())
    rows = []
    for rank, row in enumerate(state.values):
        rows.append(f"rank {rank} holds {', '.join(map('{:g}'.format, row))}")
    words = f"Start: each of {world_size} ranks holds its own numbers, and none has moved."
    if state.messages:
        sent = ["rank {0} sends chunk {2} to rank {1}".format(*move) for move in state.messages]
        verb = "copies"
        if "share_reduce" in title:
            verb = "adds"
        words = f"{title.replace(':', ',').capitalize()}: {', '.join(sent)}."
        words += f" Each {verb} what comes in."
    return CaptionedFigure(
        figure,
        alt=f"Ring all-reduce of {world_size} ranks, {title}. By chunk: {'; '.join(rows)}. "
        f"Cells that hold the sum of all ranks: {state.complete} of {world_size**2}.",
        caption=f"{words} Below each number stand the ranks summed in it.",
    )


def _summed_ranks(cell: Collection[int], world_size: int) -> str:
    """The ranks whose values are in a cell."""
    if len(cell) == world_size:
        return "all"
    if len(cell) >= 4:
        return f"{len(cell)} of {world_size}"
    return ",".join(map(str, sorted(cell)))


def _width_in(states: Sequence[RingState]) -> float:
    """The width of a grid in which the longest number has room beside an arrow."""
    longest = 0
    for state in states:
        for number in itertools.chain(*state.values):
            longest = max(longest, len(f"{number:g}"))
    longest_title = max(len(state.title) for state in states)
    width_in = len(states[0].values) * max(0.58, 0.15 * longest)
    return max(width_in, 0.1 * longest_title) + 0.5


def _draw_grid(axes: Axes, state: RingState) -> None:
    ranks = len(state.values)
    for rank, row in enumerate(state.contributions):
        for chunk, cell in enumerate(row):
            fill, ink = {1: _OWN, ranks: _ALL}.get(len(cell), _PARTIAL)
            corner = (chunk - 0.5, rank - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=fill, edgecolor=_LINES))
            # To the right are the arrows.
            x = chunk - 0.06
            look = {"color": ink, "ha": "center", "va": "center"}
            number = f"{state.values[rank][chunk]:g}"
            axes.text(x, rank - 0.19, number, fontsize=11, fontweight="bold", **look)
            axes.text(x, rank + 0.23, _summed_ranks(cell, ranks), fontsize=10, **look)
    for src, dst, chunk in state.messages:
        corner = (chunk - 0.46, dst - 0.46)
        frame = Rectangle(corner, 0.92, 0.92, fill=False, edgecolor=VERMILION, linewidth=2.2)
        frame.set_zorder(3)
        axes.add_patch(frame)
        arrow = {"arrowstyle": "-|>", "color": VERMILION, "linewidth": 1.6, "shrinkA": 0}
        axes.annotate("", (chunk + 0.37, dst), (chunk + 0.37, src), arrowprops=arrow, zorder=4)
    axes.set(xlim=(-0.55, ranks - 0.45), ylim=(ranks - 0.45, -0.55))
    axes.set(xticks=range(ranks), yticks=range(ranks))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("chunk", labelpad=1)
    axes.set_ylabel("rank", labelpad=1)
    axes.set_title(state.title, fontsize=11)


def _legend() -> list[Patch]:
    looks = {"own part only": _OWN, "sum of some ranks": _PARTIAL, "sum of all ranks": _ALL}
    entries = [Patch(fc=fill, ec=_LINES, label=label) for label, (fill, _) in looks.items()]
    return [*entries, Patch(fill=False, ec=VERMILION, linewidth=2.2, label="just arrived")]
