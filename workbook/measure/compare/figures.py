"""The figure of a record: a pure function from the recorded dict to a captioned figure."""

import statistics
from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.units import format_count, format_seconds
from workbook.measure.compare.summary import Record, present, reached
from workbook.measure.record import Spread
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn, joined
from workbook.plots.palette import DARK, SERIES, swatch

LOOKS = {"labkit": SERIES[0][0], "PyTorch": SERIES[1][0]}
_REPEATS = "Bars are medians of the repeats, whiskers their quartiles."


def time_to_accuracy(record: Record) -> CaptionedFigure:
    """Epochs and seconds of training to the target accuracy on held-out samples."""
    target = record["config"]["target"]
    main = record["settings"][0]
    never = []
    epochs: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    median_s = {}
    for name in present(record):
        pairs = reached(record, name)
        if pairs is None:
            never.append(name)
            continue
        epochs[name] = [pair[0] for pair in pairs]
        seconds[name] = [pair[1] for pair in pairs]
        median_s[name] = statistics.median(seconds[name])
    order = sorted(median_s, key=median_s.__getitem__)
    sentences = []
    for position, name in zip(("First", "Last"), order[:1] + order[-1:]):
        after_s = format_seconds(median_s[name])
        sentences.append(f"{position} at {target:.0%}: {name}, after {after_s}.")
    if never:
        within = f"within {main['epochs']} epochs"
        sentences.append(f"Not reached in every repeat {within}: {', '.join(never)}.")
    columns = {"epochs": epochs, "training time (s)": seconds}
    if len(set(map(tuple, epochs.values()))) == 1:
        # Bars of one length say nothing.
        del columns["epochs"]
        sentences.append("In every repeat they needed equally many epochs.")
    sentences.append("The first epoch counts, too.")
    setting = f"{format_count(main['world_size'], 'rank')}, batches of {main['batch_size']}"
    title = f"To {target:.0%} held-out accuracy: {setting}"
    missing = f"not in {main['epochs']} epochs"
    return _draw_rows(record, columns, missing, title, " ".join(sentences))


@drawn
def _draw_rows(
    record: Record,
    columns: Mapping[str, Mapping[str, list[float]]],
    missing: str,
    title: str,
    caption: str,
) -> CaptionedFigure:
    """Horizontal bars: a row per contender, and axes per quantity ``{contender: repeats}``."""
    contenders = present(record)
    figure = Figure(figsize=(WIDTH_IN, 1.5 + 0.34 * len(contenders)))
    grid = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    beside = {"textcoords": "offset points", "va": "center", "ha": "left"}
    for axes, (quantity, repeats_by_name) in zip(grid, columns.items()):
        longest = 0.0
        for row, (name, contender) in enumerate(contenders.items()):
            repeats = repeats_by_name.get(name)
            if not repeats:
                axes.annotate(missing, (0, row), (5, 0), **beside)
                continue
            look = LOOKS["PyTorch" if contender["builtin"] else "labkit"]
            spread = Spread.of(repeats)
            axes.barh(row, spread.median, 0.72, **look.fill)
            whiskers = [[spread.median - spread.low], [spread.high - spread.median]]
            axes.errorbar(spread.median, row, xerr=whiskers, color=DARK, capsize=3)
            axes.annotate(f"{spread.median:.3g}", (spread.high, row), (5, 0), **beside)
            longest = max(longest, spread.high)
        # Room for the number beside the longest bar.
        axes.set(xlabel=quantity, xlim=(0, 1.3 * longest or 1))
        # The last tick's number would be cut at the edge of the figure.
        axes.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))
        axes.grid(axis="x")
    grid[0].set_yticks(range(len(contenders)), list(contenders))
    grid[0].set_ylim(len(contenders) - 0.5, -0.5)
    add_title(figure, title)
    add_legend(figure, [swatch(name, look) for name, look in LOOKS.items()])
    alt = joined(f"{title}.", caption)
    return CaptionedFigure(figure, alt=alt, caption=f"{caption} {_REPEATS}")
