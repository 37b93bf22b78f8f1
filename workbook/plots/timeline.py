"""What each rank did when, and how long: the timeline of a run, and its seconds by kind.

The captions are what ``explain()`` says, over the time that is drawn: there is one definition of
how much of a run is computing, messages and waiting. The figures themselves show seconds.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path

from labkit import RunResult
from labkit.comm.peak_memory import PeakMemory
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

Peaks = Mapping[int, PeakMemory]


@drawn
def timeline(
    result: Any,
    *,
    title: str | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    ranks: Collection[int] | None = None,
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
        ranks: the ranks to show; all by default.
        model: the trace is a prediction, not a measurement, and is drawn as one.

    Raises:
        ValueError: nothing to draw; the message says what to do.
    """
    trace = trace_of(result)
    lanes = sorted(trace.ranks if ranks is None else set(ranks))
    if not lanes or not set(lanes) <= set(trace.ranks):
        raise ValueError(f"ranks {lanes} cannot be drawn: the trace has ranks {trace.ranks}")
    first_s, last_s = extent_of(trace)
    is_whole = start_s is None and end_s is None
    if start_s is None:
        # As ``explain`` counts: from second 0 of a run, and from when a training run trains.
        start_s = min(0.0, first_s) if isinstance(result, RunResult) else first_s
    end_s = last_s if end_s is None else end_s
    window = trace.between(start_s, end_s)
    if not start_s < end_s or not set(lanes) & set(window.ranks):
        raise ValueError(
            f"no span lies between start_s={start_s:g} and end_s={end_s:g}: the trace runs from "
            f"{first_s:g} to {last_s:g} s"
        )
    peaks = {rank: peak for rank, peak in peaks_of(result).items() if rank in lanes}
    title = title or ("What each rank should do (model)" if model else "What each rank did")
    figure = _draw(trace, lanes, peaks, start_s, end_s, title, model)
    has_words = is_whole and hasattr(result, "explain")
    gap = "idle time" if model else "code outside all spans"
    limit = result.explain() if has_words else what_limited(window, start_s, gap)
    alt = _alt(window, lanes, end_s - start_s, peaks, model)
    thin = sum(s.duration_s < (end_s - start_s) / WIDTH_PX for s in window.spans)
    spans = "1 span is" if thin == 1 else f"{thin:,} spans are"
    narrow = f"{spans} narrower than a pixel: start_s and end_s zoom in." if thin else ""
    words = f"Model: {limit}" if model else str(limit)
    return CaptionedFigure(figure, alt=alt, caption=joined(words, narrow, _beside(window)))


def _draw(
    trace: Trace,
    lanes: list[int],
    peaks: Peaks,
    start_s: float,
    end_s: float,
    title: str,
    model: bool,
) -> Figure:
    # 1.5 s is still shown as 1500 ms, so that ticks are integers.
    scale, unit = second_unit((end_s - start_s) / 2)
    figure, axes = new_axes(1.5 + min(0.45 * len(lanes), 7), title)
    margin_s = 0.003 * (end_s - start_s)
    axes.set_xlim((start_s - margin_s) / scale, (end_s + margin_s) / scale)
    # Whole, not cut: a bar that goes on beyond the edge has no end there.
    spans = [s for s in trace.spans if s.rank in lanes and s.end_s > start_s and s.start_s < end_s]
    entries = draw_spans(axes, spans, lanes, scale, model)
    name_lanes(axes, trace, lanes, peaks)
    axes.set_xlabel(f"time since the start ({unit})")
    axes.ticklabel_format(axis="x", useOffset=False)
    add_legend(figure, entries)
    return figure


def timeline_words(trace: Trace) -> tuple[str, str]:
    """The alt text and the caption of the timeline of a whole trace, which has spans."""
    alt = _alt(trace, trace.ranks, extent_of(trace)[1], {}, model=False)
    return alt, joined(str(what_limited(trace, 0.0)), _beside(trace))


def _beside(trace: Trace) -> str:
    has_others = any(span.lane > 0 for span in trace.spans)
    return "The thin lane under a rank is what its other thread did." if has_others else ""


def _alt(trace: Trace, lanes: list[int], extent_s: float, peaks: Peaks, model: bool) -> str:
    kind = "Predicted timeline" if model else "Timeline"
    head = f"{kind} of {format_count(len(lanes), 'rank')} over {format_seconds(extent_s)}."
    others = Trace(tuple(span for span in trace.spans if span.lane and span.rank in lanes))
    if len(lanes) > _MOST_NAMED:
        rows = f"In all, {seconds_words(trace.seconds_by_kind(lane=0))}."
    else:
        seconds = [seconds_words(trace.seconds_by_kind(rank, lane=0)) for rank in lanes]
        rows = "; ".join(f"rank {rank}: {words}" for rank, words in zip(lanes, seconds)) + "."
    beside = ""
    if others.spans:
        beside = f"At the same time, in other threads: {seconds_words(others.seconds_by_kind())}."
    return joined(head, rows, beside, device_words(trace, lanes), memory_words(peaks))


def seconds_words(seconds: Mapping[str, float]) -> str:
    """``compute 4 ms, wait 1 ms``"""
    kinds = styles_of(kind for kind, s in seconds.items() if s > 0)
    return ", ".join(f"{kind} {format_seconds(seconds[kind])}" for kind in kinds)


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
def phases(result: Any, *, title: str | None = None, model: bool = False) -> CaptionedFigure:
    """Draw the seconds by kind as stacked bars, one bar per rank (or run).

    Args:
        result: a ``Trace``, a result that has one, ``{kind: seconds}``, or
            ``{rank or name: {kind: seconds}}``.
        title: above the figure.
        model: the seconds are predictions, and are drawn as such.

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
    title = title or ("Time by phase (model)" if model else "Time by phase")
    bars = "; ".join(
        f"{name} {format_seconds(totals[name])}: {seconds_words(row)}"
        for name, row in rows.items()
        if totals[name]
    )
    figure = _draw_phases(rows, totals, title, model)
    caption = _phases_caption(result, rows, totals)
    return CaptionedFigure(figure, alt=f"{title}. {bars}.", caption=caption)


def _draw_phases(
    rows: dict[str, dict[str, float]], totals: dict[str, float], title: str, model: bool
) -> Figure:
    figure, axes = new_axes(1.5 + min(0.45 * len(rows), 9), title)
    scale, unit = second_unit(max(totals.values()) / 2)
    longest = max(totals.values()) / scale
    styles = styles_of(kind for row in rows.values() for kind, s in row.items() if s > 0)
    for lane, (name, row) in enumerate(rows.items()):
        left = 0.0
        for kind, style in styles.items():
            width = row.get(kind, 0.0) / scale
            look = style.model if model else style
            axes.barh(lane, width, 0.72, left, label=kind, **look.fill)
            if width > 0.1 * longest:
                tag(axes, left + width / 2, lane, format_seconds(row[kind]), pad=0.2)
            left += width
        axes.text(left, lane, f" {format_seconds(totals[name])}", va="center", ha="left")
    axes.set(xlim=(0, 1.14 * longest), xlabel=f"time ({unit})")
    label_lanes(axes, list(rows))
    add_legend(figure, [swatch(kind, style, model) for kind, style in styles.items()])
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


def peaks_of(result: Any) -> Peaks:
    """The peak memory of the ranks of a result, as far as it is known."""
    peaks: Sequence[PeakMemory | None] = getattr(result, "peak_memory", ())
    return {rank: peak for rank, peak in enumerate(peaks) if peak and peak.by_device}


def name_lanes(
    axes: Axes, trace: Trace, ranks: Sequence[int], peaks: Peaks, noun: str = "rank"
) -> None:
    """Label each lane with its rank (or stage), device, and peak memory if there is room."""
    has_peaks = len(ranks) <= _MOST_TALL and any(rank in peaks for rank in ranks)
    names = []
    for rank in ranks:
        name = trace.lane(rank).removeprefix("rank ")
        if has_peaks and rank in peaks:
            name += f"\n{' + '.join(map(format_bytes, peaks[rank].by_device.values()))}"
        names.append(name)
    label = f"{noun} · device" if any(rank in trace.devices for rank in ranks) else noun
    axes.set_ylabel(f"{label},\npeak memory" if has_peaks else label)
    label_lanes(axes, names)


def device_words(trace: Trace, ranks: Sequence[int]) -> str:
    """Which ranks are on which GPU, in a sentence; empty if none is on a GPU."""
    of_device: dict[str, list[int]] = {}
    for rank in ranks:
        of_device.setdefault(trace.devices.get(rank, "cpu"), []).append(rank)
    if not of_device.keys() - {"cpu"}:
        return ""
    parts = [
        f"{name} has rank{'s' * (len(mine) > 1)} {', '.join(map(str, mine))}"
        for name, mine in of_device.items()
    ]
    return f"Devices: {'; '.join(parts)}."


def memory_words(peaks: Peaks, noun: str = "rank") -> str:
    """The peak memory of each rank, or of many ranks the most; empty if unknown."""
    largest = sorted(peaks, key=lambda rank: -max(peaks[rank].by_device.values()))
    if not largest:
        return ""
    named = sorted(largest) if len(largest) <= _MOST_NAMED else largest[:1]
    parts = []
    for rank in named:
        sizes = [
            format_bytes(size) + ("" if name == "cpu" else f" on {name}")
            for name, size in peaks[rank].by_device.items()
        ]
        parts.append(f"{noun} {rank} {' and '.join(sizes)}")
    most = "at most " if len(named) < len(largest) else ""
    return f"Peak memory: {most}{', '.join(parts)}."


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
