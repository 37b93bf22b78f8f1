"""A ledger of memory: what the formula says beside what was held, by kind."""

from collections.abc import Iterable, Mapping
from typing import Any

from labkit.units import byte_unit, format_bytes, format_number
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, joined, new_axes, ratio_words
from workbook.plots.palette import BLUE, DARK, GREEN, ORANGE, PURPLE, VERMILION, Style, swatch

LEDGER = {
    "parameters": Style(BLUE),
    "gradients": Style(ORANGE, "--", DARK),
    "optimizer": Style(PURPLE, "xx"),
    "in_flight": Style(VERMILION, ".."),
    "activations": Style(GREEN, "\\\\"),
}
# Of a text: its distance from where it belongs.
_IN_POINTS: dict[str, Any] = {"textcoords": "offset points"}
# By kind, bytes.
Ledger = Mapping[str, float]


@drawn
def memory_ledger(
    models: Mapping[str, Ledger],
    held: Mapping[str, Ledger] | None = None,
    *,
    limit_bytes: float | None = None,
    title: str = "",
) -> CaptionedFigure:
    """Draw what a rank holds as stacked bars: the formula hatched, and beside it what was counted.

    Args:
        models: ``{group: {kind: bytes}}``, such as ``costs.memory.sharded_memory``.
        held: the same of a run, by the same groups; None if nothing has run.
        limit_bytes: the memory of a device, drawn as a line; the figure then counts in GB.
    """

    def shown(num_bytes: float) -> str:
        if limit_bytes is None:
            return format_bytes(num_bytes)
        return f"{format_number(num_bytes / 1e9)} GB"

    held = held or {}
    bars: list[tuple[float, str, str, Ledger]] = []  # x, source, group, ledger
    ticks: list[float] = []
    ratios = []
    totals = []
    for number, (group, ledger) in enumerate(models.items()):
        bars.append((number, "predicted", group, ledger))
        ticks.append(number)
        model_bytes = sum(ledger.values())
        totals.append(f"{group} ({shown(model_bytes)})")
        if group in held:
            bars.append((number + 0.36, "held", group, held[group]))
            ticks[-1] = number + 0.18
            ratios.append(sum(held[group].values()) / model_bytes)
    largest = max(sum(ledger.values()) for *_, ledger in bars)
    scale, unit = byte_unit(largest)
    figure, axes = new_axes(3.8, title)
    if limit_bytes is not None:
        scale, unit = 1e9, "GB"
        axes.axhline(limit_bytes / scale, color=DARK, linestyle="--")
        end = (len(models) - 0.1, limit_bytes / scale)
        axes.annotate(f"{shown(limit_bytes)}: a GPU", end, (0, 3), ha="right", **_IN_POINTS)
    parts = []
    for x, source, group, ledger in bars:
        height = _stack(axes, x, ledger, scale, is_model=source == "predicted")
        amounts = [f"{_name(kind)} {shown(ledger[kind])}" for kind in _kinds_of([ledger])]
        parts.append(f"{group}, {source}: {', '.join(amounts)}")
        label = shown(height * scale)
        if held and source == "predicted":
            label = f"{source} {label}"
        axes.annotate(label, (x, height), (0, 3), ha="center", size=8, **_IN_POINTS)
    axes.set_xticks(ticks, list(models))
    axes.set(ylabel=f"held by one rank ({unit})", xlim=(-0.5, len(models) - 0.1))
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    kinds = _kinds_of([ledger for *_, ledger in bars])
    add_legend(figure, [swatch(_name(kind), LEDGER[kind], not held) for kind in kinds])
    caption = joined(f"Predicted per rank: {'; '.join(totals)}.", ratio_words(ratios, "hatched"))
    return CaptionedFigure(figure, alt=f"Stacked bars. {'; '.join(parts)}.", caption=caption)


def _name(kind: str) -> str:
    return kind.replace("_", " ")


def _kinds_of(ledgers: Iterable[Ledger]) -> list[str]:
    """The kinds that one of the ledgers has bytes of, in the order of ``LEDGER``."""
    kinds: set[str] = set()
    for ledger in ledgers:
        kinds.update(kind for kind in ledger if ledger[kind])
    return [kind for kind in LEDGER if kind in kinds]


def _stack(axes: Any, x: float, ledger: Ledger, scale: float, is_model: bool) -> float:
    """Draw a ledger as a bar at ``x``, kind upon kind; returns its height."""
    height = 0.0
    for kind in _kinds_of([ledger]):
        look = LEDGER[kind]
        if is_model:
            look = look.model
        axes.bar(x, ledger[kind] / scale, 0.34, height, **look.fill)
        height += ledger[kind] / scale
    return height
