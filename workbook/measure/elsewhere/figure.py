"""The figure of the one run: losses that lie on each other, bytes and seconds."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.units import format_number, format_seconds
from workbook.measure.elsewhere.table import by_role, difference_words, name_of
from workbook.measure.spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from workbook.plots.figure import CaptionedFigure

Row = Mapping[str, Any]
_FRAMEWORKS = ("labkit", "PyTorch", "Horovod", "TensorFlow")
_KIB, _MS = 2**10, 1e-3


def elsewhere_figure(record: Mapping[str, Any]) -> "CaptionedFigure":
    """Losses by step above; below, bytes that a worker sends per step, and a step's seconds.

    Args:
        record: as for ``elsewhere_table``.

    Raises:
        ValueError: no contender has trained.
    """
    # Here, since the ranks that import this package do not need matplotlib.
    from workbook.plots.figure import CaptionedFigure, drawn

    rows = [row for row in record["contenders"] if "losses" in row]
    if not rows:
        raise ValueError("no contender has trained: there is nothing to draw")
    return CaptionedFigure(drawn(_draw)(rows), alt=_alt(rows), caption=_caption(rows))


def _draw(rows: Sequence[Row]) -> "Figure":
    from matplotlib.figure import Figure

    from workbook.plots.figure import WIDTH_IN, add_legend, add_title
    from workbook.plots.palette import swatch

    figure = Figure(figsize=(WIDTH_IN, 4.4 + 0.27 * len(rows)))
    heights = [2.5, 1.2 + 0.27 * len(rows)]
    parts: Any = figure.subfigures(2, 1, height_ratios=heights)
    upper, lower = parts
    _draw_losses(upper.subplots(), rows)
    left, right = lower.subplots(1, 2, sharey=True)
    _draw_bytes(left, rows)
    _draw_seconds(right, rows)
    left.set_yticks(range(len(rows)), list(map(name_of, rows)))
    left.set_ylim(len(rows) - 0.5, -0.5)
    add_title(figure, "The same training, by each framework")
    present = [name for name in _FRAMEWORKS if name in {row["framework"] for row in rows}]
    handles: list[Any] = [swatch(name, _looks()[name][0]) for name in present]
    add_legend(figure, [*handles, _formula_mark()])
    return figure


def _looks() -> dict[str, Any]:
    from workbook.plots.palette import SERIES

    return dict(zip(_FRAMEWORKS, SERIES, strict=False))


def _formula_mark() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label="by the formula", linestyle="", **_MARK)


_MARK: dict[str, Any] = {"color": "#1A1A1A", "marker": "|", "markersize": 12, "mew": 2}


def _draw_losses(axes: "Axes", rows: Sequence[Row]) -> None:
    """One line each; the markers take turns, so that lines that coincide can be seen."""
    from matplotlib.ticker import MaxNLocator

    looks, every = _looks(), len(rows)
    for number, row in enumerate(rows):
        style, marker, line = looks[row["framework"]]
        first = number % max(1, min(every, len(row["losses"])))
        marked = {"marker": marker, "markersize": 5, "markevery": (first, every)}
        axes.plot(row["losses"], color=style.color, linestyle=line, linewidth=1.2, **marked)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()


def _draw_bytes(axes: "Axes", rows: Sequence[Row]) -> None:
    looks = _looks()
    for place, row in enumerate(rows):
        kib = _of_worker(row["sent_bytes"]) / _KIB
        axes.barh(place, kib, 0.72, **looks[row["framework"]][0].fill)
        if row["formula_bytes"]:
            axes.plot(row["formula_bytes"]["worker"] / _KIB, place, linestyle="", **_MARK)
        text = format_number(kib) if kib >= 1 else f"0: {_silent_words(row)}"
        _beside(axes, max(kib, _formula_kib(row) if kib >= 1 else 0), place, text)
    axes.set_xlabel("sent per worker and step (KiB)")
    _make_room(axes)


def _draw_seconds(axes: "Axes", rows: Sequence[Row]) -> None:
    looks = _looks()
    for place, row in enumerate(rows):
        spread = Spread(**row["step_s"])
        middle, low, high = (s / _MS for s in (spread.median, spread.low, spread.high))
        axes.barh(place, middle, 0.72, **looks[row["framework"]][0].fill)
        whiskers = [[middle - low], [high - middle]]
        axes.errorbar(middle, place, xerr=whiskers, color="#1A1A1A", capsize=3, linewidth=1.2)
        _beside(axes, high, place, format_number(middle))
    axes.set_xlabel("step (ms): median, quartiles")
    _make_room(axes)


def _beside(axes: "Axes", x: float, place: int, text: str) -> None:
    axes.annotate(text, (x, place), (6, 0), textcoords="offset points", va="center", ha="left")


def _make_room(axes: "Axes") -> None:
    axes.set_xlim(0, 1.25 * max(axes.dataLim.x1, 1e-9))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _of_worker(sent_bytes: Mapping[str, float]) -> float:
    """The mean of the workers; of all processes, where none is called a worker."""
    roles = by_role(sent_bytes)
    each = roles.get("worker") or list(itertools.chain(*roles.values()))
    return sum(each) / len(each)


def _formula_kib(row: Row) -> float:
    return row["formula_bytes"].get("worker", 0) / _KIB


def _silent_words(row: Row) -> str:
    return "in memory" if row["messages"] == "shared memory" else "one process"


def _alt(rows: Sequence[Row]) -> str:
    told = [
        f"{name_of(row)}: {_of_worker(row['sent_bytes']):,.0f} bytes, "
        f"{format_seconds(row['step_s']['median'])}"
        for row in rows
    ]
    return (
        f"Above, the losses of {len(rows)} contenders by step, from {rows[0]['losses'][0]:.2f} to "
        f"{rows[0]['losses'][-1]:.2f}. Below, what a worker sends over TCP per step, and the "
        f"median step. {'; '.join(told)}."
    )


def _caption(rows: Sequence[Row]) -> str:
    apart = [row for row in rows if not row["agrees"]]
    if apart:
        told = "; ".join(f"{name_of(row)} by {difference_words(row)}" for row in apart)
        return f"Not all lines lie on each other: from one device differs {told}."
    worst = max(rows, key=lambda row: row["difference"])
    return (
        f"All {len(rows)} lines lie on each other: no loss differs from one device's by more than "
        f"{worst['difference']:.1e} ({worst['contender']}). Bytes are the kernel's count."
    )
