"""The figure of a record: a pure function from the recorded dict to a captioned figure."""

import statistics

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.units import format_count, format_seconds
from workbook.measure.compare.summary import Record, present, reached
from workbook.measure.record import Spread
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn
from workbook.plots.palette import DARK, SERIES, swatch

LOOKS = {"labkit": SERIES[0][0], "PyTorch": SERIES[1][0]}


@drawn
def time_to_accuracy(record: Record) -> CaptionedFigure:
    """Epochs and seconds of training to the target accuracy on held-out samples.

    Horizontal bars, a row per contender; they are medians, with whiskers at the quartiles.
    """
    contenders = present(record)
    epochs: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for name in contenders:
        pairs = reached(record, name)
        if pairs is not None:
            epochs[name] = [pair[0] for pair in pairs]
            seconds[name] = [pair[1] for pair in pairs]
    columns = {"epochs": epochs, "training time (s)": seconds}
    equally_many = len(set(map(tuple, epochs.values()))) == 1
    if equally_many:
        # Bars of one length say nothing.
        del columns["epochs"]
    main = record["settings"][0]
    figure = Figure(figsize=(WIDTH_IN, 1.5 + 0.34 * len(contenders)))
    grid = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    beside = {"textcoords": "offset points", "va": "center", "ha": "left"}
    for axes, (quantity, repeats_by_name) in zip(grid, columns.items()):
        longest = 0.0
        for row, (name, contender) in enumerate(contenders.items()):
            if name not in repeats_by_name:
                axes.annotate(f"not in {main['epochs']} epochs", (0, row), (5, 0), **beside)
                continue
            look = LOOKS["PyTorch" if contender["builtin"] else "labkit"]
            spread = Spread.of(repeats_by_name[name])
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
    ranks = format_count(main["world_size"], "rank")
    goal = f"To {record['config']['target']:.0%} held-out accuracy"
    title = f"{goal}: {ranks}, batches of {main['batch_size']}"
    add_title(figure, title)
    add_legend(figure, [swatch(name, look) for name, look in LOOKS.items()])
    caption = _who_is_first(record, seconds)
    if equally_many:
        caption += " In every repeat they needed equally many epochs."
    caption += " The first epoch counts, too."
    bars = "Bars are medians of the repeats, whiskers their quartiles."
    return CaptionedFigure(figure, alt=f"{title}. {caption}", caption=f"{caption} {bars}")


def _who_is_first(record: Record, seconds: dict[str, list[float]]) -> str:
    median_s = {name: statistics.median(repeats) for name, repeats in seconds.items()}
    order = sorted(median_s, key=median_s.__getitem__)
    sentences = []
    for position, name in zip(("First", "Last"), order[:1] + order[-1:]):
        after_s = format_seconds(median_s[name])
        sentences.append(
            f"{position} at {record['config']['target']:.0%}: {name}, after {after_s}."
        )
    never = ", ".join(name for name in present(record) if name not in seconds)
    if never:
        num_epochs = record["settings"][0]["epochs"]
        sentences.append(f"Not reached in every repeat within {num_epochs} epochs: {never}.")
    return " ".join(sentences)
