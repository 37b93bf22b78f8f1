"""What each rank did when, and how long: the timeline of a run, and its seconds by kind.

The captions are what ``explain()`` says, over the time that is drawn: there is one definition of
how much of a run is computing, messages and waiting. The figures themselves show seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path

from labkit import RunResult
from labkit.tracing import Span, Trace
from labkit.tracing.limits import what_limited
from labkit.units import format_bytes, format_count, format_seconds, second_unit
from workbook.plots.figure import (
    WIDTH_PX,
    CaptionedFigure,
    add_legend,
    drawn,
    joined,
    label_lanes,
    new_axes,
)
from workbook.plots.palette import Style, styles_of, swatch

# With more lanes, a lane is too low for a second line, and each rank's numbers are too many words.
_MOST_TALL, _MOST_NAMED = 15, 8


@drawn
def timeline(
    result: Any,
    *,
    title: str | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    model: bool = False,
) -> CaptionedFigure:
    """Draw what each rank did when: one lane per rank, one bar per span.

    A lane names its rank's device, and the peak memory of the whole run if the result knows it.
    If a rank has another thread, such as DDP's communication thread, that thread gets a thinner
    lane under the rank's own: bars one above the other happened at the same time.

    Args:
        result: a ``Trace``, or a result that has one as ``.trace``.
        title: above the figure.
        start_s, end_s: the part of the trace to show, in seconds of its clock.
        model: the trace is a prediction, not a measurement, and is drawn as one.

    Raises:
        ValueError: nothing to draw; the message says what to do.
    """
    trace = trace_of(result)
    first_s, last_s = extent_of(trace)
    is_whole = start_s is None and end_s is None
    if start_s is None:
        # As ``explain`` counts: from second 0 of a run, and from when a training run trains.
        start_s = min(0.0, first_s) if isinstance(result, RunResult) else first_s
    end_s = last_s if end_s is None else end_s
    window = trace.between(start_s, end_s)
    if not start_s < end_s or not window.spans:
        raise ValueError(
            f"no span lies between start_s={start_s:g} and end_s={end_s:g}: the trace runs from "
            f"{first_s:g} to {last_s:g} s"
        )
    label, names = lane_names(result, trace, trace.ranks)
    # 1.5 s is still shown as 1500 ms, so that ticks are integers.
    scale, unit = second_unit((end_s - start_s) / 2)
    title = title or ("What each rank should do (model)" if model else "What each rank did")
    figure, axes = new_axes(1.5 + min(0.45 * len(names), 7), title)
    margin_s = 0.003 * (end_s - start_s)
    axes.set_xlim((start_s - margin_s) / scale, (end_s + margin_s) / scale)
    # Whole, not cut: a bar that goes on beyond the edge has no end there.
    spans = [span for span in trace.spans if span.end_s > start_s and span.start_s < end_s]
    add_legend(figure, draw_spans(axes, spans, trace.ranks, scale, model))
    axes.set(xlabel=f"time since the start ({unit})", ylabel=label)
    axes.ticklabel_format(axis="x", useOffset=False)
    label_lanes(axes, names)

    gap = "idle time" if model else "code outside all spans"
    has_words = is_whole and hasattr(result, "explain")
    limit = result.explain() if has_words else what_limited(window, start_s, gap)
    thin = sum(s.duration_s < (end_s - start_s) / WIDTH_PX for s in window.spans)
    narrow = f"Spans narrower than a pixel: {thin:,}; start_s and end_s zoom in." if thin else ""
    alt = _alt(window, dict(zip(trace.ranks, names)), end_s - start_s, model)
    part = "" if is_whole else "In the part shown: "
    words = f"{'Model: ' if model else ''}{part}{limit}"
    return CaptionedFigure(figure, alt=alt, caption=joined(words, narrow, _beside(window)))


def _beside(trace: Trace) -> str:
    has_others = any(span.lane > 0 for span in trace.spans)
    return "The thin lane under a rank is what its other thread did." if has_others else ""


def _alt(trace: Trace, names: Mapping[int, str], extent_s: float, model: bool) -> str:
    kind = "Predicted timeline" if model else "Timeline"
    head = f"{kind} of {format_count(len(names), 'rank')} over {format_seconds(extent_s)}."
    seconds = [seconds_words(trace.seconds_by_kind(rank, lane=0)) for rank in names]
    lanes = [name.replace("\n", ", ") for name in names.values()]
    rows = "; ".join(f"rank {lane}: {words}" for lane, words in zip(lanes, seconds))
    if len(names) > _MOST_NAMED:
        rows = f"In all, {seconds_words(trace.seconds_by_kind(lane=0))}"
    others = Trace(tuple(span for span in trace.spans if span.lane)).seconds_by_kind()
    beside = f"At the same time, in other threads: {seconds_words(others)}." if others else ""
    return joined(head, f"{rows}.", beside)


def seconds_words(seconds: Mapping[str, float]) -> str:
    """``compute 4 ms, wait 1 ms``"""
    kinds = styles_of(kind for kind, s in seconds.items() if s > 0)
    return ", ".join(f"{kind} {format_seconds(seconds[kind])}" for kind in kinds) or "no span"


def extent_of(trace: Trace) -> tuple[float, float]:
    """From the first span to the last."""
    return min(s.start_s for s in trace.spans), max(s.end_s for s in trace.spans)


def trace_of(result: Any) -> Trace:
    """The trace of a result, or ``result`` itself if it is a trace.

    Raises:
        ValueError: there is no trace, or it has no spans.
    """
    trace = getattr(result, "trace", result)
    if not isinstance(trace, Trace):
        raise ValueError(
            f"a trace is needed, got {type(trace).__name__}: give what labkit.run returned"
        )
    if not trace.spans:
        raise ValueError(
            "the trace has no spans, so there is nothing to draw: let the function send or "
            'receive through its comm, or put its work under `with comm.span("compute"):`'
        )
    return trace


@drawn
def phases(result: Any, *, title: str | None = None) -> CaptionedFigure:
    """Draw the seconds by kind as stacked bars, one bar per rank (or run).

    Args:
        result: a ``Trace``, a result that has one, ``{kind: seconds}``, or
            ``{rank or name: {kind: seconds}}``.
        title: above the figure.

    Raises:
        ValueError: nothing to draw; the message says what to do.
    """
    if isinstance(result, Mapping):
        by_name = any(isinstance(row, Mapping) for row in result.values())
        named = result if by_name else {"run": result}
    else:
        trace = trace_of(result)
        named = {rank: trace.seconds_by_kind(rank) for rank in trace.ranks}
    rows = {
        f"rank {name}" if isinstance(name, int) else str(name): dict(row)
        for name, row in named.items()
    }
    totals = {name: sum(row.values()) for name, row in rows.items()}
    if not any(totals.values()):
        raise ValueError(
            "no phase took any time, so there is nothing to draw: give what labkit.run returned, "
            'or seconds by kind such as {"compute": 0.8, "communicate": 0.2}'
        )
    title = title or "Time by phase"
    bars = "; ".join(
        f"{name} {format_seconds(totals[name])}: {seconds_words(row)}"
        for name, row in rows.items()
        if totals[name]
    )
    figure = _draw_phases(rows, totals, title)
    caption = _phases_caption(result, rows, totals)
    return CaptionedFigure(figure, alt=f"{title}. {bars}.", caption=caption)


def _draw_phases(
    rows: dict[str, dict[str, float]], totals: dict[str, float], title: str
) -> Figure:
    figure, axes = new_axes(1.5 + min(0.45 * len(rows), 9), title)
    scale, unit = second_unit(max(totals.values()) / 2)
    longest = max(totals.values()) / scale
    styles = styles_of(kind for row in rows.values() for kind, s in row.items() if s > 0)
    for lane, (name, row) in enumerate(rows.items()):
        left = 0.0
        for kind, style in styles.items():
            width = row.get(kind, 0.0) / scale
            axes.barh(lane, width, 0.72, left, label=kind, **style.fill)
            if width > 0.1 * longest:
                tag(axes, left + width / 2, lane, format_seconds(row[kind]), pad=0.2)
            left += width
        axes.text(left, lane, f" {format_seconds(totals[name])}", va="center", ha="left")
    axes.set(xlim=(0, 1.14 * longest), xlabel=f"time ({unit})")
    label_lanes(axes, list(rows))
    add_legend(figure, [swatch(kind, style) for kind, style in styles.items()])
    return figure


def _phases_caption(
    result: Any, rows: dict[str, dict[str, float]], totals: dict[str, float]
) -> str:
    if not isinstance(result, Mapping):
        trace = trace_of(result)
        limit = result.explain() if hasattr(result, "explain") else what_limited(trace)
        adds = any(span.lane for span in trace.spans)
        return joined(str(limit), "A bar adds up the rank's threads." if adds else "")
    slow, fast = max(totals, key=totals.__getitem__), min(totals, key=totals.__getitem__)
    kind, seconds = max(rows[slow].items(), key=lambda item: item[1])
    most = f"{format_seconds(totals[slow])}, of which {kind} takes {format_seconds(seconds)}"
    if format_seconds(totals[slow]) == format_seconds(totals[fast]):
        return f"A bar is {most}."
    shortest = f"{fast}: {format_seconds(totals[fast])}"
    return f"The longest bar is {slow}: {most}; the shortest is {shortest}."


def lane_names(
    result: Any, trace: Trace, ranks: Sequence[int], noun: str = "rank"
) -> tuple[str, list[str]]:
    """The label of the axis, and of each lane: ``0 · cuda:0``, and its peak memory below."""
    peaks = peak_sizes(result) if len(ranks) <= _MOST_TALL else {}
    names = [trace.lane(rank).removeprefix("rank ") for rank in ranks]
    label = f"{noun} · device" if any(rank in trace.devices for rank in ranks) else noun
    if peaks:
        tall = [f"\n{peaks[rank]}" if rank in peaks else "" for rank in ranks]
        return f"{label},\npeak memory", [name + peak for name, peak in zip(names, tall)]
    return label, names


def peak_sizes(result: Any) -> dict[int, str]:
    """The peak memory of the ranks of a result, as far as it is known: ``1 MiB``."""
    return {
        rank: " + ".join(map(format_bytes, peak.by_device.values()))
        for rank, peak in enumerate(getattr(result, "peak_memory", ()))
        if peak and peak.by_device
    }


def draw_spans(
    axes: Axes, spans: list[Span], lanes: list[int], scale: float, model: bool, idle: str = "wait"
) -> list[Patch]:
    """Draw all bars as one collection in the order of time, and hatches over the wide ones.

    A bar of three pixels is too narrow to show its hatch.

    Returns:
        The legend's entries, in which ``idle`` is the name of the kind ``wait``.
    """
    corners = _corners(spans, lanes, scale)
    styles = styles_of(span.kind for span in spans)
    looks = {kind: style.model if model else style for kind, style in styles.items()}
    colors = [looks[span.kind].color for span in spans]
    bars = PolyCollection(list(corners), facecolors=colors, linewidths=0, snap=False, gid="spans")
    axes.add_collection(bars, autolim=False)
    left, right = axes.get_xlim()
    wide = (corners[:, 2, 0] - corners[:, 0, 0]) * WIDTH_PX > 3 * (right - left)
    kinds = np.array([span.kind for span in spans])
    for kind, look in looks.items():
        mine = corners[wide & (kinds == kind)]
        if look.hatch and len(mine):
            over = _hatched(mine, look, f"hatch {kind}", 0.8 if model else 0)
            axes.add_collection(over, autolim=False)
    names = {kind: idle if kind == "wait" else kind for kind in styles}
    return [swatch(names[kind], style, model) for kind, style in styles.items()]


def _hatched(corners: np.ndarray, look: Style, name: str, line_width: float) -> PathCollection:
    """The hatch over all these bars, as one path: what takes long is a hatch per path."""
    closed = np.concatenate([corners, corners[:, :1]], axis=1)
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(corners)
    over = PathCollection(
        [Path(closed.reshape(-1, 2), codes)],
        facecolors="none",
        edgecolors=look.ink,
        hatch=look.hatch,
    )
    over.set(linewidth=line_width, gid=name)
    return over


def tag(axes: Axes, x: float, y: float, text: str, pad: float) -> None:
    """Text on a bar, on a white background, so that no hatch runs through it."""
    box = {"boxstyle": f"round,pad={pad}", "facecolor": "white", "edgecolor": "none"}
    axes.text(x, y, text, va="center", ha="center", bbox=box)


def _corners(spans: list[Span], lanes: list[int], scale: float) -> np.ndarray:
    """[spans, 4 corners, (x, y)]: each span's bar in axis units."""
    lane_of = {rank: lane for lane, rank in enumerate(lanes)}
    left = np.array([span.start_s for span in spans]) / scale
    right = np.array([span.end_s for span in spans]) / scale
    lane = np.array([lane_of[span.rank] for span in spans], dtype=float)
    beside = np.array([span.lane > 0 for span in spans])
    # Threads beside the main one share the thin lane under it.
    top = lane + np.where(beside, 0.2, -0.4)
    bottom = lane + np.where(~beside & beside.any(), 0.14, 0.4)
    xs = np.stack([left, left, right, right], axis=1)
    ys = np.stack([top, bottom, bottom, top], axis=1)
    return np.stack([xs, ys], axis=2)
