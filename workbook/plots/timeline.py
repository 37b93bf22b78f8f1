"""The timeline of a run: what each rank did when."""

import statistics
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path

from labkit.tracing import LOCAL_KINDS, Span, Trace
from labkit.units import format_count, format_seconds, second_unit
from workbook.plots.figure import (
    WIDTH_PX,
    CaptionedFigure,
    add_legend,
    drawn,
    label_lanes,
    new_axes,
)
from workbook.plots.lane_names import device_words, lane_names, memory_words, peaks_of
from workbook.plots.palette import Style, styles_of, swatch

# {rank or bar: {kind: share of its time}}
Shares = dict[str, dict[str, float]]


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
    lanes = _chosen_ranks(trace, ranks)
    peaks = {rank: peak for rank, peak in peaks_of(result).items() if rank in lanes}
    if start_s is None:
        start_s = min(0.0, *(span.start_s for span in trace.spans))
    if end_s is None:
        end_s = max(span.end_s for span in trace.spans)
    spans = _spans_between(trace, lanes, start_s, end_s)
    shares = _shares([s for s in spans if s.lane == 0], lanes, start_s, end_s)
    beside = _beside_words(_shares([s for s in spans if s.lane > 0], lanes, start_s, end_s))
    title = title or ("What each rank should do (model)" if model else "What each rank did")
    thin = sum(span.duration_s < (end_s - start_s) / WIDTH_PX for span in spans)
    said = joined(device_words(trace, lanes), memory_words(peaks))
    names = lane_names(trace, lanes, peaks)
    return CaptionedFigure(
        _draw_timeline(spans, lanes, names, start_s, end_s, title, model),
        alt=joined(_timeline_alt(shares, end_s - start_s, model) + beside[0], said),
        caption=joined(_timeline_caption(shares, end_s - start_s, thin) + beside[1], said),
    )


def timeline_words(trace: Trace) -> tuple[str, str]:
    """The alt text and the caption of the timeline of a whole trace, which has spans."""
    end_s = max(span.end_s for span in trace.spans)
    lanes = [[span for span in trace.spans if (span.lane > 0) == beside] for beside in (0, 1)]
    shares, others = (_shares(spans, trace.ranks, 0.0, end_s) for spans in lanes)
    beside = _beside_words(others)
    alt, caption = _timeline_alt(shares, end_s, False), _timeline_caption(shares, end_s, 0)
    said = device_words(trace, trace.ranks)
    return joined(alt + beside[0], said), joined(caption + beside[1], said)


def joined(*sentences: str) -> str:
    """The sentences that are not empty."""
    return " ".join(filter(None, sentences))


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


def _chosen_ranks(trace: Trace, ranks: Collection[int] | None) -> list[int]:
    known = trace.ranks
    if ranks is None:
        return known
    if not ranks or not set(ranks) <= set(known):
        raise ValueError(f"ranks {sorted(ranks)} cannot be drawn: the trace has ranks {known}")
    return sorted(set(ranks))


def _spans_between(
    trace: Trace, ranks: Collection[int], start_s: float, end_s: float
) -> list[Span]:
    wanted = set(ranks)
    spans = [
        span
        for span in trace.spans
        if span.rank in wanted and span.end_s > start_s and span.start_s < end_s
    ]
    if not spans or not start_s < end_s:
        first_s = min(span.start_s for span in trace.spans)
        last_s = max(span.end_s for span in trace.spans)
        raise ValueError(
            f"no span lies between start_s={start_s:g} and end_s={end_s:g}: the trace runs from "
            f"{first_s:g} to {last_s:g} s"
        )
    return spans


def _draw_timeline(
    spans: list[Span],
    lanes: list[int],
    names: tuple[str, list[str]],
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
    entries = draw_spans(axes, spans, lanes, scale, model)
    axes.set(xlabel=f"time since the start ({unit})", ylabel=names[0])
    axes.ticklabel_format(axis="x", useOffset=False)
    label_lanes(axes, names[1])
    add_legend(figure, entries)
    return figure


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


def _shares(spans: list[Span], ranks: list[int], start_s: float, end_s: float) -> Shares:
    """By rank, by kind: the share of the time from ``start_s`` to ``end_s``."""
    kinds = styles_of(span.kind for span in spans)
    shares = {f"rank {rank}": dict.fromkeys(kinds, 0.0) for rank in ranks}
    for span in spans:
        inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        shares[f"rank {span.rank}"][span.kind] += inside_s / (end_s - start_s)
    return shares


def percents(share: Mapping[str, float], least: float = 0.0) -> str:
    """``compute 60%, wait 40%``, without the shares that are not above ``least``."""
    return ", ".join(f"{kind} {percent(part)}" for kind, part in share.items() if part > least)


def percent(part: float) -> str:
    return "under 1%" if 0 < part < 0.005 else f"{part:.0%}"


def _mean_share(shares: Shares) -> dict[str, float]:
    kinds = next(iter(shares.values()))
    return {kind: statistics.fmean(row[kind] for row in shares.values()) for kind in kinds}


def _timeline_alt(shares: Shares, extent_s: float, model: bool) -> str:
    kind = "Predicted timeline" if model else "Timeline"
    head = f"{kind} of {format_count(len(shares), 'rank')} over {format_seconds(extent_s)}."
    if len(shares) > 8:
        return f"{head} Mean share of the time: {percents(_mean_share(shares))}."
    rows = "; ".join(f"{name}: {percents(share)}" for name, share in shares.items())
    return f"{head} Share of the time by {rows}."


def _timeline_caption(shares: Shares, extent_s: float, thin: int) -> str:
    mean = _mean_share(shares)
    blank = 1 - sum(mean.values())
    whose = "Mean over the ranks" if len(shares) > 1 else "In all"
    sentences = [communication_words(shares, dict.fromkeys(shares, extent_s))]
    sentences.append(f"{whose}: {percents(mean, least=0.005)}.")
    if blank > 0.02:
        sentences.append(f"Blank, {percent(blank)}, is time outside any span.")
    if thin:
        spans = "1 span is" if thin == 1 else f"{thin:,} spans are"
        sentences.append(f"{spans} narrower than a pixel: start_s and end_s zoom in.")
    return " ".join(sentences)


def _beside_words(beside: Shares) -> tuple[str, str]:
    """The sentences on the thin lanes in alt text and caption; empty if there are none."""
    mean = _mean_share(beside)
    if not mean:
        return "", ""
    rows = "; ".join(f"{name}: {percents(share)}" for name, share in beside.items())
    if len(beside) > 8:
        rows = f"mean {percents(mean)}"
    return (
        f" At the same time, in threads beside the main one, {rows}.",
        " The thin lane under each rank is what its other thread did at the same time: "
        f"{percents(mean, least=0.005)}.",
    )


def communication_words(shares: Shares, totals: Mapping[str, float]) -> str:
    """Which rank communicates and waits most, and which least."""
    parts = {
        name: sum(part for kind, part in share.items() if kind not in LOCAL_KINDS)
        for name, share in shares.items()
    }
    most, least = max(parts, key=parts.__getitem__), min(parts, key=parts.__getitem__)
    total = format_seconds(totals[most])
    where = "on" if most.startswith("rank ") else "in"
    if not parts[most]:
        return f"None of the {total} goes to communication or waiting."
    text = f"Communication and waiting take {percent(parts[most])} of {total} {where} {most}"
    if percent(parts[most]) != percent(parts[least]):
        text += f" and {percent(parts[least])} {where} {least}"
    elif len(parts) > 1:
        text += f", and as much {where} the others"
    return f"{text}."
