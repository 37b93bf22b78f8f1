"""The table and the figure of the one run, made from its record or from a stored one."""

import json
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from labkit.units import format_seconds
from workbook.measure.elsewhere.environments import REPOSITORY
from workbook.measure.panels import draw_rows, label_rows
from workbook.measure.spread import Spread, Table
from workbook.plots.figure import WIDTH_IN, CaptionedFigure, add_legend, add_title, drawn
from workbook.plots.palette import DARK, SERIES, swatch

Row = Mapping[str, Any]
RECORD = REPOSITORY / "data" / "results" / "elsewhere.json"
LOOKS = dict(zip(("labkit", "PyTorch", "Horovod", "TensorFlow"), SERIES, strict=False))
_KIB = 2**10
_MARK: dict[str, Any] = {"color": DARK, "marker": "|", "markersize": 12, "mew": 2}


def side_by_side(live: Row) -> dict[str, Any]:
    """A record in which contenders that have not run here are taken from the stored one, marked.

    ``live`` is what ``run_elsewhere`` returned: some contenders, or some that cannot run here.
    """
    stored = json.loads(RECORD.read_text(encoding="utf-8"))["contenders"]
    old = {row["contender"]: row | {"recorded": True} for row in stored if "losses" in row}
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
    for row in _trained(record):
        wrong = "" if row["agrees"] else f": wrong, more than {row['tolerance']:.0e}"
        apart = "not a number" if row["difference"] is None else f"{row['difference']:.1e}{wrong}"
        bytes_of = []
        for who in ("sent", "counted", "formula"):
            means = _by_role(row[f"{who}_bytes"])
            bytes_of.append(", ".join(f"{role} {mean:,.0f} B" for role, mean in means.items()))
        step = Spread(**row["step_s"]).text(format_seconds)
        processes = ", ".join(row["sent_bytes"])
        cells.append((_name(row), processes, row["messages"], apart, *bytes_of, step))
        told = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        users.setdefault(told, []).append(_name(row))
    notes = [f"{r['contender']}: {r['problem']}." for r in record["contenders"] if r["problem"]]
    notes += [f"{told}: {', '.join(names)}." for told, names in users.items()]
    heads = ("contender", "processes", "messages", "largest difference")
    heads += ("sent per step: the kernel", "labkit", "formula", "step")
    return Table(heads, tuple(cells), tuple(notes))


@drawn
def elsewhere_figure(record: Row) -> CaptionedFigure:
    """Losses by step above; below, bytes that a worker sends per step, and a step's seconds.

    Raises:
        ValueError: no contender has trained.
    """
    if not (rows := _trained(record)):
        raise ValueError("no contender has trained: there is nothing to draw")
    sent = {_name(row): _by_role(row["sent_bytes"])["worker"] for row in rows}
    figure = Figure(figsize=(WIDTH_IN, 4.4 + 0.27 * len(rows)))
    parts: Any = figure.subfigures(2, 1, height_ratios=[2.5, 1.2 + 0.27 * len(rows)])
    above, (left, right) = parts[0].subplots(), parts[1].subplots(1, 2, sharey=True)
    looks = [LOOKS[row["framework"]] for row in rows]
    for place, (row, (style, marker, line)) in enumerate(zip(rows, looks)):
        # The markers take turns, so that lines that coincide can be seen.
        first = place % min(len(rows), len(row["losses"]))
        marked = {"marker": marker, "markersize": 5, "markevery": (first, len(rows))}
        above.plot(row["losses"], color=style.color, linestyle=line, linewidth=1.2, **marked)
        if formula := row["formula_bytes"].get("worker"):
            left.plot(formula / _KIB, place, linestyle="", **_MARK)
    above.set(xlabel="step", ylabel="loss", ylim=(0, None))
    above.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.grid()
    styles = [style for style, *_ in looks]
    kib = [[one / _KIB] for one in sent.values()]
    draw_rows(left, "sent over TCP per worker and step (KiB)", styles, kib)
    times = [[1e3 * one for one in row["seconds"]] for row in rows]
    draw_rows(right, "step (ms): median, quartiles", styles, times)
    label_rows(left, list(sent))
    add_title(figure, "The same training, by each framework")
    present = [name for name in LOOKS if name in {row["framework"] for row in rows}]
    formula_mark = Line2D([], [], label="by the formula", linestyle="", **_MARK)
    add_legend(figure, [*(swatch(name, LOOKS[name][0]) for name in present), formula_mark])
    told = "; ".join(
        f"{_name(row)}: {num_bytes:,.0f} bytes, {format_seconds(row['step_s']['median'])}"
        for row, num_bytes in zip(rows, sent.values())
    )
    begin, end = rows[0]["losses"][0], rows[0]["losses"][-1]
    alt = f"Above, the losses of {len(rows)} contenders by step, from {begin:.2f} to {end:.2f}. "
    alt += f"Below, what a worker sends over TCP per step, and the median step. {told}."
    apart = [_name(row) for row in rows if not row["agrees"]]
    caption = f"Not all lines lie on each other: from one device differs {', '.join(apart)}."
    if not apart:
        worst = max(rows, key=lambda row: row["difference"])
        caption = f"All {len(rows)} lines lie on each other: no loss differs from one device's by "
        caption += f"more than {worst['difference']:.1e} ({worst['contender']})."
    return CaptionedFigure(figure, alt=alt, caption=f"{caption} Bytes are the kernel's count.")


def _trained(record: Row) -> list[Row]:
    return [row for row in record["contenders"] if "losses" in row]


def _name(row: Row) -> str:
    return f"{row['contender']} (recorded)" if row.get("recorded") else row["contender"]


def _by_role(num_bytes: Mapping[str, float]) -> dict[str, float]:
    """The mean by the role of a process: ``worker 0`` and ``worker 1`` are workers."""
    roles: dict[str, list[float]] = {}
    for name, each in num_bytes.items():
        roles.setdefault(name.rstrip("0123456789 "), []).append(each)
    return {role: statistics.fmean(each) for role, each in roles.items()}
