"""A ring all-reduce on paper: which ranks' values each chunk holds, one grid per state."""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
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
    messages: Sequence[tuple[int, int, int]] = ()
    title: str = ""

    @property
    def complete(self) -> int:
        """The number of cells that hold the sum over all ranks."""
        world_size = len(self.contributions)
        return sum(len(cell) == world_size for row in self.contributions for cell in row)


def ring_states(
    world_size: int, values: Sequence[Sequence[float]] | None = None
) -> list[RingState]:
    """The states of a ring all-reduce: the start, then one state for each of the 2 (P - 1) steps.

    Args:
        world_size: P, at least 2.
        values: [P][P], the number that each rank has in each chunk. By default rank r has
            (c + 1) x 10^r in chunk c: the digits of a sum show which ranks' numbers it contains.

    Raises:
        ValueError: fewer than 2 ranks, or values of another shape.
    """
    if world_size < 2:
        raise ValueError(f"a ring needs at least 2 ranks, got world_size {world_size}")
    ranks = range(world_size)
    if values is None:
        values = [[(chunk + 1) * 10**rank for chunk in ranks] for rank in ranks]
    if [len(row) for row in values] != [world_size] * world_size:
        raise ValueError(f"values must be {world_size} rows (ranks) of {world_size} (chunks)")
    steps = zip(*(ring_all_reduce(rank, world_size) for rank in ranks))
    states = []
    for number, (held, moves) in enumerate(zip(ring_contributions(world_size), [(), *steps])):
        messages = [(rank, move.dst, move.send_chunk) for rank, move in enumerate(moves)]
        title = f"step {number}: {moves[0].phase}" if moves else "start"
        sums = [
            [sum(values[rank][chunk] for rank in cell) for chunk, cell in enumerate(row)]
            for row in held
        ]
        states.append(RingState(held, sums, messages, title))
    return states


@drawn
def ring_steps(states: Sequence[RingState], *, title: str | None = None) -> CaptionedFigure:
    """Draw states of an all-reduce in reading order: rows are ranks, columns are chunks.

    Args:
        states: all of the same size, for example ``ring_states(3)``.
        title: above the figure.

    Raises:
        ValueError: no states.
    """
    if not states:
        raise ValueError("no states to draw: give at least one, for example plots.ring_states(3)")
    columns, lines, figure = _grids(states, title, len(states))
    grids = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for number, (axes, state) in enumerate(zip(grids, states)):
        _draw_grid(axes, state, first_in_line=number % columns == 0)
    for axes in grids[len(states) :]:
        axes.set_axis_off()
    if title:
        add_title(figure, title)
    add_legend(figure, _legend_entries(states))
    ranks = len(states[0].values)
    cells = ranks**2
    progress = "; ".join(f"{state.title}, {state.complete}" for state in states)
    count = format_count(len(states), "state")
    alt = (
        f"Grid of {ranks} ranks by {ranks} chunks in {count}. "
        f"Cells that hold the sum of all ranks, of {cells}: {progress}."
    )
    caption = (
        "Each cell shows its value, and below it names the ranks summed in it. Arrows show what "
        f"has just moved, {ranks} messages per step. At the end {states[-1].complete} of {cells} "
        "cells hold the sum of all ranks."
    )
    return CaptionedFigure(figure, alt=alt, caption=caption)


@drawn
def ring_step(
    step: int, world_size: int, values: Sequence[Sequence[float]] | None = None
) -> CaptionedFigure:
    """Draw one step of ring all-reduce: its messages, and what each rank holds after it.

    All steps of one ring are drawn at the same size, so that nothing moves from step to step.

    Args:
        step: 0 (the start) to 2 (P - 1) (the end).
        world_size: P, at least 2.
        values: as in ``ring_states``.

    Raises:
        ValueError: fewer than 2 ranks, an impossible step, values of another shape.
    """
    states = ring_states(world_size, values)
    words = ring_words(step, world_size)
    title = states[step].title.replace(":", f" of {len(states) - 1}:")
    state = replace(states[step], title=title)
    *_, figure = _grids(states, None, count=1)
    width, height = 72 * figure.get_size_inches()
    axes = fixed_axes(figure, 36, width - 7.2, 75.6, height - 25.2)
    _draw_grid(axes, state, first_in_line=True)
    add_legend(figure, _legend_entries(states))
    rows = [
        f"rank {rank} holds {', '.join(_cell_texts(state, rank, chunk)[0] for chunk in row)}"
        for rank, row in enumerate([range(world_size)] * world_size)
    ]
    alt = (
        f"Ring all-reduce of {world_size} ranks, {title}. By chunk: {'; '.join(rows)}. "
        f"Cells that hold the sum of all ranks: {state.complete} of {world_size**2}."
    )
    caption = f"{words} Below each number stand the ranks summed in it."
    return CaptionedFigure(figure, alt=alt, caption=caption)


def ring_words(step: int, world_size: int) -> str:
    """Describe one step of ring all-reduce in words: its messages, and what ranks hold after it.

    Raises:
        ValueError: as ``ring_step``.
    """
    states = ring_states(world_size)
    if step not in range(len(states)):
        raise ValueError(
            f"a ring of {format_count(world_size, 'rank')} has no step {step}: choose 0 (the "
            f"start) to {len(states) - 1} (the end)"
        )
    if step == 0:
        return f"Start: each of {world_size} ranks holds its own numbers, and none has moved."
    state = states[step]
    messages = _listed(
        f"rank {src} sends chunk {chunk} to rank {dst}" for src, dst, chunk in state.messages
    )
    _, phase = state.title.split(": ")
    verb = "adds" if phase == "share_reduce" else "copies"
    if not state.complete:
        _, dst, chunk = state.messages[0]
        count = len(state.contributions[dst][chunk])
        ends = f"Received chunks are now sums of {count} of {world_size} ranks; none is complete."
    elif state.complete == world_size**2:
        ends = f"Every rank now owns the complete sums of all {world_size} chunks."
    else:
        owners = []
        for rank, row in enumerate(state.contributions):
            owned = [str(chunk) for chunk, cell in enumerate(row) if len(cell) == world_size]
            owners.append(f"rank {rank} owns chunk{'s' * (len(owned) > 1)} {_listed(owned)}")
        ends = f"Complete now: {'; '.join(owners)}."
    return (
        f"Step {step} of {len(states) - 1}, {phase}: {messages}. Each {verb} what comes in. {ends}"
    )


def _listed(texts: Iterable[str]) -> str:
    *head, last = texts
    return f"{', '.join(head)} and {last}" if head else last


def _grids(states: Sequence[RingState], title: str | None, count: int) -> tuple[int, int, Figure]:
    """Columns and lines of ``count`` grids in which each state's texts fit, and their figure."""
    ranks = len(states[0].values)
    places = list(itertools.product(range(ranks), range(ranks)))
    cells = [_cell_texts(state, *place) for state in states for place in places]
    # Room for the longest text of a cell and the arrow beside it; values are bold.
    plain_in = max(0.1 * len(t) - 0.05 * t.count(",") + 0.18 for texts in cells for t in texts)
    bold_in = max(0.15 * len(value) for value, _ in cells)
    title_in = max(0.1 * len(state.title) for state in states)
    width_in = max(ranks * max(0.4, plain_in, bold_in), title_in) + 0.5
    lines = math.ceil(count / max(1, int(WIDTH_IN / width_in)))
    columns = math.ceil(count / lines)
    height_in = lines * (0.48 * ranks + 0.8) + (0.9 if title else 0.6)
    return columns, lines, Figure(figsize=(max(columns * width_in, 4.6), height_in))


def _cell_texts(state: RingState, rank: int, chunk: int) -> tuple[str, str]:
    """The value, and the ranks whose values are in it."""
    world_size, cell = len(state.contributions), state.contributions[rank][chunk]
    whose = ",".join(str(rank) for rank in sorted(cell))
    if len(cell) == world_size:
        whose = "all"
    elif len(cell) > 3:
        whose = f"{len(cell)} of {world_size}"
    return f"{state.values[rank][chunk]:g}", whose


def _cell_look(count: int, world_size: int) -> tuple[str, str]:
    """Fill and text colour of a cell with ``count`` ranks in it: the more, the darker."""
    if count == world_size:
        return DARK, "white"
    if count <= 1:
        return "white", DARK
    return tint(ORANGE, 0.25 + 0.55 * (count - 1) / max(world_size - 2, 1)), DARK


def _draw_grid(axes: Axes, state: RingState, first_in_line: bool) -> None:
    ranks = len(state.values)
    for rank, row in enumerate(state.contributions):
        for chunk, cell in enumerate(row):
            fill, ink = _cell_look(len(cell), ranks)
            corner = (chunk - 0.5, rank - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=fill, edgecolor=_LINES))
            value, whose = _cell_texts(state, rank, chunk)
            # To the right are the arrows.
            place = {"x": chunk - 0.06, "color": ink, "ha": "center", "va": "center"}
            axes.text(y=rank - 0.19, s=value, fontsize=11, fontweight="bold", **place)
            axes.text(y=rank + 0.23, s=whose, fontsize=10, **place)
    for src, dst, chunk in state.messages:
        box = Rectangle((chunk - 0.46, dst - 0.46), 0.92, 0.92, fill=False, zorder=3)
        box.set(edgecolor=VERMILION, linewidth=2.2)
        axes.add_patch(box)
        arrow = {"arrowstyle": "-|>", "color": VERMILION, "linewidth": 1.6, "shrinkA": 0}
        ends = (chunk + 0.37, dst), (chunk + 0.37, src)
        axes.annotate("", *ends, arrowprops=arrow, zorder=4)
    axes.set(xlim=(-0.55, ranks - 0.45), ylim=(ranks - 0.45, -0.55))
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("chunk", labelpad=1)
    axes.set_ylabel("rank" if first_in_line else "", labelpad=1)
    axes.set_title(state.title, fontsize=11)


def _legend_entries(states: Sequence[RingState]) -> list[Patch]:
    world_size = len(states[0].contributions)
    counts = {len(cell) for state in states for row in state.contributions for cell in row}
    entries = []
    for label, among in (
        ("own part only", {1}),
        ("sum of some ranks", set(range(2, world_size))),
        ("sum of all ranks", {world_size}),
    ):
        if found := sorted(counts & among):
            fill, _ = _cell_look(found[len(found) // 2], world_size)
            entries.append(Patch(facecolor=fill, edgecolor=_LINES, label=label))
    if any(state.messages for state in states):
        outline = Patch(fill=False, edgecolor=VERMILION, linewidth=2.2, label="just arrived")
        entries.append(outline)
    return entries
