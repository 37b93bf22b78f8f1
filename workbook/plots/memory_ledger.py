"""A ledger of memory: what the formula says beside what was held, by kind."""

from collections.abc import Mapping
from typing import NamedTuple

from labkit.units import byte_unit, format_bytes
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, joined, new_axes, ratio_words
from workbook.plots.palette import BLUE, DARK, GREEN, ORANGE, PURPLE, VERMILION, Style, swatch

LEDGER = {
    "parameters": Style(BLUE),
    "gradients": Style(ORANGE, "--", DARK),
    "optimizer": Style(PURPLE, "xx"),
    "in_flight": Style(VERMILION, ".."),
    "activations": Style(GREEN, "\\\\"),
}
# By kind, bytes.
Ledger = Mapping[str, float]


class _Bar(NamedTuple):
    """A stacked bar at ``x``: a group's ledger by the formula, or as it was held."""

    x: float
    group: str
    ledger: Ledger
    is_model: bool


@drawn
def memory_ledger(
    models: Mapping[str, Ledger], held: Mapping[str, Ledger] | None = None, *, title: str = ""
) -> CaptionedFigure:
    """Draw what a rank holds as stacked bars: the formula hatched, and beside it what was counted.

    Args:
        models: ``{group: {kind: bytes}}``, such as ``costs.memory.sharded_memory``.
        held: the same of a run, by the same groups; None if nothing has run.
    """
    held = held or {}
    bars = []
    ticks = []
    ratios = []
    totals = []
    for number, (group, ledger) in enumerate(models.items()):
        bars.append(_Bar(number, group, ledger, is_model=True))
        ticks.append(number)
        model_bytes = sum(ledger.values())
        totals.append(f"{group} {format_bytes(model_bytes)}")
        if group in held:
            bars.append(_Bar(number + 0.36, group, held[group], is_model=False))
            ticks[-1] = number + 0.18
            ratios.append(sum(held[group].values()) / model_bytes)
    largest = max(sum(bar.ledger.values()) for bar in bars)
    scale, unit = byte_unit(largest)
    figure, axes = new_axes(3.8, title)
    kinds = {}
    parts = []
    for bar in bars:
        bottom = 0.0
        amounts = []
        for kind, style in LEDGER.items():
            num_bytes = bar.ledger.get(kind, 0)
            if num_bytes:
                look = style.model if bar.is_model else style
                axes.bar(bar.x, num_bytes / scale, 0.34, bottom, **look.fill)
                bottom += num_bytes / scale
                kinds[kind] = kind.replace("_", " ")
                amounts.append(f"{kinds[kind]} {format_bytes(num_bytes)}")
        source = "model" if bar.is_model else "held"
        parts.append(f"{bar.group}, {source}: {', '.join(amounts)}")
        label = format_bytes(bottom * scale)
        if bar.is_model:
            label = f"model {label}"
        above = {"textcoords": "offset points", "ha": "center", "size": 8}
        axes.annotate(label, (bar.x, bottom), (0, 3), **above)
    axes.set_xticks(ticks, list(models))
    axes.set(ylabel=f"held by one rank ({unit})", xlim=(-0.5, len(models) - 0.1))
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    legend = [swatch(kinds[kind], LEDGER[kind], not held) for kind in LEDGER if kind in kinds]
    add_legend(figure, legend)
    caption = joined(f"By the formula {', '.join(totals)}.", ratio_words(ratios, "hatched"))
    return CaptionedFigure(figure, alt=f"Stacked bars. {'; '.join(parts)}.", caption=caption)
