"""A ledger of memory: what the formula says beside what was held, by kind."""

from collections.abc import Mapping

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


@drawn
def memory_ledger(
    models: Mapping[str, Ledger], held: Mapping[str, Ledger] | None = None, *, title: str = ""
) -> CaptionedFigure:
    """Draw what a rank holds as stacked bars: the formula hatched, and beside it what was counted.

    Args:
        models: ``{group: {kind: bytes}}``, such as ``costs.memory.sharded_memory``.
        held: the same of a run, by the same groups; None if nothing has run.
    """
    held, bars = held or {}, []
    for place, (group, ledger) in enumerate(models.items()):
        sides = [(0.0, ledger, True)] + ([(0.36, held[group], False)] if group in held else [])
        bars += [(place + shift, group, one, is_model) for shift, one, is_model in sides]
    largest = max(sum(one.values()) for _, _, one, _ in bars)
    scale, unit = byte_unit(largest)
    figure, axes = new_axes(3.8, title)
    for x, _, ledger, is_model in bars:
        bottom = 0.0
        for kind, style in LEDGER.items():
            if not (size := ledger.get(kind, 0) / scale):
                continue
            axes.bar(x, size, 0.34, bottom, **(style.model if is_model else style).fill)
            bottom += size
        label = f"{'model ' * is_model}{format_bytes(bottom * scale)}"
        axes.annotate(label, (x, bottom), (0, 3), textcoords="offset points", ha="center", size=8)
    axes.set_xticks([place + 0.18 * (g in held) for place, g in enumerate(models)], [*models])
    axes.set(ylabel=f"held by one rank ({unit})", xlim=(-0.5, len(models) - 0.1))
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    kinds = [kind for kind in LEDGER if any(one.get(kind) for _, _, one, _ in bars)]
    names = {kind: kind.replace("_", " ") for kind in kinds}
    add_legend(figure, [swatch(names[k], LEDGER[k], model=not held) for k in kinds])

    def words(ledger: Ledger) -> str:
        return ", ".join(f"{names[k]} {format_bytes(ledger[k])}" for k in kinds if ledger.get(k))

    parts = [f"{g}, {'model' if m else 'held'}: {words(one)}" for _, g, one, m in bars]
    ratios = [sum(held[g].values()) / sum(models[g].values()) for g in models if g in held]
    totals = [f"{group} {format_bytes(sum(one.values()))}" for group, one in models.items()]
    caption = joined(f"By the formula {', '.join(totals)}.", ratio_words(ratios, "hatched"))
    return CaptionedFigure(figure, alt=f"Stacked bars. {'; '.join(parts)}.", caption=caption)
