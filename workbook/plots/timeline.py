"""The timeline of a run, rank by rank, and its seconds by kind.

The captions are what ``explain()`` says, over the time that is drawn: there is one definition of
how much of a run is computing, messages and waiting. The figures themselves show seconds.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.patches import Patch
from matplotlib.path import Path

from labkit import RunResult
from labkit.engine.tracing import Span, Trace
from labkit.engine.tracing.limits import what_limited
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
from workbook.plots.palette import STYLES, styles_of, swatch

# With more lanes, a lane is too low for a second line, and each rank's numbers are too many words.
_MOST_LANES = 8
# Kinds of span with a smaller share of the time are hardly to be seen in a timeline: there they
# have one color and one entry in the legend.
_LEAST_SHARE = 0.03
# Kinds without an entry, if they take a smaller share than that of every rank's time.
_BESIDE = ("update", "data")
# Behind a text on a bar.
BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}


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
        start_s, end_s: the part of the trace to show, in seconds of its clock.
        model: the trace is a prediction, not a measurement, and is drawn as one.
    """
    trace = getattr(result, "trace", result)
    is_whole = start_s is None and end_s is None
    if start_s is None:
        # As ``explain`` counts: from second 0 of a run, and from when a training run trains.
        latest_s = 0.0 if isinstance(result, RunResult) else math.inf
        start_s = min([latest_s, *(span.start_s for span in trace.spans)])
    if end_s is None:
        end_s = max([start_s, *(span.end_s for span in trace.spans)])
    window = trace.between(start_s, end_s)
    if not window.spans:
        raise ValueError(
            f"no span lies between {start_s:g} and {end_s:g} s: spans are a function's messages, "
            'and what it does under `with comm.span("compute"):`'
        )
    label, names = _lane_names(result, trace)
    # 1.5 s is still shown as 1500 ms, so that ticks are integers.
    scale, unit = second_unit((end_s - start_s) / 2)
    if title is None:
        title = "What each rank should do (predicted)" if model else "What each rank did"
    figure, axes = new_axes(1.5 + min(0.45 * len(names), 7), title)
    margin_s = 0.003 * (end_s - start_s)
    axes.set_xlim((start_s - margin_s) / scale, (end_s + margin_s) / scale)
    # Whole, not cut: a bar that goes on beyond the edge has no end there.
    spans = [span for span in trace.spans if span.end_s > start_s and span.start_s < end_s]
    labels = _labels_of(spans, end_s - start_s)
    add_legend(figure, draw_spans(axes, spans, trace.ranks, scale, model, labels))
    axes.set(xlabel=f"time since the start ({unit})", ylabel=label)
    axes.ticklabel_format(axis="x", useOffset=False)
    label_lanes(axes, names)

    if is_whole and hasattr(result, "explain"):
        limit = str(result.explain())
    else:
        gap = "idle time" if model else "code outside all spans"
        limit = str(what_limited(window, start_s, gap))
    words = limit if is_whole else f"In the part shown: {limit}"
    if model:
        words = f"Predicted: {words}"
    beside = _other_threads(window)
    alt = _alt(window, dict(zip(trace.ranks, names)), end_s - start_s, model)
    return CaptionedFigure(figure, alt=joined(alt, beside), caption=joined(words, beside))


def _other_threads(window: Trace) -> str:
    spans = tuple(span for span in window.spans if span.lane)
    if not spans:
        return ""
    owners = ", of all ranks together" if len(window.ranks) > 1 else ""
    seconds = _seconds_words(Trace(spans).seconds_by_kind())
    return f"Thin lanes are other threads{owners}: {seconds}."


def _alt(window: Trace, names: Mapping[int, str], extent_s: float, model: bool) -> str:
    kind = "Timeline"
    if model:
        kind = "Predicted timeline"
    head = f"{kind} of {format_count(len(names), 'rank')} over {format_seconds(extent_s)}."
    if len(names) > _MOST_LANES:
        return f"{head} In all, {_seconds_words(window.seconds_by_kind(lane=0))}."
    rows = []
    for rank, name in names.items():
        seconds = _seconds_words(window.seconds_by_kind(rank, lane=0))
        rows.append(f"rank {name}: {seconds}".replace("\n", ", "))
    return f"{head} {'; '.join(rows)}."


def _seconds_words(seconds: Mapping[str, float]) -> str:
    """``compute 4 ms, wait 1 ms``"""
    parts = []
    for kind in styles_of(seconds):
        if seconds[kind] > 0:
            parts.append(f"{kind} {format_seconds(seconds[kind])}")
    return ", ".join(parts) or "no span"


def _lane_names(result: Any, trace: Trace) -> tuple[str, list[str]]:
    """The label of the axis, and of each lane: ``0 · cuda:0``, and its peak memory below."""
    label = "rank · device" if trace.devices else "rank"
    peaks = {}
    for rank, peak in enumerate(getattr(result, "peak_memory", ())):
        if peak and peak.by_device:
            peaks[rank] = " + ".join(map(format_bytes, peak.by_device.values()))
    shows_peaks = bool(peaks) and len(trace.ranks) <= _MOST_LANES
    if shows_peaks:
        label += ",\npeak memory"
    names = []
    for rank in trace.ranks:
        name = trace.lane(rank).removeprefix("rank ")
        if shows_peaks:
            name += f"\n{peaks.get(rank, '')}"
        names.append(name)
    return label, names


def draw_spans(
    axes: Axes,
    spans: list[Span],
    lanes: list[int],
    scale: float,
    model: bool,
    labels: Mapping[str, str] | None = None,
) -> list[Patch]:
    """Draw all bars as one collection in the order of time, and hatches over the wide ones.

    A bar of three pixels is too narrow to show its hatch.

    Args:
        labels: the legend's label of each kind, "" for no entry; without them, each kind's name.

    Returns:
        The legend's entries.
    """
    left = np.array([span.start_s for span in spans]) / scale
    right = np.array([span.end_s for span in spans]) / scale
    lane = np.array([lanes.index(span.rank) for span in spans])
    # Threads beside the main one share a thin lane under it.
    beside = np.array([span.lane > 0 for span in spans])
    top = lane + np.where(beside, 0.2, -0.4)
    bottom = lane + np.where(~beside & beside.any(), 0.14, 0.4)
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1)
    corners = corners.reshape(-1, 4, 2)
    labels = labels or {span.kind: span.kind for span in spans}
    kinds = np.array([labels[span.kind] for span in spans])
    styles = {kind: style for kind, style in styles_of(labels).items() if labels[kind] == kind}
    for label in labels.values():
        styles.setdefault(label, STYLES["other"])
    looks = dict(styles)
    hatch_width = 0.0
    if model:
        looks = {kind: style.model for kind, style in styles.items()}
        hatch_width = 0.8
    colors = [looks[kind].color for kind in kinds]
    axes.add_collection(
        PolyCollection(list(corners), facecolors=colors, linewidths=0, gid="spans")
    )
    low, high = axes.get_xlim()
    wide = (right - left) * WIDTH_PX > 3 * (high - low)
    for kind, look in looks.items():
        bars = corners[wide & (kinds == kind)]
        if look.hatch and len(bars):
            # As one path: what takes long is a hatch per path.
            path = Path.make_compound_path_from_polys(bars)
            line = {"edgecolors": look.ink, "linewidths": hatch_width}
            hatches = PathCollection([path], facecolors="none", hatch=look.hatch, **line)
            axes.add_collection(hatches)
    return [swatch(kind, style, model) for kind, style in styles.items() if kind]


def _labels_of(spans: list[Span], extent_s: float) -> dict[str, str]:
    """The legend's label of each kind: its name, or that of all kinds that are hardly seen."""
    seconds: dict[str, float] = defaultdict(float)
    seconds_of_rank: dict[tuple[str, int], float] = defaultdict(float)
    for span in spans:
        seconds[span.kind] += span.duration_s
        seconds_of_rank[span.kind, span.rank] += span.duration_s
    labels = {kind: kind for kind in seconds}
    seen = set()
    for (kind, _), rank_s in seconds_of_rank.items():
        if rank_s >= _LEAST_SHARE * extent_s:
            seen.add(kind)
    for kind in seconds.keys() & set(_BESIDE) - seen:
        labels[kind] = ""
    least_s = _LEAST_SHARE * sum(seconds.values())
    brief = [kind for kind in styles_of(seconds) if labels[kind] and seconds[kind] < least_s]
    if len(brief) > 1:
        names = [kind for kind in brief if kind != "other"]
        labels |= dict.fromkeys(brief, f"other: {', '.join(names)}")
    return labels


def tag(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Text on a bar, on a white background, so that no hatch runs through it."""
    axes.text(x, y, text, va="center", ha="center", bbox=BOX, **look)
