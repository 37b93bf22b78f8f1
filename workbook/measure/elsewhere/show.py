"""The tables and the figure of the one run, made from its record or from a stored one."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.units import format_number, format_seconds
from workbook.measure.elsewhere.environments import REPOSITORY
from workbook.measure.spread import Spread, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from workbook.plots.figure import CaptionedFigure

Row = Mapping[str, Any]
RECORD = REPOSITORY / "data" / "results" / "elsewhere.json"
_FRAMEWORKS = ("labkit", "PyTorch", "Horovod", "TensorFlow")
_KIB, _MS = 2**10, 1e-3
_MARK: dict[str, Any] = {"color": "#1A1A1A", "marker": "|", "markersize": 12, "mew": 2}


def recorded(path: Path = RECORD) -> dict[str, Any]:
    """The stored record, with its hardware, versions and command.

    Raises:
        ValueError: there is none; ``make elsewhere`` makes it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no record in {path}: make elsewhere makes it") from None


def side_by_side(live: Row, stored: Row | None = None) -> dict[str, Any]:
    """A record in which contenders that have not run here are taken from the stored one, marked.

    Args:
        live: what ``run_elsewhere`` returned: some contenders, or some that cannot run here.
        stored: by default ``recorded()``.
    """
    old = {row["contender"]: row for row in (stored or recorded())["contenders"]}
    old = {name: row | {"recorded": True} for name, row in old.items() if "losses" in row}
    rows = []
    for row in live["contenders"]:
        found = old.pop(row["contender"], None)
        rows.append(found if row["absent"] and found else row)
    return {**live, "contenders": [*rows, *old.values()]}


def elsewhere_table(record: Row) -> Table:
    """One row per contender that has trained; below, why others have not, and the versions.

    The largest difference is that of a loss from one device's; bytes are per process and step.

    Args:
        record: of ``make elsewhere``, ``run_elsewhere`` or ``side_by_side``.
    """
    cells, users = [], dict[str, list[str]]()
    notes = [f"{r['contender']}: {r['problem']}." for r in record["contenders"] if r["problem"]]
    for row in _trained(record):
        roles = _by_role(row["sent_bytes"])
        counts = [f"{len(each)} {role}{'s' * (len(each) > 1)}" for role, each in roles.items()]
        bytes_of = [_bytes_words(row[f"{who}_bytes"]) for who in ("sent", "counted", "formula")]
        step = Spread(**row["step_s"]).text(format_seconds)
        head = (_name(row), ", ".join(counts), row["messages"], _difference_words(row))
        cells.append((*head, *bytes_of, step))
        if versions := row.get("versions"):
            told = ", ".join(f"{name} {version}" for name, version in versions.items())
            users.setdefault(told, []).append(_name(row))
    notes += [f"{told}: {', '.join(names)}." for told, names in users.items()]
    heads = ("contender", "processes", "messages", "largest difference")
    heads += ("sent per step: the kernel", "labkit", "formula", "step")
    return Table(heads, tuple(cells), tuple(notes))


def elsewhere_figure(record: Row) -> "CaptionedFigure":
    """Losses by step above; below, bytes that a worker sends per step, and a step's seconds.

    Raises:
        ValueError: no contender has trained.
    """
    # Here, since the ranks that import this package do not need matplotlib.
    from workbook.plots.figure import CaptionedFigure, drawn

    if not (rows := _trained(record)):
        raise ValueError("no contender has trained: there is nothing to draw")
    told = "; ".join(
        f"{_name(row)}: {_of_worker(row['sent_bytes']):,.0f} bytes, "
        f"{format_seconds(row['step_s']['median'])}"
        for row in rows
    )
    alt = f"Above, the losses of {len(rows)} contenders by step, from {rows[0]['losses'][0]:.2f} "
    alt += (
        f"to {rows[0]['losses'][-1]:.2f}. Below, what a worker sends over TCP per step, and the "
    )
    alt += f"median step. {told}."
    if apart := [row for row in rows if not row["agrees"]]:
        told = "; ".join(f"{_name(row)} by {_difference_words(row)}" for row in apart)
        caption = f"Not all lines lie on each other: from one device differs {told}."
    else:
        worst = max(rows, key=lambda row: row["difference"])
        caption = f"All {len(rows)} lines lie on each other: no loss differs from one device's by "
        caption += f"more than {worst['difference']:.1e} ({worst['contender']}). Bytes are the "
        caption += "kernel's count."
    return CaptionedFigure(drawn(_draw)(rows), alt=alt, caption=caption)


def _trained(record: Row) -> list[Row]:
    return [row for row in record["contenders"] if "losses" in row]


def _name(row: Row) -> str:
    return f"{row['contender']} (recorded)" if row.get("recorded") else row["contender"]


def _by_role(sent_bytes: Mapping[str, float]) -> dict[str, list[float]]:
    """Bytes by the role of a process: ``worker 0`` and ``worker 1`` are workers."""
    roles: dict[str, list[float]] = {}
    for name, num_bytes in sent_bytes.items():
        roles.setdefault(name.rstrip("0123456789 "), []).append(num_bytes)
    return roles


def _difference_words(row: Row) -> str:
    """How far the losses are from one device's, and whether that is more than allowed."""
    difference = row["difference"]
    if difference is None:
        return "not a number"
    if not row["agrees"]:
        return f"{difference:.1e}: wrong, more than {row['tolerance']:.0e}"
    return f"{difference:.1e}" if difference else "0"


def _bytes_words(sent_bytes: Mapping[str, float]) -> str:
    """Of each role the mean; of workers alone without saying so."""
    means = {role: sum(each) / len(each) for role, each in _by_role(sent_bytes).items()}
    if list(means) == ["worker"]:
        return f"{means['worker']:,.0f} B"
    return ", ".join(f"{role} {means[role]:,.0f} B" for role in sorted(means, reverse=True))


def _of_worker(sent_bytes: Mapping[str, float]) -> float:
    """The mean of the workers; of all processes, where none is called a worker."""
    roles = _by_role(sent_bytes)
    each = roles.get("worker") or list(itertools.chain(*roles.values()))
    return sum(each) / len(each)


def _draw(rows: Sequence[Row]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    from workbook.plots.figure import WIDTH_IN, add_legend, add_title
    from workbook.plots.palette import SERIES, swatch

    looks = dict(zip(_FRAMEWORKS, SERIES, strict=False))
    figure = Figure(figsize=(WIDTH_IN, 4.4 + 0.27 * len(rows)))
    parts: Any = figure.subfigures(2, 1, height_ratios=[2.5, 1.2 + 0.27 * len(rows)])
    above, (left, right) = parts[0].subplots(), parts[1].subplots(1, 2, sharey=True)
    for place, row in enumerate(rows):
        style, marker, line = looks[row["framework"]]
        # The markers take turns, so that lines that coincide can be seen.
        first = place % max(1, min(len(rows), len(row["losses"])))
        marked = {"marker": marker, "markersize": 5, "markevery": (first, len(rows))}
        above.plot(row["losses"], color=style.color, linestyle=line, linewidth=1.2, **marked)
        kib, formula = _of_worker(row["sent_bytes"]) / _KIB, row["formula_bytes"].get("worker", 0)
        left.barh(place, kib, 0.72, **style.fill)
        if formula:
            left.plot(formula / _KIB, place, linestyle="", **_MARK)
        silent = "in memory" if row["messages"] == "shared memory" else "one process"
        text = format_number(kib) if kib >= 1 else f"0: {silent}"
        _beside(left, max(kib, formula / _KIB if kib >= 1 else 0), place, text)
        spread = Spread(**row["step_s"])
        middle, low, high = (s / _MS for s in (spread.median, spread.low, spread.high))
        right.barh(place, middle, 0.72, **style.fill)
        whiskers = [[middle - low], [high - middle]]
        right.errorbar(middle, place, xerr=whiskers, color="#1A1A1A", capsize=3, linewidth=1.2)
        _beside(right, high, place, format_number(middle))
    above.set(xlabel="step", ylabel="loss", ylim=(0, None))
    above.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.grid()
    labels = ("sent per worker and step (KiB)", "step (ms): median, quartiles")
    for axes, label in zip((left, right), labels):
        axes.set(xlabel=label, xlim=(0, 1.25 * max(axes.dataLim.x1, 1e-9)))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    left.set_yticks(range(len(rows)), list(map(_name, rows)))
    left.set_ylim(len(rows) - 0.5, -0.5)
    add_title(figure, "The same training, by each framework")
    present = [name for name in _FRAMEWORKS if name in {row["framework"] for row in rows}]
    formula_mark = Line2D([], [], label="by the formula", linestyle="", **_MARK)
    add_legend(figure, [*(swatch(name, looks[name][0]) for name in present), formula_mark])
    return figure


def _beside(axes: "Axes", x: float, place: int, text: str) -> None:
    axes.annotate(text, (x, place), (6, 0), textcoords="offset points", va="center", ha="left")
