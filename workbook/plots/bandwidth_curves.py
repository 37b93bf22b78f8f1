"""Curves of bus bandwidth over the size of a tensor, below the curves of time."""

import itertools
import statistics
from collections.abc import Iterable, Mapping

from matplotlib.ticker import FuncFormatter, NullFormatter

from labkit.units import as_repeats, format_bytes, format_number
from workbook.plots.figure import CaptionedFigure, drawn
from workbook.plots.palette import DARK, SERIES

_HEIGHT_IN = 3.2


@drawn
def with_bandwidth(
    times: CaptionedFigure,
    measured: Mapping[str, Mapping[int, float | Iterable[float]]],
    world_size: int,
    limit_bytes_per_s: float,
) -> CaptionedFigure:
    """Add a panel to a figure of ``size_curves``: the bus bandwidth of its all-reduces.

    The bus bandwidth is 2 (P - 1) / P x S / t, with the median t: what each link of a ring
    carries, as nccl-tests define it.

    Args:
        times: the curves of time of the same names, whose legend is shared.
        measured: ``{name: {size in bytes: seconds, or the list of their repeats}}``.
        world_size: P, 2 or more.
        limit_bytes_per_s: the bus bandwidth that memory or links allow, drawn as a line.
    """
    assert world_size > 1
    speeds = {name: _speeds(points, world_size) for name, points in measured.items()}
    figure, (above,) = times.figure, times.figure.axes
    height_in = figure.get_figheight()
    grid = figure.add_gridspec(2, 1, height_ratios=[height_in, _HEIGHT_IN])
    figure.set_figheight(height_in + _HEIGHT_IN)
    above.set_subplotspec(grid[0])
    axes = figure.add_subplot(grid[1], sharex=above)
    for by_size, (style, marker, _) in zip(speeds.values(), itertools.cycle(SERIES)):
        gigabytes = [speed / 1e9 for speed in by_size.values()]
        axes.plot(list(by_size), gigabytes, color=style.color, marker=marker, linewidth=1.6)
    limit = limit_bytes_per_s / 1e9
    axes.axhline(limit, color=DARK, linestyle=(0, (1, 2)), linewidth=1.4)
    told = f"limit: {format_number(limit)} GB/s"
    axes.annotate(told, (0.01, limit), (0, 3), ("axes fraction", "data"), "offset points")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=above.get_xlabel(), ylabel="bus bandwidth (GB/s, log)")
    above.set_xlabel("")
    axes.grid()
    alt = f"{times.alt} {_alt(speeds)}"
    caption = f"{times.caption} {_caption(speeds, limit_bytes_per_s)}"
    return CaptionedFigure(figure, alt=alt, caption=caption)


def _speeds(points: Mapping[int, float | Iterable[float]], world_size: int) -> dict[int, float]:
    carried = 2 * (world_size - 1) / world_size
    return {
        size: carried * size / statistics.median(as_repeats(points[size]))
        for size in sorted(points)
    }


def _best(by_size: Mapping[int, float]) -> tuple[int, float]:
    return max(by_size.items(), key=lambda point: point[1])


def _caption(speeds: Mapping[str, Mapping[int, float]], limit_bytes_per_s: float) -> str:
    name = max(speeds, key=lambda one: _best(speeds[one])[1])
    size, speed = _best(speeds[name])
    return (
        f"The highest bus bandwidth, 2 (P - 1) / P x bytes / seconds, is that of {name}: "
        f"{format_number(speed / 1e9)} GB/s at {format_bytes(size)}, "
        f"{speed / limit_bytes_per_s:.0%} of the limit (dotted)."
    )


def _alt(speeds: Mapping[str, Mapping[int, float]]) -> str:
    best = {name: _best(by_size) for name, by_size in speeds.items()}
    told = "; ".join(
        f"{name} reaches {format_number(speed / 1e9)} GB/s at {format_bytes(size)}"
        for name, (size, speed) in best.items()
    )
    return f"Below, curves of bus bandwidth by size: {told}."
