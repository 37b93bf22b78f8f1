"""Seconds by kind, as stacked bars: one bar per rank, or per run."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from labkit.units import format_seconds, second_unit
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, label_lanes, new_axes
from workbook.plots.palette import Style, styles_of, swatch
from workbook.plots.timeline import Shares, communication_words, percent, percents, tag, trace_of


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
    rows = _phase_rows(result)
    totals = {name: sum(row.values()) for name, row in rows.items()}
    styles = styles_of(kind for row in rows.values() for kind, s in row.items() if s > 0)
    shares = {
        name: {kind: row.get(kind, 0) / totals[name] for kind in styles}
        for name, row in rows.items()
        if totals[name] > 0
    }
    title = title or ("Time by phase (model)" if model else "Time by phase")
    bars = "; ".join(
        f"{name} {format_seconds(totals[name])}, {percents(share)}"
        for name, share in shares.items()
    )
    return CaptionedFigure(
        _draw_phases(rows, styles, title, model),
        alt=f"{title}: {bars}.",
        caption=_phases_caption(shares, totals),
    )


def _phase_rows(result: Any) -> dict[str, dict[str, float]]:
    """``{bar: {kind: seconds}}``"""
    if not isinstance(result, Mapping):
        trace = trace_of(result)
        return {f"rank {rank}": trace.seconds_by_kind(rank) for rank in trace.ranks}
    by_name = any(isinstance(row, Mapping) for row in result.values())
    rows = {
        f"rank {name}" if isinstance(name, int) else str(name): dict(row)
        for name, row in (result if by_name else {"run": result}).items()
    }
    if not any(seconds > 0 for row in rows.values() for seconds in row.values()):
        raise ValueError(
            "no phase took any time, so there is nothing to draw: give what labkit.run returned, "
            'or seconds by kind such as {"compute": 0.8, "communicate": 0.2}'
        )
    return rows


def _draw_phases(
    rows: dict[str, dict[str, float]], styles: dict[str, Style], title: str, model: bool
) -> Figure:
    totals = {name: sum(row.values()) for name, row in rows.items()}
    scale, unit = second_unit(max(totals.values()) / 2)
    figure, axes = new_axes(1.5 + min(0.45 * len(rows), 9), title)
    longest = max(totals.values()) / scale
    for lane, (name, row) in enumerate(rows.items()):
        left = 0.0
        for kind, style in styles.items():
            width = row.get(kind, 0.0) / scale
            look = style.model if model else style
            axes.barh(lane, width, 0.72, left, label=kind, **look.fill)
            if width > 0.07 * longest:
                tag(axes, left + width / 2, lane, percent(row[kind] / totals[name]), pad=0.2)
            left += width
        axes.text(left, lane, f" {format_seconds(totals[name])}", va="center", ha="left")
    axes.set(xlim=(0, 1.12 * longest), xlabel=f"time ({unit})")
    label_lanes(axes, list(rows))
    add_legend(figure, [swatch(kind, style, model) for kind, style in styles.items()])
    return figure


def _phases_caption(shares: Shares, totals: dict[str, float]) -> str:
    text = communication_words(shares, totals)
    slow, fast = max(totals, key=totals.__getitem__), min(totals, key=totals.__getitem__)
    longest, shortest = format_seconds(totals[slow]), format_seconds(totals[fast])
    if longest != shortest:
        text += f" The longest bar is {slow} ({longest}), the shortest {fast} ({shortest})."
    return text
