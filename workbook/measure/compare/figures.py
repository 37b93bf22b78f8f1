"""The figures of a record: pure functions from the recorded dict to a captioned figure."""

import statistics
from collections.abc import Mapping

from matplotlib.figure import Figure

from labkit.units import format_count, format_seconds
from workbook.measure.compare import summary
from workbook.measure.compare.summary import Record, present, series
from workbook.measure.record import Spread
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn
from workbook.plots.palette import DARK, SERIES, swatch

LOOKS = {whose: style for whose, (style, *_) in zip(("labkit", "PyTorch"), SERIES)}
_REPEATS = "Bars are medians of the repeats, whiskers their quartiles."


def draw(record: Record) -> dict[str, CaptionedFigure]:
    """The figures for which the record has runs, by name."""
    if not present(record):
        return {}
    figures = {"time_to_accuracy": time_to_accuracy(record)}
    if len({setting["train_size"] for setting in record["settings"]}) > 1:
        figures["train_size"] = epoch_time(record)
    return figures


def epoch_time(record: Record) -> CaptionedFigure:
    """Epoch time by the number of training samples."""
    points = {name: series(record, name) for name in present(record)}
    sizes = sorted({size for by_size in points.values() for size in by_size})
    columns = {
        f"{size:,}: epoch (s)": {name: by_size.get(size) for name, by_size in points.items()}
        for size in sizes
    }
    parts = []
    for name, by_size in points.items():
        words = [f"{format_seconds(statistics.median(s))} at {n:,}" for n, s in by_size.items()]
        parts.append(f"{name} {', '.join(words)}")
    title = "Epoch time by training samples"
    return _draw_rows(record, columns, "-", title, f"{'; '.join(parts)}.")


def time_to_accuracy(record: Record) -> CaptionedFigure:
    """Epochs and seconds of training to the target accuracy on held-out samples."""
    target, main = record["config"]["target"], record["settings"][0]
    budget = main["epochs"]
    where = f"{format_count(main['world_size'], 'rank')}, batches of {main['batch_size']}"
    found = {name: summary.reached(record, name) for name in present(record)}
    columns = {
        what: {name: [pair[at] for pair in pairs] for name, pairs in found.items() if pairs}
        for at, what in enumerate(("epochs", "training time (s)"))
    }
    seconds = {name: statistics.median(s) for name, s in columns["training time (s)"].items()}
    order = sorted(seconds, key=seconds.__getitem__)
    told = [
        f"{which} at {target:.0%}: {name}, after {format_seconds(seconds[name])}."
        for which, name in zip(("First", "Last"), order[:1] + order[-1:])
    ]
    if never := [name for name, pairs in found.items() if pairs is None]:
        told.append(f"Not reached in every repeat within {budget} epochs: {', '.join(never)}.")
    if len({tuple(epochs) for epochs in columns["epochs"].values()}) == 1:
        # Bars of one length say nothing.
        del columns["epochs"]
        told.append("In every repeat they needed equally many epochs.")
    told.append("The first epoch counts, too.")
    title = f"To {target:.0%} held-out accuracy: {where}"
    return _draw_rows(record, columns, f"not in {budget} epochs", title, " ".join(told))


@drawn
def _draw_rows(
    record: Record,
    columns: Mapping[str, Mapping[str, list[float] | None]],
    missing: str,
    title: str,
    told: str,
) -> CaptionedFigure:
    """Horizontal bars: a row per contender, and axes per quantity ``{contender: repeats}``."""
    looks = {n: "PyTorch" if one["builtin"] else "labkit" for n, one in present(record).items()}
    figure = Figure(figsize=(WIDTH_IN, 1.5 + 0.34 * len(looks)))
    grid = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    beside = {"textcoords": "offset points", "va": "center", "ha": "left"}
    for axes, (quantity, rows) in zip(grid, columns.items()):
        most = 0.0
        for place, (name, look) in enumerate(looks.items()):
            if not (repeats := rows.get(name)):
                axes.annotate(missing, (0, place), (5, 0), **beside)
                continue
            spread = Spread.of(repeats)
            axes.barh(place, spread.median, 0.72, **LOOKS[look].fill)
            whiskers = [[spread.median - spread.low], [spread.high - spread.median]]
            axes.errorbar(spread.median, place, xerr=whiskers, color=DARK, capsize=3)
            axes.annotate(f"{spread.median:.3g}", (spread.high, place), (5, 0), **beside)
            most = max(most, spread.high)
        # Room for the number beside the longest bar.
        axes.set(xlabel=quantity, xlim=(0, 1.3 * most or 1))
        axes.grid(axis="x")
    grid[0].set_yticks(range(len(looks)), list(looks))
    grid[0].set_ylim(len(looks) - 0.5, -0.5)
    add_title(figure, title)
    add_legend(figure, [swatch(whose, look) for whose, look in LOOKS.items()])
    return CaptionedFigure(figure, alt=f"{title}. {told}", caption=f"{told} {_REPEATS}")
