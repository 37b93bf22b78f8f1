"""Ranks on hosts that fail, over time, and how much of the time counted."""

from typing import Any

from labkit.engine.tracing import Span
from labkit.units import format_number, format_seconds
from workbook.plots.figure import (
    CaptionedFigure,
    add_legend,
    drawn,
    joined,
    label_lanes,
    new_axes,
    ratio_words,
)
from workbook.plots.palette import DARK
from workbook.plots.timeline import BOX, draw_spans, tag


@drawn
def replicas(run: Any, model_goodput: float) -> CaptionedFigure:
    """Draw a lane per rank, and below them the time that counted, measured and by the formula.

    Args:
        run: a ``workbook.measure.failures.FaultyRun``.
        model_goodput: the predicted part of the time that counts, drawn hatched.
    """
    ranks = sorted({span.rank for span in run.spans})
    measured = len(ranks)
    model = measured + 1
    title = "What each rank did while hosts failed"
    figure, axes = new_axes(1.7 + 0.4 * (len(ranks) + 2), title)
    axes.set_xlim(0, run.duration_s)
    lanes = [*ranks, measured, model]
    counted = Span(measured, "train", 0.0, run.useful_s)
    entries = draw_spans(axes, [*run.spans, counted], lanes, 1.0, False)
    predicted = Span(model, "train", 0.0, model_goodput * run.duration_s)
    draw_spans(axes, [predicted], lanes, 1.0, True)  # its lane is labeled
    waits = [span for span in run.spans if span.kind == "wait"]
    for span in sorted(waits, key=lambda wait: wait.duration_s)[-1:]:
        tag(axes, (span.start_s + span.end_s) / 2, span.rank, "wait")
    words = []
    for fault in run.faults:
        on_host = {"ymin": fault.ranks[0] - 0.45, "ymax": fault.ranks[-1] + 0.45}
        axes.vlines(fault.at_s, **on_host, color=DARK, linewidth=2.5)
        label = {"textcoords": "offset points", "va": "center", "bbox": BOX}
        axes.annotate(fault.kind, (fault.at_s, fault.ranks[0]), (8, 0), **label)
        words.append(f"{fault.kind} of host {fault.host} at {format_seconds(fault.at_s)}")
    axes.set_xlabel("time since the first step (s)")
    label_lanes(axes, [*(f"rank {rank}" for rank in ranks), "counted", "by the formula"])
    # What is down begins with the fault's name, and the longest wait has its own.
    add_legend(figure, [entry for entry in entries if entry.get_label() not in ("down", "wait")])
    counted_words = f"{run.goodput:.0%} of {format_number(run.duration_s)} s counted, by the "
    counted_words += f"formula {model_goodput:.0%}"
    ratios = []
    if model_goodput:
        ratios.append(run.goodput / model_goodput)
    return CaptionedFigure(
        figure,
        alt=f"Lanes of {len(ranks)} ranks with {'; '.join(words) or 'no fault'}. {counted_words}.",
        caption=joined(f"{counted_words}.", ratio_words(ratios, "hatched")),
    )
